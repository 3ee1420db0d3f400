"""Brings torch's learning-rate schedulers to a worker's place, and finds rates that begin anew instead.

A torch scheduler counts its own calls of ``step()``, so after a restart it begins at 0, whatever the worker's place is.
Nothing lists the schedulers of an optimizer, so the script names them (``Worker.follow``, ``Worker.attend``). What is
seen of the others is that torch's wrap the optimizer's ``step``, to see that it is called before theirs, and the rates.
A schedule of another library may keep ``initial_lr`` in the parameter groups, too, but be told its place by the script.
"""

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from lsgd.errors import ConfigError, LsgdError

logger = logging.getLogger("lsgd")

LOOK_AFTER = 10
"""After how many iterations a worker looks: then a scheduler that counts iterations has counted these."""

ENOUGH = 0.9
"""Share of a scheduler that is as good as all of it."""

EQUAL = 1e-6
"""Rates this close, as a share, are one rate."""

MOVED = 1e-3
"""A schedule whose rate has changed by less, as a share, has not moved yet."""

_LENGTHS = ("T_max", "total_steps", "total_iters")  # of torch's own, all in calls of step()


def inner(given: Any) -> Any:
    """Return the scheduler inside of a wrapper, such as accelerate's; else what was given."""
    while not isinstance(given, lr_scheduler.LRScheduler) and hasattr(given, "scheduler"):
        given = given.scheduler
    return given


def optimizer_of(scheduler: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a scheduler, without its wrappers, such as accelerate's."""
    found: Any = scheduler.optimizer
    while (held := getattr(found, "optimizer", None)) is not None:
        found = held
    return found  # type: ignore[no-any-return]


def counts(scheduler: object) -> bool:
    """Whether it is a scheduler whose rate depends on how often it was stepped; ReduceLROnPlateau's does not."""
    return isinstance(scheduler, lr_scheduler.LRScheduler) and not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)


def count_of(scheduler: Any) -> int:
    """Return how many steps a scheduler has made, without its constructor's."""
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return count_of(scheduler._schedulers[0])
    return int(scheduler.last_epoch)


def length_of(scheduler: Any) -> int | None:
    """Return how many calls of step() a scheduler is made for; None if it does not say, or is a warm-up."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = length_of(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return max((n for each in scheduler._schedulers if (n := length_of(each)) is not None), default=None)
    if isinstance(scheduler, lr_scheduler.LambdaLR):  # those of transformers
        functions = [f.keywords for f in scheduler.lr_lambdas if isinstance(f, functools.partial)]
        return max((f["num_training_steps"] for f in functions if "num_training_steps" in f), default=None)
    if isinstance(scheduler, lr_scheduler.ConstantLR) or (
        isinstance(scheduler, lr_scheduler.LinearLR) and scheduler.end_factor >= scheduler.start_factor
    ):
        return None
    return next((length for name in _LENGTHS if isinstance(length := getattr(scheduler, name, None), int)), None)


def hold(scheduler: Any) -> None:
    """Give the optimizer the rates that the scheduler has set last, whatever has replaced them since."""
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):  # a compiled or captured step reads it from there
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def bring(scheduler: Any, place: int) -> None:
    """Step a scheduler until it has made ``place`` steps, from the rates that it has set last."""
    hold(scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: the optimizer has not stepped yet
        for _ in range(count_of(scheduler), place):
            scheduler.step()


@dataclass(frozen=True)
class Loop:
    """Where a worker is.

    Args:
        step: place in the script's own loop.
        steps: length of that loop; 0: it has none.
        has_end: whether the plan ends the run.
        middle: share of the run in the middle of the next iteration.
        share: iterations of the plan for each worker; infinite without a number.
    """

    step: int
    steps: int
    has_end: bool
    middle: float
    share: float

    @property
    def is_own(self) -> bool:
        """Whether the script's own loop decides how long the worker trains, and a scheduler counts its steps."""
        return bool(self.steps) or not self.has_end


class Followed:
    """A scheduler that is where its worker is.

    In a script with a loop of its own it is brought there once, and the script's calls of ``step()`` continue. In a
    run whose plan has an end, and with a ``place``, it is set before each iteration; then the script's calls do not
    count.

    Args:
        place: returns how many steps the scheduler is to have made; None: as many as the worker, or its share of
            its own length.
    """

    def __init__(self, scheduler: Any, place: Callable[[], int] | None) -> None:
        self.scheduler = scheduler
        self._place = place
        self._kept: dict[str, Any] | None = None  # its state, as the worker has left it
        self._began: int | None = None  # where it was brought, if the script steps it from there on

    def follow(self, loop: Loop) -> None:
        """Before an iteration, bring it to its place."""
        if self._place is None and loop.is_own:
            if self._began is None:
                bring(self.scheduler, loop.step)
                self._began = count_of(self.scheduler)
            return
        place = self._place() if self._place is not None else int(loop.middle * self._length())
        if self._kept is not None:
            self.scheduler.load_state_dict(self._kept)
        bring(self.scheduler, place)
        self._kept = self.scheduler.state_dict()  # whose values a step replaces

    def _length(self) -> int:
        length = length_of(self.scheduler)
        if length is None:
            raise ConfigError(
                f"worker.follow cannot tell from a {self._name} how many steps it is made for, and the plan ends the "
                f"run: say where it is to be, as in worker.follow(scheduler, lambda: int(worker.progress * STEPS)); or "
                f"use worker.schedule"
            )
        return length

    @property
    def _name(self) -> str:
        return type(self.scheduler).__name__

    def check(self, loop: Loop, made: int) -> str:
        """Return what is wrong with its length after so many iterations; empty: nothing is known to be.

        Raises:
            ConfigError: the script does not step it in each iteration.
        """
        if self._began is None:
            return ""
        if count_of(self.scheduler) - self._began < made // 2:
            raise ConfigError(
                f"the script has stepped a {self._name} {count_of(self.scheduler) - self._began} times in {made} "
                f"iterations, and worker.follow takes it for a schedule by iteration: if the script steps it by epoch, "
                f"say so: worker.follow(scheduler, lambda: worker.step // len(loader)); else call scheduler.step() "
                f"after each optimizer.step()"
            )
        length, steps = length_of(self.scheduler), min(loop.steps or loop.share, loop.share)
        if length is None or steps >= ENOUGH * length:
            return ""
        return (
            f"{self._name} is made for {length} steps, so it would cover {100 * steps / length:.0f} % of itself: this "
            f"worker makes about {steps:.0f} steps"
        )


class Schedulers:
    """The schedulers that a worker was told of, and what it says of others.

    Args:
        name: the worker's.
        rates: the run's.
        known: returns the optimizers whose rates something else restores.
    """

    def __init__(
        self,
        name: str,
        optimizers: Sequence[torch.optim.Optimizer],
        rates: "Rates",
        known: Callable[[], Iterable[torch.optim.Optimizer]],
    ) -> None:
        self._name, self._optimizers, self._rates, self._others = name, optimizers, rates, known
        self._followed: list[Followed] = []
        self._is_past_end = False  # of the script's own loop, which is said once

    def add(self, given: Any, place: Callable[[], int] | None) -> None:
        """Let a scheduler follow the worker.

        Raises:
            ConfigError: its optimizer did not join, or another scheduler of it follows.
        """
        scheduler = inner(given)
        optimizer = optimizer_of(scheduler)
        if optimizer not in self._optimizers:
            raise ConfigError(
                f"worker.follow got a {type(scheduler).__name__} of an optimizer that this worker did not join with; "
                f"make it with the optimizer that Worker.join or lsgd.wrap got"
            )
        self._followed = [each for each in self._followed if each.scheduler is not scheduler]
        if any(optimizer_of(each.scheduler) is optimizer for each in self._followed):
            raise ConfigError(
                f"worker.follow got a second scheduler of one {type(optimizer).__name__}, and nothing says in which "
                f"order the script steps them: combine them by ChainedScheduler or SequentialLR, and follow that"
            )
        self._followed.append(Followed(scheduler, place))

    def follow(self, loop: Loop) -> None:
        """Before an iteration, bring all to their places."""
        for each in self._followed:
            each.follow(loop)

    def look(self, loop: Loop, made: int) -> None:
        """After some iterations, warn of schedulers that are too long, and of those that nobody has told of."""
        for each in self._followed:
            if words := each.check(loop, made):
                logger.warning("%s: %s. Make it as long as that, or use worker.schedule", self._name, words)
        if untold := [type(each).__name__ for each in self._optimizers if self._is_untold(each)]:
            logger.warning(
                "%s: a scheduler sets the learning rate of %s, and lsgd does not know it: a worker that resumes, is "
                "started again or joins late would begin anew with it. Where it is made, add: worker.follow(scheduler)",
                *(self._name, ", ".join(untold)),
            )

    def before_step(self, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        """At a worker's first step, compare its rates with the run's; warn of steps after a schedule's end.

        Raises:
            LsgdError: a scheduler that nobody has told of has begun anew.
        """
        if self._followed and loop.step >= loop.steps > 0 and not self._is_past_end:
            self._is_past_end = True
            logger.warning(
                "%s makes more steps than worker.steps = %d, and its scheduler continues past its end: begin the loop "
                "at worker.step, and end it at worker.steps",
                *(self._name, loop.steps),
            )
        words = self._rates.step(optimizer)
        if not words:
            return
        where = f"step {loop.step}" if loop.is_own else f"{100 * loop.middle:.0f} % of the run"
        where += f" of {loop.steps}" * bool(loop.steps)
        what = f"{self._name} is at {where}, with the learning rate of the run's first step: {words}"
        if self._is_untold(optimizer):
            raise LsgdError(
                f"{what} (as shares of the base rate). Its scheduler began anew when this worker joined: where it is "
                f"made, add worker.follow(scheduler)"
            )
        if optimizer not in self._known():
            logger.warning(
                "%s. If the script computes it, begin its loop at worker.step; if ReduceLROnPlateau sets it, add "
                "worker.follow(scheduler)",
                what,
            )
        elif loop.is_own and not loop.step:
            logger.warning("%s. So that lsgd knows where this worker is, set worker.steps after the join", what)

    def _known(self) -> set[torch.optim.Optimizer]:
        return {optimizer_of(each.scheduler) for each in self._followed} | {*self._others()}

    def _is_untold(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has a scheduler that counts, and that nobody has told of."""
        return optimizer not in self._known() and hasattr(optimizer.step, "_wrapped_by_lr_sched")


def relative_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the rate of each parameter group, as a share of its base where a schedule keeps one.

    So workers may have different bases.
    """
    groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
    return [float(group["lr"]) / (float(group.get("initial_lr") or 0.0) or 1.0) for group in groups]


class Rates:
    """A run's learning rates at its first step and now, which checkpoints have, and newcomers take over.

    So a worker can tell that its own begin anew, whatever sets them: it would train with the first step's rates, and
    the run has left those. A constant rate, or one that only this worker has, is neither.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._first: list[list[float]] = [[] for _ in optimizers]  # those of the run's first step
        self._run: list[list[float]] = [[] for _ in optimizers]  # those of the run when this worker joined
        self._stepped: set[torch.optim.Optimizer] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        now = zip(self._optimizers, self._run, strict=True)
        return {"first": self._first, "now": [relative_rates(o) if o in self._stepped else run for o, run in now]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take those of the run, until this worker has stepped itself."""
        if not self._stepped and len(state["first"]) == len(self._optimizers):
            self._first, self._run = copy.deepcopy(state["first"]), copy.deepcopy(state["now"])

    def step(self, optimizer: torch.optim.Optimizer) -> str:
        """Before a step, say which rates of the run's first step this is made with; empty: it is not, or no news."""
        if optimizer in self._stepped:
            return ""
        self._stepped.add(optimizer)
        place, own = self._optimizers.index(optimizer), relative_rates(optimizer)
        first, run = self._first[place], self._run[place]
        self._first[place] = first or own
        if not _are_close(own, first, EQUAL) or len(run) != len(own) or _are_close(run, first, MOVED):
            return ""
        one, other = max(zip(own, run, strict=True), key=lambda pair: abs(pair[0] - pair[1]))
        return f"{one:.4g}, where the run's is {other:.4g}"


def _are_close(one: Sequence[float], other: Sequence[float], share: float) -> bool:
    return len(one) == len(other) > 0 and all(
        abs(a - b) <= share * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True)
    )
