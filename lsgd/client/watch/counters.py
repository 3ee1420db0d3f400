"""How often things have happened in a run, as its events tell: numbers that never fall while the run lasts."""

import bisect
from collections import Counter
from dataclasses import dataclass, field

from lsgd.protocol.events import Note, Progress, WorkerChanged, WorkerJoined

MAX_REASONS = 64
"""How many reasons are told apart; all later ones are ``other``."""

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the buckets for the time that a round takes, in seconds; one without a bound follows."""

_GOES_BACK = ("gone_back", "begun_anew")  # codes: the run makes iterations again
_LEAVES_ROUNDS = ("straggler", "cut", "away", "left")


@dataclass(slots=True)
class Histogram:
    """How many rounds took how long, in seconds: up to each of :data:`BOUNDS_S` from the one before, and longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, took_s: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(BOUNDS_S, took_s)] += 1
        self.total_s += took_s


class Counters:
    """What was counted since the run's first event that the server still had; the view tells it the ends of rounds.

    Attributes:
        iterations: made by all; those that are made again, since the run went back to a checkpoint, count again.
        done: iterations by worker.
        took: by scope, how long rounds took from their order to their completion.
        failed: rounds that failed, by reason.
        joins: how often a worker has joined, each of its processes counted.
        departures: how often a worker came to a state in which rounds do not wait for it, by state and reason.
        restarts: of the global server that were seen.
    """

    def __init__(self) -> None:
        self.iterations = self.joins = self.restarts = 0
        self.done: Counter[str] = Counter()
        self.took = {"local": Histogram(), "global": Histogram()}
        self.failed: Counter[str] = Counter()
        self.departures: Counter[tuple[str, str]] = Counter()
        self._count = self._again = 0  # the run's count as last told; iterations that are made again
        self._goes_back = False

    def fold(self, what: object) -> None:
        """Count an event that is not of a round."""
        match what:
            case Progress():
                self.made(what.count)
                for each in what.workers:
                    self.done[each.worker] = max(self.done[each.worker], each.done)
            case WorkerJoined():
                self.joins += 1
            case WorkerChanged(_, state, code) if state in _LEAVES_ROUNDS:
                known = {reason for _, reason in self.departures}
                self.departures[state, _bounded(code, known)] += 1
            case Note(code) if code in _GOES_BACK:
                self._goes_back = True

    def fail(self, code: str) -> None:
        """Count a round that has failed."""
        self.failed[_bounded(code, self.failed)] += 1

    def made(self, count: int) -> None:
        """Take the run's count, which falls a little where a server is started again, and as far as it goes back."""
        if self._goes_back:
            self._again += max(0, self._count - count)
            self._goes_back = False
        self._count = count
        self.iterations = max(self.iterations, count + self._again)


def _bounded(code: str, known: Counter[str] | set[str]) -> str:
    return code if code in known or len(known) < MAX_REASONS else "other"
