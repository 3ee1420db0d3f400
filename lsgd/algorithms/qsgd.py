"""QSGD: Alistarh et al., arXiv 1610.02132, with the min-max quantizer and the two-round exchange of QSGD-TF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lsgd.algorithms.base import Flat
from lsgd.algorithms.common import rounding
from lsgd.algorithms.quantized_gradient import QuantizedGradient, QuantizedGradientSettings


@dataclass(frozen=True)
class QSGDSettings(QuantizedGradientSettings):
    """QSGD (arXiv 1610.02132): gradients averaged in 8 bits between all workers, rounded without bias."""

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "QSGD, gradients in 8 bits, stochastic rounding (arXiv 1610.02132)"

    rounding: str = rounding("stochastic")

    def create(self, parameters: Flat, run: str = "") -> QSGD:
        """Return the algorithm."""
        return QSGD(self, parameters, run)


class QSGD(QuantizedGradient):
    """``g ← Q2(mean of all members' Q1(g))``, with stochastic rounding in both rounds, so it has no bias."""
