"""A model's parameters in one contiguous buffer for each dtype and device; the model works as before.

Each parameter's data becomes a view of a slice of the buffer. The view has its own storage, made through DLPack. So
``torch.save`` of a submodule writes that submodule only, and safetensors sees tensors that share nothing.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from lsgd.errors import ConfigError, DetachedError
from lsgd.shards import local, move, reshard, room_of, sharded_modules, sharding_of, shards

ALIGNMENT_NBYTES = 64
"""Every parameter starts at a multiple of this in its buffer: a cache line, and a CPU's widest vector."""


@dataclass(frozen=True)
class Slot:
    """Where a parameter is: ``numel`` elements from ``offset`` on, in the flat buffer number ``buffer``."""

    name: str
    parameter: nn.Parameter
    buffer: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter, or of this process's shard of it."""
        return local(self.parameter).numel()

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the parameter's view."""
        return _dense_stride(local(self.parameter).data)


class Layout:
    """Where the trainable parameters of a model are in flat buffers, one for each dtype and device.

    The model stays unchanged. Tied parameters occur once. Of sharded ones, the buffers have this process's shards.

    Raises ConfigError if it has no trainable parameter, or one that cannot be exchanged.

    Attributes:
        kinds: dtype of each buffer, and device of its parameters.
        lengths: of each buffer, in elements.
        kept: FSDP2's records of sharded parameters, by their identities.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(sharded_modules(model))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ConfigError("the model has no parameter with requires_grad: there is nothing to train")
        for name, parameter in named:
            _check(name, parameter)
        self.kept = shards(model)
        self.kinds = list(dict.fromkeys((p.dtype, p.device) for _, p in named))
        self.lengths = [0] * len(self.kinds)
        self.slots: list[Slot] = []
        for name, parameter in named:
            buffer = self.kinds.index((parameter.dtype, parameter.device))
            self.slots.append(Slot(name, parameter, buffer, self.lengths[buffer]))
            kept = self.kept.get(id(parameter))
            room = local(parameter).numel() if kept is None else room_of(kept)
            unit = ALIGNMENT_NBYTES // parameter.element_size()
            self.lengths[buffer] += -(-room // unit) * unit

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return views of buffers with this layout, shaped like the parameters, in the order of ``slots``."""
        return [_view(buffers[s.buffer], s.offset, local(s.parameter).data) for s in self.slots]


class FlatParameters:
    """The trainable parameters of a model, moved into flat buffers.

    Frozen parameters (``requires_grad`` false) never change, and stay where they are. The padding between parameters
    starts as zero, and is not part of the model.

    The Parameter objects stay the same, so optimizers and hooks stay valid. With ``offload``, the parameters stay where
    they are, and the buffers, and all tensors created like them, are in host memory, pinned for a GPU.

    Raises ConfigError as :class:`Layout`. Then nothing has changed.
    """

    def __init__(self, model: nn.Module, *, offload: bool = False, layout: Layout | None = None) -> None:
        self.model = model
        self._sharded = sharded_modules(model)
        reshard(self._sharded)
        self.layout = placed = layout or Layout(model)
        self.slots = placed.slots
        self._note_links()
        self._offload = offload
        self._copied: list[tuple[nn.Parameter, Tensor]] = []  # those that are not views, and their copies in buffers
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        self.buffers = [
            torch.zeros(
                n, dtype=dtype, device="cpu" if offload else device, pin_memory=offload and device.type == "cuda"
            )
            for n, (dtype, device) in zip(placed.lengths, placed.kinds, strict=True)
        ]
        self._addresses = [self._move(slot, placed.kept.get(id(slot.parameter))) for slot in self.slots]

    def _move(self, slot: Slot, kept: Any) -> int:
        """Move a parameter into its buffer, or copy it there; return the parameter's address from now on."""
        parameter, buffer = slot.parameter, self.buffers[slot.buffer]
        if kept is not None and not self._offload:
            move(kept, buffer[slot.offset : slot.offset + room_of(kept)])
            return local(parameter).data_ptr()
        view = _view(buffer, slot.offset, local(parameter).data, apart=not self._offload)
        view.copy_(local(parameter).data)
        if self._offload or sharding_of(parameter):
            self._copied.append((parameter, view))
        else:
            parameter.data = view
        return local(parameter).data_ptr()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Keep buffers and parameters equal inside and afterwards; an error inside leaves the parameters as before."""
        reshard(self._sharded)
        for parameter, view in self._copied:
            view.copy_(local(parameter).detach())
        yield
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the buffers back to the parameters that are not views of them."""
        for parameter, view in self._copied:
            local(parameter).copy_(view)

    def check(self) -> None:
        """Raise DetachedError unless the model has the joined parameters, in their buffers, and trains no others."""
        reshard(self._sharded)
        for slot, address in zip(self.slots, self._addresses, strict=True):
            if local(slot.parameter).data_ptr() != address:
                raise _detached(slot.name, "replaced")
        if self._links() != self._noted_links:
            self._check_objects()
            self._note_links()
        for parameter in self.frozen:
            if parameter.requires_grad:
                raise DetachedError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen at Worker.join and is trainable now; "
                    f"only those that require gradients at the join are exchanged"
                )

    def _note_links(self) -> None:
        self._modules = list(self.model.modules())
        self._noted_links = self._links()

    def _links(self) -> list[int]:
        """Return the identities of all modules' parts, four times faster than a walk by names."""
        parts = (part for m in self._modules for part in (m._parameters, m._modules))
        return [id(x) for part in parts for x in part.values()]

    def _check_objects(self) -> None:
        joined, named = {id(s.parameter): s.name for s in self.slots}, dict(self.model.named_parameters())
        for name, parameter in named.items():
            if parameter.requires_grad and id(parameter) not in joined:
                raise _detached(name, "replaced" if name in joined.values() else "added")
        for address in joined.keys() - {id(parameter) for parameter in named.values()}:
            raise _detached(joined[address], "removed")


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Return the model's buffers that can be averaged: floating-point and not empty; shared ones occur once."""
    return [b for _, b in named_floating_buffers(model)]


def named_floating_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the same buffers with their names."""
    buffers = ((name, b) for name, x in model.named_buffers() for b in written(x))
    return ((name, b) for name, b in buffers if b.is_floating_point() and b.numel())


def written_buffers(model: nn.Module) -> list[Tensor]:
    """Return what can be written of a model's buffers: :func:`written`."""
    return [part for x in model.buffers() for part in written(x)]


def written(x: Tensor) -> Iterator[Tensor]:
    """Yield what can be written of a buffer or a frozen parameter: of an expanded one what it repeats.

    Of a sparse one, such as a graph's matrix, it is nothing: it stays as the script has made it.
    """
    if x.layout == torch.strided:
        for dim in reversed(range(x.dim())):
            x = x if x.stride(dim) or x.shape[dim] < 2 else x.select(dim, 0)
        yield x


def describe(model: nn.Module, *, whole: bool = False) -> tuple[str, str]:
    """Return a digest of the names, shapes, dtypes and memory formats of all parameters and buffers, and a summary.

    With ``whole``, the digest is independent of the sharding.
    """
    named = list(model.named_parameters())
    orders = [_order_of(t) for _, t in named]
    lines = [
        f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}{order}{'' if whole else sharding_of(t)}"
        for (name, t), order in zip(named, orders, strict=True)
    ]
    lines += [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.named_buffers()]
    count = sum(p.numel() for _, p in named)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for _, p in named})
    sharded = next((f", sharded as {words}" for _, p in named if (words := sharding_of(p))), "")
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    reordered = f", {n} of them in another memory format" if (n := sum(map(bool, orders))) else ""
    tensors = f"{len(lines)} tensors of {', '.join(dtypes)}{reordered}{sharded}"
    summary = f"{count:,} parameters in {tensors} (digest {digest[:8]})"
    return digest, summary


def _detached(name: str, what: str) -> DetachedError:
    return DetachedError(
        f"the parameter {name} was {what} after Worker.join (for example by model.to(...), model.layer = ..., "
        f"load_state_dict(..., assign=True) or accelerate's LocalSGD), so its training would not be exchanged; do that "
        f"before the join, or copy the new values into the old parameter, as load_state_dict does "
        f"without assign=True"
    )


def _check(name: str, parameter: nn.Parameter) -> None:
    if parameter.layout != torch.strided or parameter.is_meta:
        what = "on the meta device" if parameter.is_meta else f"of layout {parameter.layout}"
        raise ConfigError(f"the parameter {name} is {what}; only dense parameters in real memory can be exchanged")
    if not parameter.is_floating_point():
        raise ConfigError(f"the parameter {name} is {parameter.dtype}; only floating-point parameters can be exchanged")


def _view(buffer: Tensor, offset: int, like: Tensor, *, apart: bool = True) -> Tensor:
    """Return a slice of ``buffer`` with the shape and strides of ``like`` and, if ``apart``, its own storage."""
    flat = buffer[offset : offset + like.numel()]
    if apart:
        flat = from_dlpack(flat)
    return flat.as_strided(like.shape, _dense_stride(like))


def _order_of(parameter: Tensor) -> str:
    """Return the order of a trained parameter's elements in the flat buffers; empty if it is the usual one."""
    like = torch.empty_like(local(parameter), device="meta")
    return f" in memory as {like.stride()}" if parameter.requires_grad and not like.is_contiguous() else ""


def _dense_stride(like: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides if it is dense, else contiguous ones."""
    return torch.empty_like(like, device="meta").stride()
