"""The base of all algorithms: up to three hooks per iteration, on flat tensors and a Group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from lsgd.codecs.base import on_host
from lsgd.collectives.group import Group
from lsgd.layers import WHOLE, Layers
from lsgd.lazy import Lazy, Tensor, no_grad, torch
from lsgd.protocol.messages import Round
from lsgd.settings import AlgorithmSettings

if TYPE_CHECKING:
    from lsgd import scattered
else:
    scattered = Lazy("lsgd.scattered")

Flat: TypeAlias = "Sequence[Tensor]"
"""All parameters (or gradients) of a model: one contiguous one-dimensional tensor per dtype and device."""


def _nothing(*sums: float) -> None:
    pass


@dataclass(frozen=True)
class Commit:
    """What an exchange changes, once it has succeeded in all processes of this member.

    A member has several processes if its model is sharded: each has a part of the model, and exchanges it alone.

    Args:
        change: function that makes the changes without exchanging anything. It gets the sums of ``judged``.
        judged: numbers that this process has found in its part, to add up over the member's processes: whether
            something in it is non-finite, for example. A tensor stays on its device until then.
    """

    change: Callable[..., None] = _nothing
    judged: Sequence[float | Tensor] = ()

    def numbers(self) -> list[float]:
        """Return ``judged``, which waits once for the device that tensors are on."""
        tensors = [x.reshape(-1).to(torch.float64) for x in self.judged if isinstance(x, torch.Tensor)]
        found = iter(torch.cat([x.to(tensors[0].device) for x in tensors]).tolist() if tensors else ())
        return [
            number
            for x in self.judged
            for number in (islice(found, x.numel()) if isinstance(x, torch.Tensor) else (float(x),))
        ]

    @no_grad
    def apply(self, sums: Sequence[float] | None = None) -> None:
        """Make the changes; ``sums`` of ``judged``, None for a member of one process."""
        self.change(*(self.numbers() if sums is None else sums))


class Algorithm:
    """Base of the algorithms; each overrides the hooks that it needs.

    A generation begins with :meth:`reset`. Then every iteration with a round calls the hooks in order, and every
    other one :meth:`after_step`. An algorithm never sees a model, an optimizer or a socket. It keeps only mathematical
    state, of the same form on all members with the same model and settings.

    A hook exchanges in scratch tensors, and returns a :class:`Commit` with the changes to parameters, gradients and
    state. The worker makes them if the exchange has succeeded in all its processes. So if a hook raises, nothing has
    changed. A failed generation may still write into its scratch tensors later, so :meth:`reset` drops them.
    """

    settings: AlgorithmSettings
    """Numeric values may change between rounds."""

    finite: Tensor | None = None
    """Whether the model that enters a round is finite in all processes of this member; None: nobody has looked."""

    muon: bool = False
    """Whether this member's optimizer is Muon."""

    counts: bool = True
    """Whether this member's model counts in the consensus at the end of the run."""

    replaced: bool = False
    """Whether the last commit has replaced this member's model, because it was not finite; each commit says so anew."""

    agreement: float | None = None
    """How far the members' changes agreed in the last round: the square of their mean's length over the mean of their
    squared lengths, 1 if all are equal, 1/N if the N have nothing in common. None: nobody has compared them."""

    layers: Layers = WHOLE
    """The layers of the model, as the worker has them."""

    agreements: Mapping[str, float] = MappingProxyType({})
    """The same by layer, as of the last round that exchanged each; empty: nobody has compared them."""

    transfer_s: float = 0.0
    """Seconds that the last exchange took, as far as training can hide it; work that is left to a GPU is not in it."""

    spans_backward: ClassVar[bool] = False
    """Whether :meth:`after_backward` completes a round; otherwise :meth:`before_forward` does."""

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Begin a generation in its first round: rebuild what depends on the members.

        Newcomers already have the model of ``round.source``, and all members have its :meth:`shared_state`.
        """

    def before_forward(self, parameters: Flat, group: Group, order: Round) -> Commit | None:
        """Exchange models, or begin to; called before the forward pass."""
        return None

    def is_finite(self, parameters: Flat) -> Tensor:
        """Return whether the model that enters a round is finite in all processes of this member: a boolean.

        Call it in :meth:`before_forward`: it takes the worker's answer if there is one, else a pass over the model.
        The answer stays on the device; a :class:`Commit` may judge it.
        """
        return finiteness(parameters) if self.finite is None else self.finite

    def after_backward(self, parameters: Flat, gradients: Flat, group: Group, order: Round) -> Commit | None:
        """Exchange gradients, or complete an exchange of models; called between the backward pass and the optimizer."""
        return None

    @property
    def acts_after_step(self) -> bool:
        """Whether the next :meth:`after_step` reads or changes the parameters; otherwise it may get stale ones."""
        return type(self).after_step is not Algorithm.after_step

    def after_step(self, parameters: Flat) -> Commit | None:
        """Pull the model towards something, or complete an exchange; called after every step of the optimizer.

        If that exchange has failed, it raises ExchangeError, and so does the next :meth:`settle`.
        """
        return None

    def settle(self, parameters: Flat) -> Commit | None:
        """Complete a pending exchange, before the group is used for anything else.

        The worker calls it at the start of every round, including the final one, and if the members change, before it
        leaves their group. The exchange stays pending until its commit is applied.
        """
        return None

    def drop_pending(self) -> None:
        """Drop a pending exchange that has failed in a process of this member."""

    def shared_state(self) -> Sequence[Tensor]:
        """Return the tensors that are equal on all members, for the worker to overwrite with another member's.

        When a generation begins, all members have those of ``round.source`` before :meth:`reset`; what a member has
        already is not sent.
        """
        return ()

    def common_model(self) -> Flat:
        """Return the part of the shared state with which a newcomer's model begins; empty: with the source's model."""
        return ()

    @property
    def can_be_followed(self) -> bool:
        """Whether a newcomer can take part in rounds while it lacks parts of the shared state.

        So it is if the common model is all that a newcomer needs, the shared state changes only when a round is
        committed, each number by what all members have received for it, and newcomers (``order.new``) have no say.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state by name: tensors (not copied), lists of them, and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned for the same model and settings."""


def is_muon(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Return whether one of a worker's optimizers is Muon, by the name of its class: there are several."""
    return any("muon" in type(optimizer).__name__.lower() for optimizer in optimizers)


def clones(tensors: Flat) -> list[Tensor]:
    """Return a copy of each tensor."""
    return [x.detach().clone() for x in tensors]


def begun_with(common: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a common model as workers take it over, in the dtype of theirs; maybe not a copy."""
    return common.to(dtype).to(common.dtype)


def empties(tensors: Flat) -> list[Tensor]:
    """Return an uninitialized tensor like each of ``tensors``."""
    return [torch.empty_like(x) for x in tensors]


def copy_all(targets: Flat, sources: Flat) -> None:
    """Copy each source to its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def finiteness(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether no element is NaN or infinite, on the device (one pass, no temporary; minima propagate NaN)."""
    found = [torch.stack(x.aminmax()).isfinite().all() for x in tensors if x.numel()]
    return torch.stack([x.to(found[0].device) for x in found]).all() if found else torch.tensor(True, device="cpu")


def copy_judged(targets: Flat, sources: Flat) -> Tensor:
    """Copy each source to its target, and return in the same pass what :func:`finiteness` says of them."""
    found = []
    for target, source in zip(targets, sources, strict=True):
        extremes = list[Tensor]()
        for x, out in scattered.in_rows(source, target, writes=False):
            out.copy_(x)
            extremes += out.aminmax() if out.numel() else ()
        found += [torch.stack(extremes).isfinite().all()] if extremes else []
    return torch.stack([x.to(found[0].device) for x in found]).all() if found else torch.tensor(True, device="cpu")


def pull(parameters: Flat, towards: Sequence[tuple[Flat, float]]) -> None:
    """``x ← x + strength (z - x)`` for each z and its strength, one after the other in one pass."""
    models, strengths = [model for model, strength in towards if strength], [s for _, s in towards if s]
    for x, *zs in zip(parameters, *models, strict=True) if models else ():
        for part, *others in scattered.in_rows(x, *zs, writes=True):
            for z, strength in zip(others, strengths, strict=True):
                part.lerp_(z, strength)


def all_finite(tensors: Flat) -> bool:
    """Return whether no element is NaN or infinite, once the device has found that out."""
    return bool(finiteness(tensors))


def zero_unless(condition: Tensor, x: Tensor) -> Tensor:
    """Fill ``x`` with zeros unless a boolean is true, without waiting for the device; return ``x``."""
    if not on_host(condition):
        return x.masked_fill_(~condition, 0)
    return x if condition else x.zero_()


def chosen(condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """Return ``x`` if a boolean is true, else ``other``, without waiting for the device; maybe not a copy."""
    if not on_host(condition):
        return torch.where(condition, x, other)
    return x if condition else other
