"""The base of all algorithms: up to three hooks per iteration, on flat tensors and a Group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from lsgd.collectives.group import Group
from lsgd.lazy import Tensor, torch
from lsgd.protocol.messages import Round
from lsgd.settings import AlgorithmSettings

Flat: TypeAlias = "Sequence[Tensor]"
"""All parameters (or gradients) of a model: one contiguous one-dimensional tensor per dtype and device."""


class Algorithm:
    """Base of the algorithms; each overrides the hooks that it needs.

    A generation begins with :meth:`reset`. Then every iteration calls the hooks in order, with its round if it has
    one. An algorithm never sees a model, an optimizer or a socket. It keeps only mathematical state, of the same form
    on all members with the same model and settings.

    Every exchange works on scratch tensors and commits after its last collective. If a hook raises, parameters,
    gradients and state are unchanged. A failed generation may still write into its scratch tensors later, so
    :meth:`reset` drops them.
    """

    settings: AlgorithmSettings
    """Numeric values may change between rounds."""

    finite: bool | None = None
    """Whether the model that enters a round is finite, if the worker has looked; for :meth:`before_forward` alone."""

    spans_backward: ClassVar[bool] = False
    """Whether :meth:`after_backward` completes a round; otherwise :meth:`before_forward` does."""

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Begin a generation in its first round: rebuild what depends on the members.

        Newcomers already have the model of ``round.source``, and all members have its :meth:`shared_state`.
        """

    def before_forward(self, parameters: Flat, group: Group, order: Round | None) -> None:
        """Exchange models, or begin to; called before the forward pass."""

    def is_finite(self, parameters: Flat, group: Group) -> bool:
        """Return whether the model that enters a round is finite in all processes of this member.

        Call it once, in :meth:`before_forward`: it takes the worker's answer if there is one, else a pass over it.
        """
        known, self.finite = self.finite, None
        return group.agree(all_finite(parameters)) if known is None else known

    def after_backward(self, parameters: Flat, gradients: Flat, group: Group, order: Round | None) -> None:
        """Exchange gradients, or write exchanged models back; called between the backward pass and the optimizer."""

    @property
    def acts_after_step(self) -> bool:
        """Whether the next :meth:`after_step` reads or changes the parameters; otherwise it may get stale ones."""
        return type(self).after_step is not Algorithm.after_step

    def after_step(self, parameters: Flat) -> None:
        """Called after every step of the optimizer."""

    def settle(self, parameters: Flat) -> None:
        """Complete a pending exchange, before the group is used for anything else.

        The worker calls it at the start of every round, including the final one.
        """

    def shared_state(self) -> Sequence[Tensor]:
        """Return the tensors that are equal on all members, for the worker to overwrite with another member's.

        When a generation begins, ``round.source`` sends them to all members before :meth:`reset`.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state by name: tensors (not copied), lists of them, and numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned for the same model and settings."""


def clones(tensors: Flat) -> list[Tensor]:
    """Return a copy of each tensor."""
    return [x.detach().clone() for x in tensors]


def empties(tensors: Flat) -> list[Tensor]:
    """Return an uninitialized tensor like each of ``tensors``."""
    return [torch.empty_like(x) for x in tensors]


def copy_all(targets: Flat, sources: Flat) -> None:
    """Copy each source to its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def all_finite(tensors: Flat) -> bool:
    """Return whether no element is NaN or infinite (one pass, no temporary; minima propagate NaN)."""
    bounds = [torch.stack(x.aminmax()) for x in tensors if x.numel()]
    return all(math.isfinite(bound) for pair in bounds for bound in pair.tolist())
