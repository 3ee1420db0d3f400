"""How long steps and rounds take in a run, and the period that follows from it where the plan says ``auto``."""

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from lsgd.algorithms.common import least_period
from lsgd.server.reasons import Reason, Why

SAMPLES = 3
"""The median of so many of the last times counts, so one that is out of line changes nothing."""

FACTOR = 2
"""A period is at most so many times the one before, or at least the same part of it."""

TOO_SHORT, TOO_LONG = 1.2, 1.5
"""A period stays while the one that is wanted is at most so many times as long, or so many times shorter."""

MOST_PERIOD = 512
"""The longest period that is chosen: models part, however slow the link is."""

LEAST_ROUNDS = 32
"""A run has at least so many, whatever they cost: with fewer its workers learn little from each other."""

SHORT_PERIOD = 4
"""A short run has this one rather than shorter ones, which were no better (docs/performance/convergence.md)."""

SHORTEST_STEP_S = 1e-6


class Pace:
    """Times a run as its server sees it, and chooses the period from that.

    A round takes from its order until all members have completed it; a step, the time from there until all ask for
    the next global round, for each iteration of a member. So waiting for slower members counts as training.

    Args:
        period: of the stretch but for ramps, as it was chosen or planned; 1 before anything is measured.
        rounds_s: what the last rounds have taken.
        steps_s: the same of steps.
    """

    def __init__(self, period: int = 1, rounds_s: Iterable[float] = (), steps_s: Iterable[float] = ()) -> None:
        self.period = period
        self._rounds_s = deque(rounds_s, SAMPLES)
        self._steps_s = deque(steps_s, SAMPLES)
        self._since: float | None = None  # the order of the round, then its completion; none: not timed
        self._count = self._members = 0  # at the order
        self._compare = False

    def ordered(self, now: float, count: int, members: int, *, first: bool) -> None:
        """Note that a global round of ``members`` begins; ``first``: of a generation, which builds process groups."""
        self._since, self._count, self._members, self._compare = now, count, members, not first

    def completed(self, now: float) -> None:
        """Note that all have completed it."""
        if self._since is not None:
            if self._compare:
                self._rounds_s.append(now - self._since)
            self._since = now

    def asked(self, now: float, count: int) -> None:
        """Note that all ask for the next one, after ``count`` iterations of the run."""
        if self._since is not None and count > self._count:
            self._steps_s.append((now - self._since) * self._members / (count - self._count))
        self._since = None

    def interrupted(self) -> None:
        """Leave out the times since the last round: its generation is over."""
        self._since = None

    def choose(self, share: float, steps: float) -> Reason:
        """Choose the shortest period at which exchanges take at most ``share`` of the time; return why.

        It follows slowly, and not at all while the present period is about right.

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
        """Return the arguments that another server continues with; a round that is open is not timed there."""
        return {"period": self.period, "rounds_s": list(self._rounds_s), "steps_s": list(self._steps_s)}
