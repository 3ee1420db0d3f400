"""What a view accumulates: bounded histories, and counts that never fall."""

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lsgd.protocol.events import Note, RunChanged, RunProgress, WorkerChanged, WorkerJoined

T = TypeVar("T")


class Series(Generic[T]):
    """Keeps at most ``most`` points: every ``step``-th of all that were added, and the last one."""

    def __init__(self, most: int) -> None:
        self.step = 1
        self._added = 0
        self._most = most
        self._points: list[T] = []
        self._last: T | None = None

    def add(self, point: T) -> None:
        """Add a point, later than all others."""
        self._last = point
        if self._added % self.step == 0:
            self._points.append(point)
            self._last = None
        self._added += 1
        if len(self._points) >= self._most:
            self.step *= 2
            if len(self._points) % 2 == 0:  # the last point is among those dropped
                self._last = self._points[-1]
            del self._points[1::2]

    @property
    def last(self) -> T | None:
        """The newest point."""
        return self._last if self._last is not None else self._points[-1] if self._points else None

    def __iter__(self) -> Iterator[T]:
        yield from self._points
        if self._last is not None:
            yield self._last

    def __len__(self) -> int:
        return len(self._points) + (self._last is not None)


MAX_REASONS = 64
"""How many different reasons are counted; all later ones are ``other``."""

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the buckets for a round's duration, in seconds; an unbounded bucket follows."""

GOES_BACK = ("gone_back", "begun_anew")  # codes: the run repeats iterations
_LEAVES_ROUNDS = ("straggler", "cut", "away", "left")


@dataclass(slots=True)
class Histogram:
    """Counts of round durations in seconds: one bucket up to each of :data:`BOUNDS_S`, and one for longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, took_s: float) -> None:
        """Count a round."""
        self.counts[bisect.bisect_left(BOUNDS_S, took_s)] += 1
        self.total_s += took_s


class Counters:
    """Counts since the first event that the server still had. The view reports the ends of rounds.

    Attributes:
        iterations: iterations of all; those repeated after the run went back to a checkpoint count again.
        done: iterations by worker.
        took: durations of rounds from order to completion, by scope.
        failed: failed rounds, by reason.
        joins: joins of workers, of each of their processes.
        departures: changes of a worker to a state in which rounds do not wait for it, by state and reason; none that
            belong to the end of the run.
        restarts: restarts of the global server that were seen.
    """

    def __init__(self) -> None:
        self.iterations = self.joins = self.restarts = 0
        self.done: Counter[str] = Counter()
        self.took = {"local": Histogram(), "global": Histogram()}
        self.failed: Counter[str] = Counter()
        self.departures: Counter[tuple[str, str]] = Counter()
        self._count = self._again = 0  # the run's last known count; repeated iterations
        self._goes_back = self._ends = False

    def fold(self, what: object) -> None:
        """Count an event that is not about a round."""
        match what:
            case RunChanged(state):
                self._ends = state in ("stopping", "over")
            case RunProgress():
                self._ends = what.run.state in ("stopping", "over")
                self.made(what.run.count)
                for each in what.workers:
                    self.done[each.worker] = max(self.done[each.worker], each.done)
            case WorkerJoined():
                self.joins += 1
            case WorkerChanged(_, state, code) if state in _LEAVES_ROUNDS and not self._ends:
                known = {reason for _, reason in self.departures}
                self.departures[state, _bounded(code, known)] += 1
            case Note(code) if code in GOES_BACK:
                self._goes_back = True

    def fail(self, code: str) -> None:
        """Count a failed round."""
        self.failed[_bounded(code, self.failed)] += 1

    def made(self, count: int) -> None:
        """Update the count. It may fall a little when a server restarts, and more when the run goes back."""
        if self._goes_back:
            self._again += max(0, self._count - count)
            self._goes_back = False
        self._count = count
        self.iterations = max(self.iterations, count + self._again)


def _bounded(code: str, known: Counter[str] | set[str]) -> str:
    return code if code in known or len(known) < MAX_REASONS else "other"
