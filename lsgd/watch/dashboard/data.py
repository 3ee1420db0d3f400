"""The page's data: everything it shows, as JSON of bounded size."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lsgd.algorithms import ALGORITHMS
from lsgd.plan.run import RunSettings
from lsgd.settings import changeable
from lsgd.watch.dashboard.story import RECENT_S, Story
from lsgd.watch.dashboard.timeline import columns, pace, shares, traffic
from lsgd.watch.view import RATE_OVER_S, TOLD, RoundView, RunView, WorkerView, mean

MAX_LOSSES = 8000
"""Most points in all workers' curves together; each curve may have at least :data:`MIN_POINTS`."""

MIN_POINTS, MAX_POINTS, MAX_COLUMNS, MAX_MARKS, MAX_LINES, MAX_WORKERS = 60, 600, 200, 150, 200, 256
"""Points of a curve, columns of the timeline, rounds and leaders that are marked, lines of the log, workers shown."""

T = TypeVar("T")


def snapshot(story: Story) -> dict[str, Any]:
    """Return the page's data for a running run."""
    view = story.view
    shown = list(view.workers.values())[:MAX_WORKERS]
    return {
        "connected": view.connected,
        "problem": story.problem,
        "head": _head(view),
        "loss": losses(story.loss_rounds(), [w.worker for w in shown], (view.count, {w.worker: w.loss for w in shown})),
        "recent": _window(story, shown, recent=True),
        "whole": _window(story, shown, recent=False),
        "gaps": [[w.worker, g.state, g.code, g.reason, g.begin, g.end] for w in shown for g in w.gaps],
        "workers": [_worker(story, w) for w in shown],
        "more_workers": len(view.workers) - len(shown),
        "log": [list(line) for line in list(view.log)[-MAX_LINES:]],
        "settings": dict(view.settings),
        "names": setting_names(view.algorithm),
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
    rate = view.count / view.seconds if view.seconds else None
    workers = [worker | {"heard_s": None} for worker in page["workers"]]
    return page | {
        "head": page["head"] | {"rate": rate, "left_s": None},
        "loss": losses(story.loss_rounds(), [worker["worker"] for worker in workers], None),
        "workers": workers,
        "names": [],
    }


def setting_names(algorithm: str) -> list[str]:
    """Return the settings that an operator may change."""
    own = changeable(ALGORITHMS[algorithm]) if algorithm in ALGORITHMS else []
    return sorted({*changeable(RunSettings), *own})


def losses(
    rounds: Sequence[RoundView], workers: Sequence[str], now: tuple[int, Mapping[str, float | None]] | None
) -> dict[str, Any]:
    """Return the curves: of each worker, of the mean at global rounds, and where the leader changes.

    Args:
        rounds: by increasing count.
        workers: names of the workers to include.
        now: the run's current count and losses, for the last point; None: omit it.
    """
    most = min(MAX_POINTS, max(MIN_POINTS, MAX_LOSSES // max(1, len(workers))))
    kept = [(r.count, r.losses) for r in _thinned(rounds, most)] + ([now] if now else [])
    leads = [r for r in rounds if r.scope == "global"]
    changes = [r for i, r in enumerate(leads) if i == 0 or leads[i - 1].leader != r.leader]
    return {
        "counts": [count for count, _ in kept],
        "workers": {w: [_number(told.get(w)) for _, told in kept] for w in workers},
        "consensus": [[r.count, _number(mean(r.losses.values()))] for r in _thinned(leads, MAX_POINTS)],
        "leaders": [[r.count, _number(mean(r.losses.values())), r.leader] for r in _thinned(changes, MAX_MARKS)],
        "leader_changes": max(0, len(changes) - 1),
    }


def _head(view: RunView) -> dict[str, Any]:
    names = (*TOLD, "share", "lost", "time", "left_s", "rate")
    return {name: getattr(view, name) for name in names} | {"loss": _number(view.loss)}


def _worker(story: Story, worker: WorkerView) -> dict[str, Any]:
    names = ("worker", "node", "rank", "state", "code", "reason", "done", "times_leader")
    last = worker.totals.last
    return {
        **{name: getattr(worker, name) for name in names},
        "loss": _number(worker.loss),
        "heard_s": round(worker.heard_s, 1),
        "sent_nbytes": last.sent_nbytes if last else None,
        **pace(story.recent.get(worker.worker, ()), RATE_OVER_S),
    }


def _window(story: Story, shown: Sequence[WorkerView], *, recent: bool) -> dict[str, Any] | None:
    """Return the timeline of the last minutes, or of the whole known history."""
    points = {w.worker: list(story.recent.get(w.worker, ()) if recent else w.totals) for w in shown}
    begins = [each[0].time for each in points.values() if each]
    end = story.view.time
    if not begins or end <= min(begins):
        return None
    begin = max(min(begins), end - RECENT_S) if recent else min(begins)
    over = columns(begin, end, MAX_COLUMNS, least_s=2.0)
    marks: list[list[Any]] = []
    if story.started_at is not None:
        timed = [(story.started_at + r.seconds, r) for r in story.view.rounds]
        for scope in ("global", "local"):
            inside = [(t, r) for t, r in timed if r.scope == scope and t >= over.begin]
            marks += [_mark(t, r) for t, r in _thinned(inside, MAX_MARKS)]
    rows = {name: shares(each, over) for name, each in points.items()}
    return over._asdict() | traffic(points.values(), over) | {"rows": rows, "rounds": marks}


def _mark(time: float, round_: RoundView) -> list[Any]:
    """Return a round as a list: time, scope, leader, duration, bytes, state, id."""
    r = round_
    return [round(time, 2), r.scope, r.leader, _number(r.took_s), r.sent_nbytes, r.state, r.round]


def _thinned(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` items, evenly spaced, including the last."""
    step = -(-len(items) // most) or 1
    return list(items[::-step][::-1])


def _number(value: float | None) -> float | None:
    """Return the value rounded to five digits; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
