"""What a worker has done since it joined, and where its time went."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple, Self

from lsgd.client.control.channel import Totals
from lsgd.client.groups.base import Traffic
from lsgd.client.iteration.reported import Logged, LossWindow

Spent = Literal["", "compute", "waiting", "exchange"]
"""What the training thread is busy with; empty: the time between two steps, which is not reported."""


@dataclass(frozen=True)
class Timings:
    """Totals of one worker since it joined. Subtract an earlier one to measure a part of a run.

    Seconds are those of the training thread. Work beside it, such as a delayed transfer or a GPU's queue, counts where
    the thread waits for it; nothing is synchronized just to measure.

    Attributes:
        steps: completed iterations.
        compute_s: from the start of each step to its end, without the next two.
        waiting_s: for the servers' answers, including the wait for a round's other members.
        exchange_s: in rounds (forming groups, transfers, applying results) and in the algorithm's part after each step.
        sent_nbytes: bytes of tensors sent to others in rounds, without protocol overhead.
        received_nbytes: bytes of tensors received.
    """

    steps: int
    compute_s: float
    waiting_s: float
    exchange_s: float
    sent_nbytes: int
    received_nbytes: int

    def __sub__(self, earlier: Self) -> "Timings":
        return Timings(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class _Clock(NamedTuple):
    """Seconds until a moment, what counts since then, and that moment; replaced as a whole, so threads can read it."""

    seconds: dict[Spent, float]
    spent: Spent
    since: float

    def at(self, now: float) -> dict[Spent, float]:
        return {**self.seconds, self.spent: self.seconds[self.spent] + now - self.since}


class Tally:
    """What a worker counts about itself and reports to the servers.

    Args:
        window: how many losses are averaged.
        losses: the last ones in the checkpoint that it resumes from.

    Attributes:
        losses: of its last batches.
        done: iterations completed since it joined.
        committed: number of the last committed round; 0: none.
        dropped: number of the last dropped round; 0: none.
        traffic: bytes sent and received.
        logged: the user's own numbers.
        passed: bytes that all processes of the island have sent and received, as of the last round.
    """

    def __init__(self, window: int, losses: Sequence[float] = ()) -> None:
        self.losses = LossWindow(window, losses)
        self.done = self.committed = self.dropped = 0
        self.traffic = Traffic()
        self.passed: tuple[int, ...] = (0, 0)
        self.logged = Logged()
        seconds: dict[Spent, float] = {"": 0.0, "compute": 0.0, "waiting": 0.0, "exchange": 0.0}
        self._clock = _Clock(seconds, "", time.perf_counter())

    def spend(self, spent: Spent) -> Spent:
        """Count time as ``spent`` from now on; return what it counted as until now."""
        now, before = time.perf_counter(), self._clock
        self._clock = _Clock(before.at(now), spent, now)
        return before.spent

    @contextmanager
    def spending(self, spent: Spent) -> Iterator[None]:
        """Count the time inside as ``spent``."""
        before = self.spend(spent)
        try:
            yield
        finally:
            self.spend(before)

    def totals(self) -> Totals:
        """Return the totals for heartbeats: seconds of compute, waiting and exchange; bytes; logged numbers."""
        now = self.timings()
        seconds = (now.compute_s, now.waiting_s, now.exchange_s)
        sent, received = self.passed
        return *seconds, max(sent, now.sent_nbytes), max(received, now.received_nbytes), self.logged.numbers

    def timings(self) -> Timings:
        """Return the totals until now; safe from any thread."""
        totals = self._clock.at(time.perf_counter())
        seconds = (totals["compute"], totals["waiting"], totals["exchange"])
        return Timings(self.done, *seconds, self.traffic.sent_nbytes, self.traffic.received_nbytes)
