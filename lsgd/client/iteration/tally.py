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
"""What the training thread is about; empty: nothing between two steps is measured."""


@dataclass(frozen=True)
class Timings:
    """Totals of one worker since it joined. Subtract an earlier one to measure a part of a run.

    Seconds are those of the training thread. What runs beside it, such as a delayed transfer or work queued on a GPU,
    counts where the thread waits for it; nothing is synchronized for the sake of measuring.

    Attributes:
        steps: iterations made.
        compute_s: from the begin of each step to its end, without the two below.
        waiting_s: for the servers' answers, which includes waiting for the other members of a round.
        exchange_s: in rounds (forming groups, transfers, applying their results) and in what the algorithm does
            after each step.
        sent_nbytes: bytes of tensors that this worker has sent to others in rounds, without protocol overhead.
        received_nbytes: the same for what it has received.
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
    """Seconds until a moment, what is counted since, and that moment; replaced as one, so any thread can read it."""

    seconds: dict[Spent, float]
    spent: Spent
    since: float

    def at(self, now: float) -> dict[Spent, float]:
        return {**self.seconds, self.spent: self.seconds[self.spent] + now - self.since}


class Tally:
    """What a worker counts of itself, and tells the servers.

    Args:
        window: how many losses are averaged.
        losses: the last ones before the checkpoint that it continues from.

    Attributes:
        losses: of its last batches.
        done: iterations made since it joined.
        committed: number of the last round that was completed; 0: none was.
        dropped: number of the last round that was dropped; 0: none was.
        traffic: what it has sent and received.
        logged: the user's own numbers.
        passed: what all processes of an island have sent and received, as of the last round.
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
        """Count time as this from now on; return what it was counted as until now."""
        now, before = time.perf_counter(), self._clock
        self._clock = _Clock(before.at(now), spent, now)
        return before.spent

    @contextmanager
    def spending(self, spent: Spent) -> Iterator[None]:
        """Count the time inside as this."""
        before = self.spend(spent)
        try:
            yield
        finally:
            self.spend(before)

    def totals(self) -> Totals:
        """Return what heartbeats say: seconds of compute, waiting and exchange, bytes, and what was logged."""
        now = self.timings()
        seconds = (now.compute_s, now.waiting_s, now.exchange_s)
        sent, received = self.passed
        return *seconds, max(sent, now.sent_nbytes), max(received, now.received_nbytes), self.logged.numbers

    def timings(self) -> Timings:
        """Return the totals until now; from any thread."""
        totals = self._clock.at(time.perf_counter())
        seconds = (totals["compute"], totals["waiting"], totals["exchange"])
        return Timings(self.done, *seconds, self.traffic.sent_nbytes, self.traffic.received_nbytes)
