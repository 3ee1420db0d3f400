"""Parameters sharded by FSDP2 (``torch.distributed.fsdp.fully_shard``): the part of each that this process holds.

FSDP2 puts other memory behind a shard at the first forward pass, and gathered parameters in the place of shards in each
one. So whoever reads or writes shards calls :func:`reshard` before, and asks for them anew with :func:`local`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from lsgd.errors import ConfigError

RATES = ("lr", "initial_lr")
"""Entries of a parameter group: its rate, and, where a schedule sets that, its base."""


def _loaded(module: str, name: str) -> Any:
    """Return a class if its module is loaded: only sharded models load it, and importing it takes a second."""
    return getattr(sys.modules.get(module), name, None)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is distributed over several processes, including this one."""
    kind = _loaded("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, which shares its memory; the tensor itself if it is not sharded."""
    if not is_sharded(tensor):
        return tensor
    held = getattr(tensor, "_local_tensor", None)  # a hundred times faster than the public call, in each step
    if held is None:
        with torch.no_grad():
            held = tensor.to_local()  # type: ignore[attr-defined]
    return held  # type: ignore[no-any-return]


def begins(tensor: Tensor) -> list[int]:
    """Return where this process's part begins in the whole tensor, for each dimension."""
    starts = [0] * tensor.dim()
    if is_sharded(tensor):
        sharded: Any = tensor
        mesh, dim = sharded.device_mesh, sharded.placements[0].dim
        chunk = -(-tensor.shape[dim] // mesh.size())  # like torch.chunk
        starts[dim] = min(mesh.get_local_rank() * chunk, tensor.shape[dim])
    return starts


def sharding_of(tensor: Tensor) -> str:
    """Return a description of how a tensor is distributed; empty if it is not."""
    if not is_sharded(tensor):
        return ""
    placements = ", ".join(map(str, tensor.placements))  # type: ignore[attr-defined]
    return f"{placements} of {tuple(tensor.device_mesh.shape)}"  # type: ignore[attr-defined]


def mesh_of(model: nn.Module) -> Any:
    """Return the mesh of processes that a model is sharded over; None if it is not sharded.

    Raises ConfigError if it is sharded in a way that islands do not support.
    """
    reshard(sharded_modules(model))
    named: list[tuple[str, Any]] = list(model.named_parameters())
    sharded = [(name, parameter) for name, parameter in named if is_sharded(parameter)]
    if not sharded:
        return None
    if plain := [name for name, parameter in named if not is_sharded(parameter)]:
        raise ConfigError(
            f"the parameter {plain[0]} is not sharded, but {sharded[0][0]} is; call fully_shard on the whole model "
            f"too, after its parts, without ignored parameters"
        )
    mesh = sharded[0][1].device_mesh
    for name, parameter in sharded:
        placements = parameter.placements
        if len(placements) != 1 or not placements[0].is_shard() or parameter.device_mesh != mesh:
            raise ConfigError(
                f"the parameter {name} is distributed as {sharding_of(parameter)}; an island shards all parameters "
                f"over one one-dimensional mesh: fully_shard(model, mesh=init_device_mesh(device, (processes,))), "
                f"without tensor parallelism or replicas"
            )
    return mesh


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that FSDP2 shards."""
    kind = _loaded("torch.distributed.fsdp", "FSDPModule")
    return [m for m in model.modules() if kind is not None and isinstance(m, kind)]


def reshard(modules: Iterable[Any]) -> None:
    """Make FSDP2 drop gathered parameters: an evaluation leaves the root module's in place of the shards."""
    for module in modules:
        module.reshard()


def local_state(state: Any) -> Any:
    """Return a nested state with each tensor replaced by its local part, and NumPy's numbers by Python's."""
    state = _pytree.tree_map_only(np.generic, np.generic.item, state)  # a schedule's, which torch.load refuses
    return _pytree.tree_map_only(Tensor, local, state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state of local parts into an optimizer; tensors of sharded parameters become sharded again.

    A learning rate that a schedule sets stays the script's: a scheduler that was made before knows it, and one that is
    made afterwards begins with it.
    """
    rates = [{name: group[name] for name in RATES if name in group} for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = {
        place: {name: _like_state(value, parameters[place]) for name, value in values.items()}
        for place, values in state["state"].items()
        if place in range(len(parameters))  # else an entry of the optimizer's own
    }
    optimizer.load_state_dict({**state, "state": {**state["state"], **saved}})
    for group, own in zip(optimizer.param_groups, rates, strict=True):
        if "initial_lr" in group or "initial_lr" in own:
            group.pop("initial_lr", None)
            group.update(own)


def _like_state(value: Any, parameter: Tensor) -> Any:
    """Return an optimizer's value for a parameter, sharded like the parameter if it has the same shape."""
    if not isinstance(value, Tensor) or not value.dim() or value.shape != local(parameter).shape:
        return value
    return sharded_like(parameter, value.to(parameter.device)) if is_sharded(parameter) else value


def sharded_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a tensor sharded like a parameter, with ``part`` as this process's part; ``part`` if not sharded."""
    if not is_sharded(parameter):
        return part
    sharded: Any = parameter
    return _loaded("torch.distributed.tensor", "DTensor").from_local(  # type: ignore[no-any-return]
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by name, not copied; sharded parameters stay sharded."""
    reshard(sharded_modules(model))
    return {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}


@torch.no_grad()
def whole(tensors: Mapping[str, Tensor], *, here: bool) -> dict[str, Tensor]:
    """Return copies of tensors in host memory, with sharded ones gathered; empty unless ``here``.

    All processes that share the tensors must call it. It gathers one tensor at a time, to save memory.
    """
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        if here:
            copies[name] = gathered.detach().to("cpu", copy=True)
    return copies


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state in host memory; if sharded, the whole on the first process, empty elsewhere.

    All processes that share the model must call it.
    """
    mesh = mesh_of(model)
    return whole(state_of(model), here=mesh is None or mesh.get_local_rank() == 0)
