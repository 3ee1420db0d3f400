"""The page's data: everything it shows, as JSON of bounded size."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lsgd.algorithms import ALGORITHMS
from lsgd.means import mean_of_finite
from lsgd.plan.run import LENGTH_SETTINGS
from lsgd.protocol.events import RoundOrdered, RunProgress
from lsgd.settings import changeable
from lsgd.watch.reader import Batch
from lsgd.watch.results import without_repeated
from lsgd.watch.view import HELD_OUT, RATE_OVER_S, TAKES_PART, RoundView, RunView, Totals, WorkerView, round_of

RECENT_S = 240.0
"""How many seconds of the workers' reports are kept in full."""

MAX_RECENT = 256
"""Most of these reports per worker."""


class Story:
    """A run's history for the page, from a reader's batches.

    Args:
        older: lines of ``metrics.jsonl``; only those before the view's first round are used.

    Attributes:
        recent: totals in the last :data:`RECENT_S`, by worker.
        problem: reason why nothing can be read; empty: no problem.
    """

    def __init__(self, older: Iterable[Mapping[str, Any]] = ()) -> None:
        self.view = RunView()
        self.recent: dict[str, deque[Totals]] = {}
        self.problem = ""
        names = {each.name for each in fields(RoundOrdered)}
        self._older = [round_of(RoundOrdered(**{name: r[name] for name in names & r.keys()})) for r in older]

    def apply(self, batch: Batch) -> None:
        """Apply a reader's batch."""
        if batch.report is not None and self.view.now.run not in ("", batch.report["run"]):
            self.recent, self._older = {}, []
        for event in self.view.taken(batch):
            if isinstance(event.what, RunProgress):
                self._sample()

    def _sample(self) -> None:
        end = self.view.time
        for name, worker in self.view.workers.items():
            points = self.recent.setdefault(name, deque(maxlen=MAX_RECENT))
            last = worker.totals.last
            if last is not None and (not points or points[-1].time < last.time):
                points.append(last)
            while points and points[0].time < end - RECENT_S:
                points.popleft()

    def loss_rounds(self) -> list[RoundView]:
        """Return all rounds with known losses, by increasing count; of those that were repeated, the last."""
        known = list(self.view.rounds)
        first = known[0].count if known else math.inf
        return without_repeated([*(r for r in self._older if r.count < first), *known], attrgetter("count"))


LEVELS = 20
"""Steps of a share of time, which is one character: ``0`` to ``9``, ``a`` to ``k``."""

_DIGITS = "0123456789abcdefghijk"
_WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


class Columns(NamedTuple):
    """``number`` columns of ``width_s`` seconds from ``begin`` on, in seconds since the epoch."""

    begin: float
    width_s: float
    number: int

    @property
    def edges(self) -> NDArray[np.float64]:
        """Return the start of each column, and the end of the last."""
        return np.asarray(self.begin + self.width_s * np.arange(self.number + 1), dtype=np.float64)


def columns(begin: float, end: float, most: int, least_s: float = 1.0) -> Columns:
    """Return columns from ``begin`` to ``end``; their edges do not move as time passes."""
    fits = (w for w in _WIDTHS_S if w >= least_s and (end - begin) / w <= most - 1)
    width = next(fits, max(1.0, (end - begin) / (most - 1)))
    begin = begin // width * width
    return Columns(begin, width, max(1, int((end - begin) // width)))


def shares(points: Sequence[Totals], over: Columns) -> list[str]:
    """Return the shares of compute, waiting and exchange, each as a string of one character per column."""
    if len(points) < 2:
        return ["0" * over.number] * 3
    points = [next(same) for _, same in groupby(points, _spent)]  # drop points without new time
    spent = np.array([_spent(p) for p in points]).T
    times = np.array([p.time for p in points])
    share = np.array([np.diff(np.interp(over.edges, times, each)) for each in spent]) / over.width_s
    share = np.clip(share, 0.0, None) / np.maximum(1.0, share.sum(axis=0))
    ends = np.rint(np.cumsum(share, axis=0) * LEVELS).astype(int).clip(0, LEVELS)
    return ["".join(_DIGITS[level] for level in row) for row in np.diff(ends, axis=0, prepend=0)]


def traffic(workers: Iterable[Sequence[Totals]], over: Columns) -> dict[str, list[float | None]]:
    """Return what all workers sent, in bytes a second and bytes an iteration; None if there were no iterations."""
    sent, done = np.zeros(over.number), np.zeros(over.number)
    for points in workers:
        if len(points) > 1:
            times = [p.time for p in points]
            sent += np.diff(np.interp(over.edges, times, [p.sent_nbytes for p in points]))
            done += np.diff(np.interp(over.edges, times, [p.done for p in points]))
    per = [round(s / d) if d >= 0.5 else None for s, d in zip(sent.clip(0), done, strict=True)]
    return {"bytes_per_s": np.rint(sent.clip(0) / over.width_s).tolist(), "bytes_per_iteration": per}


def pace(points: Sequence[Totals], over_s: float, now: float) -> dict[str, float | None]:
    """Return a worker's iterations and bytes a second, compute time per iteration, and shares of time.

    They are those of the ``over_s`` seconds up to ``now``; None: it did not report twice in that time.
    """
    names = ("rate", "compute_s", "compute", "waiting", "exchange", "bytes_per_s")
    points = [p for p in points if p.time >= now - over_s]
    if len(points) < 2:
        return dict.fromkeys(names)
    first, last = points[0], points[-1]
    seconds, done = last.time - first.time, last.done - first.done
    spent = [b - a for a, b in zip(_spent(first), _spent(last), strict=True)]
    whole = max(seconds, sum(spent))
    values = (
        done / seconds,
        spent[0] / done if done > 0 else None,
        *(max(0.0, each) / whole for each in spent),
        (last.sent_nbytes - first.sent_nbytes) / seconds,
    )
    return {name: None if v is None else float(f"{v:.4g}") for name, v in zip(names, values, strict=True)}


def _spent(point: Totals) -> tuple[float, float, float]:
    return point.compute_s, point.waiting_s, point.exchange_s


MAX_LOSSES = 8000
"""Most points in all workers' curves together; each curve may have at least :data:`MIN_POINTS`."""

MIN_POINTS, MAX_POINTS, MAX_COLUMNS, MAX_MARKS, MAX_LINES, MAX_WORKERS = 60, 600, 200, 150, 200, 256
"""Points of a curve, columns of the timeline, rounds and leaders that are marked, lines of the log, workers shown."""

MAX_ROUNDS_OF_LAYERS = 120
"""Most rounds for which the page has the agreement of each layer."""

T = TypeVar("T")


def snapshot(story: Story) -> dict[str, Any]:
    """Return the page's data for a running run."""
    view = story.view
    shown = list(view.workers.values())[:MAX_WORKERS]
    workers = [_worker(story, worker) for worker in view.workers.values()]
    return {
        "connected": view.connected,
        "problem": story.problem,
        "head": _head(view),
        "loss": losses(story, [w.worker for w in shown], _now(view)),
        "agreement": _agreement(view),
        "recent": _window(story, shown, recent=True),
        "whole": _window(story, shown, recent=False),
        "gaps": [[w.worker, g.state, g.code, g.reason, g.begin, g.end] for w in shown for g in w.gaps],
        "workers": workers[:MAX_WORKERS],
        "sums": _sums(workers),
        "turns": [[line.time, line.words] for line in view.turns.lines],
        "log": [list(line) for line in list(view.log)[-MAX_LINES:]],
        "settings": dict(view.settings),
        "names": setting_names(view.now.algorithm),
    }


def encoded(document: Mapping[str, Any]) -> str:
    """Return the data as one line of JSON that is also safe inside a script element."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finished(document: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the page's data for a finished run, from its ``result.json`` and the lines of ``metrics.jsonl``."""
    story = Story(rounds)
    story.view = view = RunView(document)
    page = snapshot(story)
    rate = view.made / view.now.seconds if view.now.seconds else None
    workers = [worker | {"heard_s": None} for worker in page["workers"]]
    return page | {
        "head": page["head"] | {"rate": rate, "left_s": None},
        "loss": losses(story, [worker["worker"] for worker in workers], None),
        "workers": workers,
        "names": [],
    }


def setting_names(algorithm: str) -> list[str]:
    """Return the settings that an operator may change."""
    own = changeable(ALGORITHMS[algorithm]) if algorithm in ALGORITHMS else []
    return sorted({*LENGTH_SETTINGS, *own})


def _now(view: RunView) -> RoundView:
    """Return the run's current count and losses, of workers that take part, as if a round had been ordered."""
    current = {worker.worker: worker.loss for worker in view.workers.values() if worker.state in TAKES_PART}
    return RoundView(0, "global", "", view.now.count, view.now.seconds, current)


def losses(story: Story, workers: Sequence[str], now: RoundView | None) -> dict[str, Any]:
    """Return the curves: of each worker, of the mean at global rounds, and where the leader changes, if leaders matter.

    A worker's loss is None where it took part in no round or had no finite loss, and False in a round of another node.
    The last point is ``now``, if given, unless the last round is newer. Losses on held-out data come with their counts.
    """
    rounds = story.loss_rounds()
    most = min(MAX_POINTS, max(MIN_POINTS, MAX_LOSSES // max(1, len(workers))))
    kept = _thinned(rounds, most)
    if now and (not kept or kept[-1].count <= now.count):
        kept.append(now)
    leads = [r for r in rounds if r.scope == "global"]
    changes = [r for i, r in enumerate(leads) if r.leader and (i == 0 or leads[i - 1].leader != r.leader)]
    return {
        "counts": [r.count for r in kept],
        "workers": {w: [r.could_have(w) and _number(r.losses.get(w)) for r in kept] for w in workers},
        "held_out": _held_out(rounds),
        "consensus": [[r.count, _mean(r)] for r in _thinned(leads, MAX_POINTS)],
        "leaders": [[r.count, _mean(r), r.leader] for r in _thinned(changes, MAX_MARKS)],
        "leader_changes": max(0, len(changes) - 1),
    }


def _held_out(rounds: Sequence[RoundView]) -> dict[str, list[tuple[int, float]]]:
    """Return what scripts have averaged of losses on held-out data, by name, with the run's counts."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for each in rounds:
        for name, mean in each.means.items():
            if HELD_OUT.search(name) and (number := _number(mean)) is not None:
                curves.setdefault(name, []).append((each.count, number))
    return {name: _thinned(points, MAX_POINTS) for name, points in curves.items()}


def _agreement(view: RunView) -> dict[str, Any]:
    """Return how far the workers' changes agree: a row for each layer, with a number at each count."""
    points = without_repeated(view.agreements, itemgetter(0))
    kept = _thinned(points, MAX_ROUNDS_OF_LAYERS)
    layers = list(dict.fromkeys(name for _, numbers in kept for name in numbers))
    rows = [[None if (x := numbers.get(name)) is None else round(x, 3) for _, numbers in kept] for name in layers]
    return {"counts": [count for count, _ in kept], "layers": layers, "rows": rows}


def _head(view: RunView) -> dict[str, Any]:
    names = ("lost", "time", "left_s", "rate", "elects")
    return asdict(view.now) | {name: getattr(view, name) for name in names} | {"loss": _number(view.now.loss)}


def _worker(story: Story, worker: WorkerView) -> dict[str, Any]:
    names = ("worker", "node", "rank", "state", "code", "reason", "done", "times_leader")
    last = worker.totals.last
    return {
        **{name: getattr(worker, name) for name in names},
        "loss": _number(worker.loss),
        "heard_s": round(worker.heard_s, 1),
        "sent_nbytes": last.sent_nbytes if last else None,
        **pace(story.recent.get(worker.worker, ()), RATE_OVER_S, story.view.time),
    }


def _sums(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the page says of all workers, also of those that it does not show."""
    sent = [worker["sent_nbytes"] for worker in workers if worker["sent_nbytes"] is not None]
    return {
        "workers": len(workers),
        "out": sum(worker["state"] not in TAKES_PART for worker in workers),
        "done": sum(worker["done"] for worker in workers),  # since the run was resumed, as the bytes are
        "sent_nbytes": sum(sent) if sent else None,
        "bytes_per_s": sum(worker["bytes_per_s"] or 0.0 for worker in workers),
    }


def _window(story: Story, shown: Sequence[WorkerView], *, recent: bool) -> dict[str, Any] | None:
    """Return the timeline of the last minutes, or of all that is known."""
    workers = story.view.workers.values()
    points = {w.worker: list(story.recent.get(w.worker, ()) if recent else w.totals) for w in workers}
    begins = [each[0].time for each in points.values() if each]
    end = story.view.time
    if not begins or end <= min(begins):
        return None
    begin = max(min(begins), end - RECENT_S) if recent else min(begins)
    over = columns(begin, end, MAX_COLUMNS, least_s=2.0)
    marks: list[list[Any]] = []
    timed = [(r.time, r) for r in story.view.rounds if r.time is not None and r.time >= over.begin]
    for scope in ("global", "local"):
        marks += [_mark(t, r) for t, r in _thinned([each for each in timed if each[1].scope == scope], MAX_MARKS)]
    rows = {w.worker: shares(points[w.worker], over) for w in shown}
    return over._asdict() | traffic(points.values(), over) | {"rows": rows, "rounds": marks}


def _mark(time: float, r: RoundView) -> list[Any]:
    """Return a round as a list: time, scope, leader, duration, bytes, state, id."""
    return [round(time, 2), r.scope, r.leader, _number(r.took_s), r.sent_nbytes, r.state, r.round]


def _mean(r: RoundView) -> float | None:
    return _number(mean_of_finite(r.losses.values()))


def _thinned(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, evenly spaced, including the last."""
    step = -(-len(items) // most) or 1
    return list(items[::-step][::-1])


def _number(value: float | None) -> float | None:
    """Return the value rounded to five digits; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
