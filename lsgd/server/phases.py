"""Where a run is in its plan: the current phase and algorithm, how long steps and rounds take, and the period."""

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from lsgd.algorithms.common import LONGEST_DELAY, Exchange, best_schedule, period_cost, periods
from lsgd.plan.plan import Phase, table_of
from lsgd.plan.run import LENGTH_SETTINGS
from lsgd.server.changes import Changes
from lsgd.server.reasons import Reason, Why
from lsgd.settings import AlgorithmSettings, changed

SAMPLES = 5
"""How many of the last times the median is taken of, so that two outliers change nothing."""

WORTH = 1.02
"""A period and its delay stay while their cost is at most this times that of the best ones."""

SHORTEST_STEP_S = 1e-6

PLANNED = Why.PLANNED()


class Pace:
    """Times a run as its server sees it, and chooses the period and the delay from that.

    A round lasts from its order until all members have completed it. The time from there until all ask for the next
    global round, divided by the iterations of a member, is a step. So waiting for slower members counts as training.

    Args:
        period: of the stretch, chosen or planned, without ramps; 1 before anything is measured.
        rounds_s: durations of the last rounds, without what training hides of them, or can hide.
        steps_s: durations of the last steps.
        transfers_s: durations of what it hides, or can hide.
        delay: iterations from a round until its result is applied, chosen or planned.
    """

    def __init__(
        self,
        period: int = 1,
        rounds_s: Iterable[float] = (),
        steps_s: Iterable[float] = (),
        transfers_s: Iterable[float] = (),
        delay: int = 0,
    ) -> None:
        self.period, self.delay = period, delay
        self._rounds_s = deque(rounds_s, SAMPLES)
        self._steps_s = deque(steps_s, SAMPLES)
        self._transfers_s = deque(transfers_s, SAMPLES)
        self._since: float | None = None  # when the round was ordered, then when it was completed; None: not timed
        self._count, self._compare = 0, False  # when it was ordered
        self._training = 0  # when it was completed

    def ordered(self, now: float, count: int, *, first: bool) -> None:
        """Note the order of a global round; ``first`` of a generation: it also builds process groups."""
        self._since, self._count, self._compare = now, count, not first

    def completed(self, now: float, training: int, transfer_s: float = 0.0) -> None:
        """Note that all members have completed it.

        ``training``: how many of them now make iterations; ``transfer_s``: of it or, with a delay, of the one before.
        """
        if self._since is not None:
            self._training = training
            if self._compare:
                self._rounds_s.append(max(0.0, now - self._since - (0.0 if self.delay else transfer_s)))
            if transfer_s and (self._compare or self.delay):
                self._transfers_s.append(transfer_s)
            self._since = now

    def at(self, now: float, count: int) -> "Pace":
        """Return the pace at a time when all members ask for the next round, after ``count`` iterations of the run."""
        pace = Pace(self.period, self._rounds_s, self._steps_s, self._transfers_s, self.delay)
        if self._since is not None and count > self._count:
            stretch_s, steps = now - self._since, (count - self._count) / max(self._training, 1)
            step_s = stretch_s / steps
            if 0 < self.delay < steps and self._transfers_s:  # the members may have waited for what it did not hide
                beside_s = stretch_s - statistics.median_low(self._transfers_s)
                step_s = min(step_s, max(beside_s, 0.0) / (steps - self.delay))
            if self._transfers_s or not self.delay:
                pace._steps_s.append(step_s)
        return pace

    @property
    def step_s(self) -> float:
        """How long a step takes; infinite while that is not known."""
        return statistics.median_high(self._steps_s) if self._steps_s else math.inf

    def interrupted(self) -> None:
        """Discard the times since the last round: its generation is over."""
        self._since = None

    def choose(self, workers: int, steps: float, period: int | None, delay: int | None, parts: int = 1) -> Reason:
        """Choose the period and the delay that cost least, unless the present ones are about as good; say why.

        ``steps``: of a member in the whole run; infinite if it has no end. ``period`` and ``delay``: those that hold,
        if they are not to be chosen; None otherwise. ``parts``: as in :class:`~lsgd.settings.Schedule`. One round is
        enough, since on a slow link each further one would cost many steps. Of an even number of times, that in the
        middle counts with which the period is shorter: too short a period is noticed sooner.
        """
        self.period, self.delay = period or self.period, self.delay if delay is None else delay
        if period is not None and delay is not None:
            return PLANNED
        if not (self._rounds_s and self._steps_s) or (self.delay and not self._transfers_s):
            return Why.UNMEASURED()
        step_s = max(SHORTEST_STEP_S, self.step_s)
        round_s, transfer_s = statistics.median_low(self._rounds_s), statistics.median_low(self._transfers_s or [0.0])
        exchange = Exchange(round_s / step_s, transfer_s / step_s, parts)
        cost = partial(period_cost, exchange=exchange, workers=workers, steps=steps)
        chosen = best_schedule(exchange, workers, steps, period=period, delay=delay)
        allowed = period is not None or self.period in periods(steps, delay, parts)
        if not allowed or cost(self.period, delay=self.delay) > WORTH * cost(chosen[0], delay=chosen[1]):
            self.period, self.delay = chosen
        return Why.MEASURED(round_s=round_s + transfer_s, step_s=step_s)

    def to_json(self) -> dict[str, Any]:
        """Return the arguments to rebuild it; an open round is not timed after that."""
        times = {"rounds_s": self._rounds_s, "steps_s": self._steps_s, "transfers_s": self._transfers_s}
        return {"period": self.period, "delay": self.delay} | {name: list(of) for name, of in times.items()}


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the plan from one global round to the next.

    Args:
        number: index of its phase, from 0.
        planned: algorithm as the plan has it; its period and its delay may be ``auto``.
        algorithm: with the settings of this stretch.
        why: reason for the period and the delay.
    """

    number: int
    planned: AlgorithmSettings
    algorithm: AlgorithmSettings
    pace: Pace
    why: Reason


class Phases:
    """The algorithm of the current phase, with its current settings.

    Attributes:
        ends: counts of the run at which the phases end.
        number: index of the current phase, from 0.
        algorithm: as of the last global round.
        next_algorithm: as planned from the next global round on; its period and its delay may be ``auto``.
        text: the algorithm's name and settings, as JSON.
        why: reason for the period and the delay.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.changes = Changes()
        self.planned = phases
        self.ends = [*accumulate(phase.iterations for phase in phases[:-1]), math.inf]
        algorithm = phases[0].algorithm
        self.follow(Stretch(0, algorithm, algorithm, Pace(), PLANNED))

    def follow(self, stretch: Stretch) -> None:
        """Follow a stretch from now on."""
        self.changes.count += 1
        self.number, self.next_algorithm, self.algorithm = stretch.number, stretch.planned, stretch.algorithm
        self.schedule, self.pace, self.why = stretch.algorithm.schedule(), stretch.pace, stretch.why
        self.text = json.dumps(table_of(stretch.algorithm))

    def change(self, changes: Mapping[str, str]) -> None:
        """Change settings of the algorithm, all or none, from the next global round on.

        Raises:
            ConfigError: there is no such setting, or a value is wrong.
        """
        self.next_algorithm = changed(self.next_algorithm, changes, LENGTH_SETTINGS)
        self.changes.count += 1

    def following(
        self,
        now: float,
        count: int,
        given: int,
        members: int,
        steps: float,
        progress: float | None,
        *,
        bears_delay: bool,
    ) -> Stretch:
        """Return the stretch that would begin with a global round of ``members`` now.

        A phase in lockstep ends when too few iterations are left for one of each member. ``given``: iterations of the
        run, granted ones included; ``steps``: of a member in the whole run; ``progress``: None if it has no end;
        ``bears_delay``: whether a delay may be chosen.
        """
        number, planned, pace = self.number, self.next_algorithm, self.pace.at(now, count)
        while self.ends[number] - given < (members if planned.schedule().lockstep else 1):
            number += 1
            planned = self.planned[number].algorithm
        if number != self.number:
            pace = Pace()  # another algorithm sends other bytes
        progress = progress if len(self.planned) == 1 else None  # only then the period follows it
        schedule = planned.schedule()
        delay = None if planned.delay_is_auto and bears_delay else schedule.delay
        fixed = None if planned.period_is_auto else schedule.period
        why = pace.choose(members, steps, fixed, delay, schedule.parts)
        period = pace.period if planned.period_is_auto else None
        algorithm = planned.at(progress, period)
        if progress is not None and algorithm != planned.at(None, period):
            why = Why.WARM() if progress < 0.5 else Why.CLOSING()
        if planned.delay_is_auto:
            algorithm = algorithm.with_delay(min(pace.delay, int(LONGEST_DELAY * algorithm.schedule().period)))
        pace.delay = algorithm.schedule().delay
        return Stretch(number, planned, algorithm, pace, why)

    def rewind(self, count: int) -> bool:
        """Return to the phase that the run was in after ``count`` iterations; return whether that is another one."""
        before = self.number
        while self.number and count < self.ends[self.number - 1]:
            self.number -= 1
        if self.number == before:
            return False
        self.changes.count += 1
        self.next_algorithm = self.planned[self.number].algorithm
        self.pace = Pace()
        return True
