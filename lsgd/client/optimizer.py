"""Muon for a model's hidden matrices, and AdamW for the rest, as one optimizer."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lsgd.client.control.joining import log_to_stderr
from lsgd.errors import ConfigError
from lsgd.shards import mesh_of

logger = logging.getLogger("lsgd")

TABLES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
"""Modules whose weights are no matrices, even if they are two-dimensional."""

NAMED = 4
"""How many tensors a log line names."""


class MuonAdamW(torch.optim.Optimizer):
    """A ``torch.optim.Muon`` and a ``torch.optim.AdamW`` as one optimizer, which :func:`muon` makes.

    Trainers, schedulers and GradScaler take one object. In its parameter groups, the entry ``muon`` says whose they
    are. Groups that are added later are AdamW's, unless they have a true ``muon``.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self._muon, self._adamw = muon, adamw
        groups = [{**group, "muon": part is muon} for part in (muon, adamw) for group in part.param_groups]
        super().__init__(groups, {**adamw.defaults, "muon": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the missing options of the optimizer whose it is."""
        part = self._muon if param_group.get("muon") else self._adamw
        super().add_param_group({**part.defaults, **param_group, "muon": part is self._muon})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. The closure, if there is one, computes the loss and the gradients, once."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for part, is_muon in ((self._muon, True), (self._adamw, False)):
            part.param_groups = [group for group in self.param_groups if group["muon"] == is_muon]
            part.state = self.state  # load_state_dict replaces both
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}


def muon(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.999),
    exclude: Collection[str] = (),
    include: Collection[str] = (),
) -> MuonAdamW:
    """Return an optimizer of a whole model: Muon for its hidden matrices, AdamW for the rest. It logs what got which.

    Muon is ``torch.optim.Muon`` (https://kellerjordan.github.io/posts/muon) with the step size of arXiv 2502.16982,
    which is as large as AdamW's. So learning rate and weight decay carry over from AdamW, and both share them.

    Muon gets the trainable two-dimensional parameters with ``weight`` in their own name: those of ``nn.Linear``,
    attention and recurrent layers. Query, key and value in one parameter count as one matrix, and so do an LSTM's
    gates. AdamW gets

    - embeddings (``nn.Embedding`` and its subclasses), and what is tied to them;
    - the output layer: the last module with such a parameter in the order of ``model.modules()``, if it has only one
      and is not in an ``nn.ModuleList``, which is where repeated blocks are;
    - what is not two-dimensional: biases, norms, convolutions, experts that share a parameter;
    - what has another name, such as a table of positions or hand-made low-rank factors;
    - matrices with fewer rows or columns than two or, in an island, than its processes.

    Args:
        model: on its device and in its dtype; perhaps sharded by FSDP2, or compiled.
        lr: base rate of both.
        weight_decay: decoupled decay of all parameters.
        momentum: Muon's momentum.
        betas: AdamW's decay rates.
        exclude: patterns of parameter names that AdamW gets too, such as ``"*score.weight"``.
        include: patterns of parameter names that Muon gets in spite of these rules.

    Raises:
        ConfigError: torch is older than 2.9, Muon would get nothing, or a pattern is wrong.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"lsgd.client.muon needs torch 2.9 or newer, and this is {torch.__version__}: pip install 'torch>=2.9', or "
            f"use torch.optim.AdamW"
        )
    mesh = mesh_of(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {id(p) for p in _hidden(model, smallest=2 if mesh is None else max(2, mesh.size()))}
    hidden = {name for name, p in named.items() if id(p) in found}
    hidden = hidden - _fitting(exclude, named) | _fitting(include, named)
    matrices = {name: p for name, p in named.items() if name in hidden}
    rest = {name: p for name, p in named.items() if name not in hidden}
    if not matrices:
        raise ConfigError(
            "lsgd.client.muon found no hidden matrix in the model, only embeddings, an output layer, convolutions, "
            "vectors, or matrices with fewer rows or columns than two or than an island's processes: use "
            "torch.optim.AdamW, or name matrices with include=[...]"
        )
    if wrong := [name for name, p in matrices.items() if p.ndim != 2]:
        raise ConfigError(f"include names {wrong[0]}, which has {matrices[wrong[0]].ndim} dimensions; Muon takes two")
    first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
    log_to_stderr(logging.INFO if first else logging.WARNING)
    logger.info("Muon updates %s", _summary(matrices))
    logger.info("AdamW updates %s", _summary(rest))
    fast = torch.optim.Muon([{"params": matrices.values()}], lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
    return MuonAdamW(fast, torch.optim.AdamW([{"params": rest.values()}], lr, betas, weight_decay=weight_decay))


def _hidden(model: nn.Module, smallest: int) -> Iterator[nn.Parameter]:
    """Yield a model's matrices that are neither embeddings nor the output layer's."""
    modules = dict(model.named_modules())
    others = {id(p) for module in modules.values() if isinstance(module, TABLES) for p in module.parameters()}
    owned = {place: list(_matrices(module)) for place, module in modules.items() if not isinstance(module, TABLES)}
    last = next((place for place in reversed(owned) if owned[place]), "")
    above = [modules[last[:end]] for end, letter in enumerate(last) if letter == "."]
    if len(owned.get(last, ())) == 1 and not any(isinstance(module, nn.ModuleList) for module in above):
        others.add(id(owned[last][0]))
    for matrices in owned.values():
        yield from (p for p in matrices if id(p) not in others and min(p.shape) >= smallest)


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices among a module's own parameters."""
    return (p for name, p in module.named_parameters(recurse=False) if p.ndim == 2 and "weight" in name)


def _fitting(patterns: Collection[str], names: Collection[str]) -> set[str]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = {pattern: {name for name in names if fnmatchcase(name, pattern)} for pattern in patterns}
    for pattern, fitting in found.items():
        if not fitting:
            raise ConfigError(f"no trainable parameter fits {pattern!r}; names are those of model.named_parameters()")
    return set().union(*found.values())


def _summary(named: Mapping[str, nn.Parameter]) -> str:
    """Return how many tensors these are, and the names of the first ones that are not vectors."""
    names = [name for name, p in named.items() if p.ndim > 1]
    some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    return f"{len(named)} tensors of {sum(p.numel() for p in named.values()):,} parameters" + (some and f": {some}")
