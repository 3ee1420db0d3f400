"""The curves that loggers write, computed only from a run's events."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from lsgd.protocol.events import Event, PeriodChosen, Progress, RoundCompleted, RoundOrdered
from lsgd.watch.reader import Batch
from lsgd.watch.view import RunView, mean

_MAX_OPEN = 1024


class Point(NamedTuple):
    """Values at one moment of a run.

    Args:
        time: in seconds since the epoch.
        iterations: of all workers so far.
        values: by name: ``loss/consensus``, ``loss/node0/worker1``, ``user/accuracy``, ...; all finite.
    """

    time: float
    iterations: int
    values: dict[str, float]


class Curves:
    """Turns batches into points, each once, even if a restarted server repeats events.

    Attributes:
        view: the run's view.
    """

    def __init__(self) -> None:
        self.view = RunView()
        self._round = 0
        self._open: dict[int, int] = {}  # count of each round that has not ended, as far as known
        self._count = 0
        self._as_of = 0  # the view's period is valid after this event

    def take(self, batch: Batch) -> Iterator[Point]:
        """Yield the points of a batch, in order."""
        if batch.report is not None:
            self._as_of = batch.report["stream"]["last"]
        self.view.take(replace(batch, events=()))
        for event in batch.events:
            self.view.fold(event)
            count, values = self._values(event)
            if values:
                yield Point(event.time, count, values)

    def rounds(self, time: float, orders: Iterable[RoundOrdered]) -> Iterator[Point]:
        """Yield the points of rounds that were not among the events."""
        return (Point(time, order.count, values) for order in orders if (values := self._ordered(order)))

    def _values(self, event: Event) -> tuple[int, dict[str, float]]:
        """Return the run's count at an event, and the event's values, if any."""
        match event.what:
            case RoundOrdered():
                return event.what.count, self._ordered(event.what)
            case RoundCompleted(number, took_s, sent_nbytes) if number in self._open:
                told = {"round/seconds": took_s, "round/sent_bytes": sent_nbytes}
                return self._open.pop(number), {name: float(x) for name, x in told.items() if x is not None}
            case PeriodChosen(period):
                return self._count, {"period": float(period)}
            case Progress():
                self._count = event.what.count
                now = {"period": float(self.view.period)} if event.seq > self._as_of else {}
                return self._count, self._progress(event.what) | now
        return 0, {}

    def _ordered(self, order: RoundOrdered) -> dict[str, float]:
        """Return the values of a global round: its number and the losses."""
        if order.round <= self._round or order.scope != "global":
            return {}
        self._round = order.round
        self._open[order.round] = order.count
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]
        losses = {name: loss for name, loss in order.losses.items() if loss is not None and math.isfinite(loss)}
        values = {"rounds": float(order.round), **{f"loss/{name}": loss for name, loss in losses.items()}}
        consensus = mean(losses.values())
        return values if consensus is None else values | {"loss/consensus": consensus}

    def _progress(self, now: Progress) -> dict[str, float]:
        totals = [worker.totals.last for worker in self.view.workers.values() if worker.totals.last is not None]
        return {
            "progress": now.share,
            "iterations_per_second": self.view.rate,
            "workers": float(sum(each.state in ("live", "held") for each in now.workers)),
            "bytes/sent": float(sum(total.sent_nbytes for total in totals)),
            "bytes/received": float(sum(total.received_nbytes for total in totals)),
            "seconds/compute": sum(total.compute_s for total in totals),
            "seconds/wait": sum(total.waiting_s for total in totals),
            "seconds/exchange": sum(total.exchange_s for total in totals),
            **{f"user/{name}": number for name, number in now.logged.items()},
        }
