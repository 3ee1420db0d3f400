"""Learning rates over a run: factors of the base rate, by the share of the run that is done."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from lsgd.errors import ConfigError
from lsgd.settings import nearest

KINDS = ("wsd", "cosine", "linear")
"""Warm-up, then: constant with a linear decay at the end (warm-up, stable, decay); half a cosine; a line."""


def check(kind: str, warmup: float, decay: float) -> None:
    """Raise ConfigError if an argument of :func:`factor` is unknown or out of range."""
    if kind not in KINDS:
        raise ConfigError(f"there is no schedule {kind!r}; {nearest(kind, KINDS)}")
    for name, share in (("warmup", warmup), ("decay", decay)):
        if not 0 <= share < 1:
            hint = "; for N steps of M, give N / M" if share >= 1 else ""
            raise ConfigError(f"{name} = {share:g} is not a share of the run from 0 to less than 1{hint}")
    if kind == "wsd" and warmup + decay > 1:
        raise ConfigError(
            f"warmup = {warmup:g} and decay = {decay:g} add up to more than the whole run; lower one of them"
        )


def factor(kind: str, progress: float, warmup: float, decay: float) -> float:
    """Return what to multiply the base learning rate by, from 0 to 1.

    It rises linearly from 0 during the warm-up. Then ``wsd`` stays at 1 and falls linearly to 0 in the last part of the
    run; ``cosine`` falls to 0 as half a cosine (SGDR, arXiv 1608.03983, without restarts); ``linear`` falls linearly.

    All three numbers are shares of the run; only ``wsd`` has a ``decay``.
    """
    if progress < warmup:
        return progress / warmup
    if kind == "wsd":
        return min(1.0, (1 - progress) / decay) if decay else 1.0
    after = (progress - warmup) / (1 - warmup)
    return 1 - after if kind == "linear" else (1 + math.cos(math.pi * after)) / 2


def _factor_at(kind: str, warmup: float, decay: float, progress: float) -> float:
    return factor(kind, progress, warmup, decay)


def set_rates(optimizer: torch.optim.Optimizer, times: float) -> None:
    """Set each parameter group's learning rate to its base, which the group keeps, times a factor."""
    groups = optimizer.param_groups
    bases = [group.setdefault("initial_lr", float(group["lr"])) for group in groups]  # groups may share a tensor
    for group, base in zip(groups, bases, strict=True):
        rate = group["lr"]
        if isinstance(rate, Tensor):  # a compiled or captured step reads it from there
            rate.fill_(float(base) * times)
        else:
            group["lr"] = float(base) * times


class RateSchedules:
    """The schedules of a worker's optimizers.

    ``progress`` returns the share of the run in the middle of the next iteration; equal in all processes of a worker.
    """

    def __init__(
        self,
        progress: Callable[[], float],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        has_end: Callable[[], bool] = lambda: True,
    ) -> None:
        self._progress, self._optimizers, self._has_end = progress, optimizers, has_end
        self._factors: dict[torch.optim.Optimizer, Callable[[float], float]] = {}

    @property
    def optimizers(self) -> Iterable[torch.optim.Optimizer]:
        """Those with a schedule."""
        return self._factors.keys()

    def add(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        kind: str | Callable[[float], float],
        warmup: float = 0.0,
        decay: float = 0.0,
    ) -> None:
        """Let the learning rates of some optimizers follow :func:`factor` from now on, instead of an earlier schedule.

        A function as ``kind`` takes its place. Raises ConfigError if an argument is wrong, the plan has no end, or an
        optimizer did not join or has no rate.
        """
        if not callable(kind):
            check(kind, warmup, decay)
        if not self._has_end():
            raise ConfigError(
                "worker.schedule needs a run with an end, but the plan has neither iterations nor seconds; add one of "
                "them to the plan file, or start with LSGD_ITERATIONS=N (lsgd-server --global: --iterations N); or, if "
                "the script has a loop of its own and then calls worker.finish(), say how many steps that makes: "
                "worker.steps = N"
            )
        if any(optimizer not in self._optimizers for optimizer in optimizers):
            raise ConfigError(
                "worker.schedule got an optimizer that this worker did not join with; pass the optimizer or the list "
                "that Worker.join got"
            )
        if any(group.get("lr") is None for optimizer in optimizers for group in optimizer.param_groups):
            raise ConfigError(
                "worker.schedule got an optimizer without a learning rate, which chooses its steps itself: give it one "
                "(for Adafactor also relative_step=False), or leave out worker.schedule"
            )
        times = kind if callable(kind) else partial(_factor_at, kind, warmup, decay)
        self._factors |= dict.fromkeys(optimizers, times)
        self.follow()

    def follow(self) -> None:
        """Set the next iteration's learning rates."""
        for optimizer, times in self._factors.items():
            set_rates(optimizer, times(self._progress()))
