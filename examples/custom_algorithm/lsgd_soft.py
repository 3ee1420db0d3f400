"""An algorithm for lsgd in one file: every period, each model moves toward the mean of all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from lsgd.algorithms.averaging import contribute, divide, empty_sums
from lsgd.algorithms.base import Algorithm, Commit, Flat
from lsgd.collectives.group import Group
from lsgd.lazy import Tensor, no_grad
from lsgd.protocol.messages import Round
from lsgd.settings import AlgorithmSettings, Schedule, setting


@dataclass(frozen=True)
class SoftSettings(AlgorithmSettings):
    """Soft averaging: a round moves each model toward the mean."""

    name: ClassVar[str] = "soft"
    summary: ClassVar[str] = "soft averaging, models move toward their mean every period"
    islands: ClassVar[bool] = True

    period: int = setting(16, "iterations of a worker, on average, between exchanges", low=1, high=1 << 30)
    softness: float = setting(0.5, "how far from the mean a model stays; 0: all models become the mean", low=0, high=1)

    def schedule(self) -> Schedule:
        """Exchange every ``period`` steps."""
        return Schedule(self.period, self.period)

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """Count the model twice, except the worker's own share."""
        return 2 * (workers - 1) / workers * 4 * numel / self.period

    def create(self, parameters: Flat, run: str = "") -> Soft:
        """Return the algorithm."""
        return Soft(self)


class Soft(Algorithm):
    """``x ← mean + softness (x - mean)``; a non-finite model is excluded, and takes the mean."""

    settings: SoftSettings

    def __init__(self, settings: SoftSettings) -> None:
        self.settings = settings
        self._sums: list[Tensor] = []

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Make new scratch tensors: a failed exchange may still write to the old ones."""
        self._sums = empty_sums(parameters)

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round) -> Commit | None:
        """Average the models, to change them when all means have arrived."""
        finite = self.is_finite(parameters)
        contribute(parameters, self._sums, finite)
        for total in self._sums:
            group.all_reduce(total).wait()
        usable = divide(self._sums, group.size)
        return Commit(partial(self._move, parameters), (~finite, usable))

    def _move(self, parameters: Flat, broken: float, usable: float) -> None:
        """Move the model toward the mean, if there is one, or to it if the model is ``broken``."""
        self.replaced = bool(broken)
        softness = 0.0 if broken else self.settings.softness
        for x, mean in zip(parameters, self._sums, strict=True) if usable else ():
            x.copy_(mean[:-1]) if softness == 0 else x.lerp_(mean[:-1], 1.0 - softness)
