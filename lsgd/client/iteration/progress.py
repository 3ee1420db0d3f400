"""The share of a run that is done, also between the servers' answers, and the learning rates that follow it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lsgd import learning_rate
from lsgd.client.control.island import Island
from lsgd.errors import ConfigError
from lsgd.plan.run import RunSettings

MEMORY = 0.9
"""Weight of the answers before the last one in the estimate of this worker's share."""

EQUAL_FOR = 8.0
"""The estimate starts as if this many iterations had been an equal share of the run."""


class Progress:
    """The share of the run that is done, 0 to 1, as far as this worker knows.

    Answers give it exactly, but one may cover many iterations. In between, each iteration of this worker counts as much
    as those before it (at first, an equal share); time counts if the plan ends by time. The estimate never falls: if
    it is ahead of an answer, it waits. Only if the run goes back to a checkpoint, an answer is below the last one, and
    the estimate follows.

    Args:
        run: has the plan's end.
        world_size: workers at the start.
        done: returns how many iterations this worker has completed.
        clock: returns seconds.
    """

    def __init__(
        self, run: RunSettings, world_size: int, done: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run = run
        self._done = done
        self._clock = clock
        self._answer: float | None = None  # the last one; below, when it came
        self._answer_done, self._answer_s = 0, 0.0
        self._highest = 0.0  # share that was returned
        # This many iterations of this worker were this share of the run; older ones count less.
        self._iterations = EQUAL_FOR
        self._share = EQUAL_FOR * world_size / run.iterations if run.iterations else 0.0

    def answered(self, answer: float, done: int) -> None:
        """Accept the share in an answer to a request that reported ``done`` iterations of this worker."""
        if self._answer is not None:
            if answer < self._answer:
                self._highest = answer
            elif done > self._answer_done:
                self._iterations = MEMORY * self._iterations + done - self._answer_done
                self._share = MEMORY * self._share + answer - self._answer
        self._answer, self._answer_done, self._answer_s = answer, done, self._clock()

    def share(self, ahead: float = 0.0) -> float:
        """Return the share ``ahead`` iterations of this worker from now: 0.5 is the middle of the next one."""
        if self._answer is None:
            return 0.0
        made = self._done() - self._answer_done + ahead
        by_count = made * self._share / self._iterations if self._run.iterations else 0.0
        by_time = (self._clock() - self._answer_s) / self._run.seconds if self._run.seconds else 0.0
        self._highest = max(self._highest, min(1.0, self._answer + max(by_count, by_time)))
        return self._highest


@dataclass(frozen=True)
class Schedule:
    """A learning rate that follows the run: see :func:`lsgd.learning_rate.factor` for what the arguments mean.

    Raises:
        ConfigError: an argument is wrong.
    """

    kind: str
    warmup: float
    decay: float

    def __post_init__(self) -> None:
        learning_rate.check(self.kind, self.warmup, self.decay)

    def set(self, optimizer: torch.optim.Optimizer, progress: float) -> None:
        """Set each parameter group's learning rate: its base, which the group keeps, times the factor."""
        factor = learning_rate.factor(self.kind, progress, self.warmup, self.decay)
        for group in optimizer.param_groups:
            rate = group["lr"]
            base = group.setdefault("initial_lr", float(rate))
            if isinstance(rate, Tensor):  # a compiled or captured step reads it from there
                rate.fill_(float(base) * factor)
            else:
                group["lr"] = float(base) * factor


@dataclass(eq=False)
class Schedules:
    """The schedules of a worker's optimizers.

    Args:
        progress: of the run.
        run: its settings.
        optimizers: of the worker.
        island: all its processes use the head's learning rates.
    """

    progress: Progress
    run: RunSettings
    optimizers: Sequence[torch.optim.Optimizer]
    island: Island
    _schedules: dict[torch.optim.Optimizer, Schedule] = field(default_factory=dict)

    def add(self, optimizers: Sequence[torch.optim.Optimizer], schedule: Schedule) -> None:
        """Let the learning rates of some optimizers follow a schedule from now on, instead of an earlier one.

        Raises:
            ConfigError: the plan has no end, or the worker did not join with one of the optimizers.
        """
        if not self.run.iterations and not self.run.seconds:
            raise ConfigError(
                "worker.schedule needs a run with an end, but the plan has neither iterations nor seconds; add "
                "--iterations or --seconds to lsgd-server --global, or one of them to the plan file"
            )
        if any(optimizer not in self.optimizers for optimizer in optimizers):
            raise ConfigError(
                "worker.schedule got an optimizer that this worker did not join with; pass the optimizer or the list "
                "that Worker.join got"
            )
        self._schedules |= dict.fromkeys(optimizers, schedule)
        self.follow()

    def follow(self) -> None:
        """Set the next iteration's learning rates."""
        if self._schedules:
            progress = self.island.share("sets learning rates", lambda: self.progress.share(ahead=0.5))
            for optimizer, schedule in self._schedules.items():
                schedule.set(optimizer, progress)
