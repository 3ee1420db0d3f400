"""Synchronous SGD: gradients averaged at full precision, as torch's DistributedDataParallel does it."""

from collections.abc import Iterator
from itertools import repeat

from torch import Tensor

from lsgd.algorithms.base import Flat
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.group import Group
from lsgd.messages import Round
from lsgd.pipeline import UNDER_WAY
from lsgd.settings import AllReduceSettings


class AllReduce(GradientAlgorithm):
    """``g ← mean of all members' g``, in the gradient's dtype."""

    settings: AllReduceSettings

    def __init__(self, settings: AllReduceSettings, parameters: Flat) -> None:
        super().__init__(settings.bucket_mib)
        self.settings = settings

    def reduce(
        self, gradient: Tensor, result: Tensor, index: int, group: Group, round: Round
    ) -> Iterator[None]:
        """Average one bucket; divided first, so that float16 sums do not overflow.

        It is waited for when the second one after it has begun.
        """
        result.copy_(gradient).div_(group.size)
        transfer = group.all_reduce(result)
        yield from repeat(None, UNDER_WAY - 1)
        transfer.wait()
