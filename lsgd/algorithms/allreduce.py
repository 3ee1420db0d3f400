"""Synchronous SGD: gradients averaged at full precision, as in torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

from lsgd.algorithms.base import Flat
from lsgd.algorithms.gradient import GradientAlgorithm, GradientSettings
from lsgd.collectives.group import Group
from lsgd.collectives.pipeline import UNDER_WAY
from lsgd.lazy import Tensor
from lsgd.protocol.messages import Round


@dataclass(frozen=True)
class AllReduceSettings(GradientSettings):
    """Synchronous SGD: the gradients of every iteration are averaged at full precision."""

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "synchronous SGD, gradients averaged at full precision"

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """Each gradient twice, except the worker's own share."""
        return 2 * (workers - 1) / workers * 4 * numel

    def create(self, parameters: Flat, run: str = "") -> AllReduce:
        """Return the algorithm."""
        return AllReduce(self)


class AllReduce(GradientAlgorithm):
    """``g ← mean of all members' g``, in the gradient's dtype."""

    def reduce(self, gradient: Tensor, result: Tensor, index: int, group: Group, order: Round) -> Iterator[None]:
        """Average one bucket, divided first so that float16 sums do not overflow.

        The pipeline waits for a bucket once it has begun the second one after it.
        """
        result.copy_(gradient).div_(group.size)
        transfer = group.all_reduce(result)
        yield from repeat(None, UNDER_WAY - 1)
        transfer.wait()
