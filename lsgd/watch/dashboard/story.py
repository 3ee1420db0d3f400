"""A run's history for the page: its view, the last minutes in full, and the rounds before the view began."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lsgd.protocol.events import Progress
from lsgd.watch.reader import Batch
from lsgd.watch.view import RoundView, RunView, Totals

RECENT_S = 240.0
"""How many seconds of the workers' reports are kept in full."""

MAX_RECENT = 256
"""Most of these reports per worker."""

_DRIFT_S = 2.0  # smaller differences between the clocks of a run's servers do not move the drawing


class Story:
    """A run's history for the page, from a reader's batches.

    Args:
        older: lines of ``metrics.jsonl``; only those before the view's first round are used.

    Attributes:
        view: the run's view.
        recent: totals in the last :data:`RECENT_S`, by worker.
        started_at: time of the first round, in seconds since the epoch; None: no round yet.
        problem: why nothing can be read, for people; empty: no problem.
    """

    def __init__(self, older: Iterable[Mapping[str, Any]] = ()) -> None:
        self.view = RunView()
        self.recent: dict[str, deque[Totals]] = {}
        self.started_at: float | None = None
        self.problem = ""
        self._older = [
            RoundView(r["round"], r["scope"], r["worker"], r["count"], r["seconds"], r["losses"]) for r in older
        ]

    def take(self, batch: Batch) -> None:
        """Apply a reader's batch."""
        run = self.view.run
        self.view.take(replace(batch, events=()))
        if run and run != self.view.run:
            self.recent, self.started_at, self._older = {}, None, []
        for event in batch.events:
            self.view.fold(event)
            if isinstance(event.what, Progress):
                self._sample()

    def _sample(self) -> None:
        began, end = self.view.started_at, self.view.time
        if began is not None and (self.started_at is None or abs(began - self.started_at) > _DRIFT_S):
            self.started_at = began
        for name, worker in self.view.workers.items():
            points = self.recent.setdefault(name, deque(maxlen=MAX_RECENT))
            last = worker.totals.last
            if last is not None and (not points or points[-1].time < last.time):
                points.append(last)
            while points and points[0].time < end - RECENT_S:
                points.popleft()

    def loss_rounds(self) -> list[RoundView]:
        """Return all rounds with known losses, by increasing count."""
        known = list(self.view.rounds)
        first = known[0].count if known else float("inf")
        return [*(r for r in self._older if r.count < first), *known]
