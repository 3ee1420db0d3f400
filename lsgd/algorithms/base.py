"""What every algorithm is: at most three moments of an iteration, on flat tensors and a Group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from lsgd.lazy import torch
from lsgd.protocol.messages import Round
from lsgd.settings import AlgorithmSettings

if TYPE_CHECKING:
    from torch import Tensor

    from lsgd.collectives.group import Group

Flat: TypeAlias = "Sequence[Tensor]"
"""All parameters (or gradients) of a model: one contiguous one-dimensional tensor for each dtype and device."""


class Algorithm:
    """Base of the algorithms; each overrides the moments that it needs.

    A generation begins with :meth:`reset`; then the moments of every iteration are called in order, each with the
    round if the iteration has one. An algorithm never sees a model, an optimizer or a socket; it keeps mathematical
    state only, and all members have the same kind of state for the same model and settings.

    Every exchange works on scratch tensors, and commits after its last collective: when a moment raises, parameters,
    gradients and state are as they were before it. A generation that failed may still write into its scratch
    tensors later, so :meth:`reset` drops them.
    """

    settings: AlgorithmSettings
    """Numeric ones may be replaced by others between rounds."""

    spans_backward: ClassVar[bool] = False
    """Whether a round is completed by :meth:`after_backward` only; else :meth:`before_forward` completes it."""

    def reset(self, parameters: Flat, group: Group, round: Round) -> None:
        """Begin a generation, in its first round: rebuild what depends on who the members are.

        Newcomers have the model of ``round.source`` already, and all have its :meth:`shared_state`.
        """

    def before_forward(self, parameters: Flat, group: Group, round: Round | None) -> None:
        """Exchange models, or begin to: the moment before an iteration's forward pass."""

    def after_backward(self, parameters: Flat, gradients: Flat, group: Group, round: Round | None) -> None:
        """Exchange gradients, or write exchanged models back: after the backward pass, before the optimizer."""

    def after_step(self, parameters: Flat) -> None:
        """Act on every local step, after the optimizer's."""

    def settle(self, parameters: Flat) -> None:
        """Complete an exchange that is still under way, before the group is used for anything else.

        The worker calls it at the start of every round, the final one included.
        """

    def shared_state(self) -> Sequence[Tensor]:
        """Return the tensors that all members hold alike, to be overwritten by those of another member.

        The worker sends them from ``round.source`` to all members when a generation begins, before :meth:`reset`.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors (not copies), lists of them, and numbers, by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, for the same model and settings."""


def clones(tensors: Flat) -> list[Tensor]:
    """Return a copy of each tensor."""
    return [x.detach().clone() for x in tensors]


def empties(tensors: Flat) -> list[Tensor]:
    """Return an uninitialized tensor like each of ``tensors``."""
    return [torch.empty_like(x) for x in tensors]


def copy_all(targets: Flat, sources: Flat) -> None:
    """Overwrite each target by its source."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def all_finite(tensors: Flat) -> bool:
    """Return whether no element is NaN or infinite (one pass, no temporary; NaN wins every minimum)."""
    bounds = [torch.stack(x.aminmax()) for x in tensors if x.numel()]
    return all(math.isfinite(bound) for pair in bounds for bound in pair.tolist())
