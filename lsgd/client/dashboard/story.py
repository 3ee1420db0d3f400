"""What the page tells of a run: its view, the last minutes in full, and the rounds before the view began."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lsgd.client.watch.reader import Batch
from lsgd.client.watch.view import RoundView, RunView, Totals
from lsgd.protocol.events import Progress

RECENT_S = 240.0
"""The last seconds, of which every report of a worker is kept."""

MAX_RECENT = 256
"""How many reports of a worker are kept of them."""

_DRIFT_S = 2.0  # the clocks of two servers of a run may differ by less without a change of what is drawn


class Story:
    """A run as the page tells it, from the batches of a reader.

    Args:
        older: lines of ``metrics.jsonl``; of those only what the view does not know is used.

    Attributes:
        view: of the run.
        recent: by worker, its totals in the last :data:`RECENT_S`.
        started_at: when the first round was, in seconds since the epoch; None: not yet.
        problem: why nothing can be read, in words for people; empty: nothing stands in the way.
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
        """Take in what a reader has read."""
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
        """Return all rounds that are known with their losses, by rising count."""
        known = list(self.view.rounds)
        first = known[0].count if known else float("inf")
        return [*(r for r in self._older if r.count < first), *known]
