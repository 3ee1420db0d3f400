"""Where a run is in its plan: the current phase and algorithm, with settings changed on the way."""

import json
import math
from collections.abc import Sequence

from lsgd.plan.plan import Phase, table_of
from lsgd.server.pace import Pace
from lsgd.server.reasons import Reason, Why
from lsgd.settings import AlgorithmSettings


class Course:
    """The algorithm of the current phase, with its current settings.

    Attributes:
        phases: of the plan.
        number: of the current phase, from 0.
        algorithm: as of the last global round.
        schedule: when that algorithm needs rounds.
        next_algorithm: as planned from the next global round on; its period may be ``auto``.
        pace: how long steps and rounds take.
        why: the reason for the period.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = phases
        self.number = 0
        self.algorithm = phases[0].algorithm
        self.schedule = self.algorithm.schedule()
        self.next_algorithm = self.algorithm
        self.pace = Pace()
        self.why: Reason = Why.PLANNED()

    def resume(
        self, number: int, algorithm: AlgorithmSettings, next_algorithm: AlgorithmSettings, pace: Pace, why: Reason
    ) -> None:
        """Continue where another server left off."""
        self.number, self.algorithm, self.next_algorithm = number, algorithm, next_algorithm
        self.schedule, self.pace, self.why = algorithm.schedule(), pace, why

    def take_up(self, count: int, members: int, progress: float | None = None, rate: float | None = None) -> bool:
        """Move on to the phase of a global round of ``members`` after ``count`` iterations; return whether it is new.

        A phase in lockstep ends when too few iterations are left for one of each member.

        Args:
            count: iterations of the run.
            members: number of members in the round.
            progress: of the run, 0 to 1; None: it has no end.
            rate: learning rate of the members, if it has fallen.
        """
        before = self.number
        while self.end - count < (members if self.next_algorithm.schedule().lockstep else 1):
            self.number += 1
            self.next_algorithm = self.phases[self.number].algorithm
        if self.number != before:
            self.pace = Pace()  # another algorithm sends other bytes
        steps = count / members / progress if progress else math.inf
        self._set_period(steps, progress if len(self.phases) == 1 else None, rate)
        return self.number != before

    def _set_period(self, steps: float, progress: float | None, rate: float | None) -> None:
        """Choose the settings up to the next global round, and note the reason for the period.

        Args:
            steps: of a member in the whole run.
            progress: of the run, if the period follows it.
            rate: as in :meth:`take_up`.
        """
        planned, period, self.why = self.next_algorithm, None, Why.PLANNED()
        if share := planned.time_share:
            self.why = self.pace.choose(share, steps)
            period = self.pace.period
        else:
            self.pace.period = planned.schedule().period
        self.algorithm = planned.at(progress, period, rate)
        if rate is not None and planned.at(None, period, rate) != planned.at(None, period):
            self.why = Why.RATE(rate=rate)
        if progress is not None and self.algorithm != planned.at(None, period, rate):
            self.why = Why.WARM() if progress < 0.5 else Why.CLOSING()
        self.schedule = self.algorithm.schedule()

    def rewind(self, count: int) -> None:
        """Return to the phase that the run was in after ``count`` iterations."""
        while count < sum(phase.iterations for phase in self.phases[: self.number]):
            self.number -= 1
            self.next_algorithm = self.phases[self.number].algorithm

    @property
    def end(self) -> float:
        """The run's count at which the phase ends; infinite for the last one."""
        if self.number == len(self.phases) - 1:
            return math.inf
        return sum(phase.iterations for phase in self.phases[: self.number + 1])

    def to_json(self) -> str:
        """Return the algorithm's name and settings as JSON text."""
        return json.dumps(table_of(self.algorithm))
