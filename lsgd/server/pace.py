"""How long steps and rounds take in a run, and the period that follows from it if the plan says ``auto``."""

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from lsgd.algorithms.common import least_period
from lsgd.server.reasons import Reason, Why

SAMPLES = 3
"""How many of the last times the median is taken of, so that one outlier changes nothing."""

FACTOR = 2
"""The largest factor between one period and the next, up or down."""

TOO_SHORT, TOO_LONG = 1.2, 1.5
"""A period stays while the wanted one is at most 1.2 times as long, and at least 1/1.5 as long."""

MOST_PERIOD = 512
"""The longest period to choose: models diverge, however slow the link is."""

LEAST_ROUNDS = 32
"""Fewest rounds of a run, whatever they cost: with fewer its workers learn little from each other."""

SHORT_PERIOD = 4
"""Shortest period that a short run is limited to; shorter ones were no better (benchmarks/results/convergence.md)."""

SHORTEST_STEP_S = 1e-6


class Pace:
    """Times a run as its server sees it, and chooses the period from that.

    A round lasts from its order until all members have completed it. The time from there until all ask for the next
    global round, divided by the iterations of a member, is a step. So waiting for slower members counts as training.

    Args:
        period: of the stretch, chosen or planned, without ramps; 1 before anything is measured.
        rounds_s: durations of the last rounds.
        steps_s: durations of the last steps.
    """

    def __init__(self, period: int = 1, rounds_s: Iterable[float] = (), steps_s: Iterable[float] = ()) -> None:
        self.period = period
        self._rounds_s = deque(rounds_s, SAMPLES)
        self._steps_s = deque(steps_s, SAMPLES)
        self._since: float | None = None  # when the round was ordered, then when it was completed; None: not timed
        self._count = self._members = 0  # when it was ordered
        self._compare = False

    def ordered(self, now: float, count: int, members: int, *, first: bool) -> None:
        """Note the order of a global round; ``first`` of a generation: it also builds process groups."""
        self._since, self._count, self._members, self._compare = now, count, members, not first

    def completed(self, now: float) -> None:
        """Note that all members have completed it."""
        if self._since is not None:
            if self._compare:
                self._rounds_s.append(now - self._since)
            self._since = now

    def asked(self, now: float, count: int) -> None:
        """Note that all members ask for the next one, after ``count`` iterations of the run."""
        if self._since is not None and count > self._count:
            self._steps_s.append((now - self._since) * self._members / (count - self._count))
        self._since = None

    def interrupted(self) -> None:
        """Discard the times since the last round: its generation is over."""
        self._since = None

    def choose(self, share: float, steps: float) -> Reason:
        """Choose the shortest period at which exchanges take at most ``share`` of the time; return the reason.

        The period changes slowly, and not at all while it is about right.

        Args:
            share: of the time.
            steps: of a member in the whole run; infinite if it has no end.
        """
        if not self._rounds_s or not self._steps_s:
            return Why.UNMEASURED()
        round_s = statistics.median(self._rounds_s)
        step_s = max(SHORTEST_STEP_S, statistics.median(self._steps_s))
        most = int(max(SHORT_PERIOD, min(MOST_PERIOD, steps / LEAST_ROUNDS)))
        wanted = least_period(round_s, step_s, share)
        why = Why.SHORT_RUN if most < min(wanted, MOST_PERIOD) else Why.MEASURED
        wanted = min(wanted, most)
        if wanted > TOO_SHORT * self.period:
            self.period = min(wanted, FACTOR * self.period)
        elif wanted < self.period / TOO_LONG:
            self.period = max(wanted, -(-self.period // FACTOR))
        return why(round_s=round_s, step_s=step_s)

    def to_json(self) -> dict[str, Any]:
        """Return the arguments to rebuild it; an open round is not timed after that."""
        return {"period": self.period, "rounds_s": list(self._rounds_s), "steps_s": list(self._steps_s)}
