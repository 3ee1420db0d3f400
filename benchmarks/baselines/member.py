"""A process that trains by a baseline, and what a baseline is to it."""

import contextlib
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

TIMEOUT = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Member:
    """One process among those that train together.

    Args:
        rank: its number.
        addresses: of all, in rank order.
        period: steps between two exchanges, for the methods that have one.
        batch_size: samples in a step.
    """

    rank: int
    addresses: Sequence[str]
    period: int
    batch_size: int

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.addresses)

    @property
    def address(self) -> str:
        """Its own, by which the others reach it."""
        return self.addresses[self.rank]

    @property
    def first_address(self) -> str:
        """That of rank 0."""
        return self.addresses[0]


Pair = tuple[nn.Module, torch.optim.Optimizer]
"""The model to call, and the optimizer to step."""

Attach = Callable[[nn.Module, torch.optim.Optimizer, Member], contextlib.AbstractContextManager[Pair]]
