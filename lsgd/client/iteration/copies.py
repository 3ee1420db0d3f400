"""Copies of the weights that optimizers keep: schedule-free's z, Lookahead's slow weights, the average of torch's ASGD.

A round changes the weights. What an optimizer computes of a copy and the weights stays right if the copy moves by the
same change, and at the end all workers hold one model in either if the consensus averages both.
Copies are found by name: by their values, they are confused with momentum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lsgd.algorithms.base import all_finite
from lsgd.shards import local

COPIES: Mapping[str, str] = {"train_mode": "z", "lookahead_alpha": "lookahead_slow_buff", "t0": "ax"}
"""The entry of a parameter's state that is a copy, by an option that only groups of such optimizers have."""

MODE = "train_mode"
"""The option that says whether a schedule-free optimizer has put the weights to train with into the model."""


class Place(NamedTuple):
    """Where an optimizer keeps a copy of a parameter, from its first step on."""

    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    entry: str

    @property
    def copy(self) -> Tensor | None:
        """The copy, or this process's shard of it; None: there is none yet."""
        found = self.optimizer.state.get(self.parameter, {}).get(self.entry)
        return None if found is None else local(found)

    @property
    def weights(self) -> Tensor:
        """The parameter, or this process's shard of it."""
        return local(self.parameter).detach()


class WeightCopies:
    """The copies of the weights in some optimizers."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def places(self) -> list[Place]:
        """Return where copies are or will be: as many, in one order, on all workers with the same optimizers."""
        return [
            Place(optimizer, parameter, entry)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for option, entry in COPIES.items()
            if option in group
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def tensors(self) -> list[Tensor]:
        """Return the copies that there are."""
        return [copy for place in self.places() if (copy := place.copy) is not None]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let copies move by the change that the block makes to the weights.

        Inside, they are differences to the weights. So is what the block takes of an optimizer's state, or puts there.
        """
        self._add(-1.0)
        try:
            yield
        finally:
            self._add(1.0)

    @torch.no_grad()
    def _add(self, sign: float) -> None:
        held = [(copy, place.weights) for place in self.places() if (copy := place.copy) is not None]
        if held:
            copies, weights = map(list, zip(*held, strict=True))
            torch._foreach_add_(copies, weights, alpha=sign)

    @torch.no_grad()
    def mend(self) -> None:
        """Replace copies that are not finite by the weights, with which they begin."""
        for place in self.places():
            if (copy := place.copy) is not None and not all_finite([copy]):
                copy.copy_(place.weights)

    def averaged(self, anywhere: Sequence[bool]) -> list[Tensor]:
        """Return what this worker adds to the average: of each place that has a copy ``anywhere``, its own.

        Where it has none, because it has made no step with this parameter, it is the weights.
        """
        places = zip(self.places(), anywhere, strict=True)
        return [place.weights if (copy := place.copy) is None else copy for place, used in places if used]

    @torch.no_grad()
    def take(self, anywhere: Sequence[bool], values: Sequence[Tensor]) -> None:
        """Take the averages of what :meth:`averaged` returns on all workers."""
        used = [place for place, each in zip(self.places(), anywhere, strict=True) if each]
        for place, value in zip(used, values, strict=True):
            if place.copy is None:
                place.optimizer.state[place.parameter][place.entry] = torch.empty_like(place.parameter).detach()
            copy = place.copy
            assert copy is not None
            copy.copy_(value.view(copy.shape))

    @property
    def evaluated(self) -> list[Any]:
        """The schedule-free optimizers that have put the weights to evaluate with into the model."""
        return [o for o in self._optimizers if any(not group.get(MODE, True) for group in o.param_groups)]

    @contextmanager
    def trained(self) -> Iterator[None]:
        """Have the weights in the model that are trained, whatever the optimizers have put there to evaluate with."""
        evaluated = self.evaluated
        for optimizer in evaluated:
            optimizer.train()
        try:
            yield
        finally:
            for optimizer in evaluated:
                optimizer.eval()
