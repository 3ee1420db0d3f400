"""QSGD: Alistarh et al., arXiv 1610.02132, with the min-max quantizer and the two-round exchange of QSGD-TF."""

from collections.abc import Iterator

from torch import Tensor

from lsgd.algorithms.base import Flat
from lsgd.algorithms.quantized_gradient import QuantizedGradient
from lsgd.group import Group
from lsgd.messages import Round
from lsgd.settings import QSGDSettings


class QSGD(QuantizedGradient):
    """``g ← Q2(mean of all members' Q1(g))``, with stochastic rounding in both rounds, so that it has no bias."""

    settings: QSGDSettings

    def __init__(self, settings: QSGDSettings, parameters: Flat, run: str) -> None:
        super().__init__(settings, run)

    def reduce(
        self, gradient: Tensor, result: Tensor, index: int, group: Group, round: Round
    ) -> Iterator[None]:
        """Average one bucket over all members."""
        return self.quantized_mean(gradient, result, index, round)
