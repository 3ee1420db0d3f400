"""The state of a run as JSON text, for ``lsgd status`` and :mod:`lsgd.server.record`."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Reversible
from dataclasses import asdict
from itertools import islice
from typing import Any

from lsgd.protocol.events import Progress, RoundOrdered, WorkerProgress
from lsgd.protocol.messages import MAX_LOGGED, MAX_LOGGED_NAME, MAX_NBYTES, Heartbeat
from lsgd.server.roster import Member, Roster, by_place, finite
from lsgd.server.state import RunState

MAX_LEADERS = 1000
"""Most rounds of the history in a report; of a longer history, it has every second, third, ... round."""

MAX_PROGRESS_WORKERS = 4096
"""Most workers in a :class:`Progress`: more would not fit into a message."""


def report(state: RunState, now: float, stream: Mapping[str, Any] | None = None) -> str:
    """Return the run's state and its last rounds; docs/guides/operations.md describes the keys.

    Args:
        state: of the run.
        now: seconds of its clock.
        stream: the ``epoch`` of the stream of events, and the number of its ``last`` one, which this report includes.
    """
    elections = list(state.book.elections)
    step = -(-len(elections) // MAX_LEADERS) or 1
    leaders = [entry(election) for election in elections[::-step][::-1]]
    document = summary(state, now) | {"leaders": leaders, "stream": dict(stream or {})}
    text = json.dumps(document)
    if len(text) > MAX_NBYTES * 3 // 4:  # thousands of workers: drop the history's losses first
        text = json.dumps(document | {"leaders": [leader | {"losses": {}} for leader in leaders]})
    return text


def summary(state: RunState, now: float) -> dict[str, Any]:
    """Return the run's state without its rounds."""
    roster, book = state.roster, state.book
    reason = state.stopping or state.waits_for(now)
    return {
        "run": state.run,
        "state": state.stage,
        "reason": reason,
        "code": reason.code,
        "algorithm": state.course.algorithm.name,
        "period": state.course.schedule.period,
        "period_reason": state.course.why,
        "count": state.ledger.count,
        "iterations": state.plan.run.iterations,
        "progress": state.progress(now),
        "loss": _loss(book.elections),
        "seconds": 0.0 if state.started_at is None else now - state.started_at,
        "rounds_local": book.ordered["local"],
        "rounds_global": book.ordered["global"],
        "generation": roster.generation.number if roster.generation else 0,
        "nodes": len(roster.queues),
        "ways": state.ways.shown(),
        "events": state.events,
        "members": [_line(roster, m, now) for m in sorted((roster.left | roster.members).values(), key=by_place)],
    }


def progress(state: RunState, now: float) -> Progress:
    """Return how far the run is."""
    roster, reason = state.roster, state.stopping or state.waits_for(now)
    members = sorted(roster.members.values(), key=by_place)[:MAX_PROGRESS_WORKERS]
    return Progress(
        seconds=0.0 if state.started_at is None else now - state.started_at,
        state=state.stage,
        code=reason.code,
        reason=str(reason),
        count=state.ledger.count,
        iterations=state.plan.run.iterations,
        share=state.progress(now),
        workers=tuple(_progress_of(roster, member, now) for member in members),
        logged=_logged(members),
    )


def _logged(members: Iterable[Member]) -> dict[str, float]:
    """Return the means of what the live members' scripts logged: over finite numbers, of a bounded set of names."""
    numbers: dict[str, list[float]] = {}
    for spent in (member.spent for member in members if member.live and member.spent):
        for name, number in islice(spent.logged.items(), MAX_LOGGED):
            known = name in numbers or (len(numbers) < MAX_LOGGED and len(name) <= MAX_LOGGED_NAME)
            if known and math.isfinite(number):
                numbers.setdefault(name, []).append(number)
    return {name: mean for name in sorted(numbers) if math.isfinite(mean := sum(numbers[name]) / len(numbers[name]))}


def _progress_of(roster: Roster, member: Member, now: float) -> WorkerProgress:
    spent = member.spent or Heartbeat(member.worker, 0)
    return WorkerProgress(
        worker=member.worker,
        rank=member.rank,
        state=member.state.shown,
        done=roster.made.get(member.worker, 0) + member.done,
        loss=finite(member.loss),
        heard_s=now - member.heard_at,
        compute_s=_total_s(spent.compute_s),
        waiting_s=_total_s(spent.waiting_s),
        exchange_s=_total_s(spent.exchange_s),
        sent_nbytes=max(0, spent.sent_nbytes),
        received_nbytes=max(0, spent.received_nbytes),
    )


def _total_s(seconds: float) -> float:
    """Return a total that a worker reported; 0 if it is nonsense."""
    return seconds if 0 <= seconds < math.inf else 0.0


def _line(roster: Roster, member: Member, now: float) -> dict[str, Any]:
    here = roster.members.get(member.worker) is member
    return {
        "worker": member.worker,
        "node": member.join.node,
        "rank": member.rank if here else -1,
        "state": member.state.shown if here else "left",
        "reason": member.left,
        "code": member.left.code,
        "done": roster.made.get(member.worker, 0) + (member.done if here else 0),
        "loss": finite(member.loss),
        "times_leader": member.times_leader,
        "heard_s_ago": round(now - member.heard_at, 3),
    }


def entry(election: RoundOrdered) -> dict[str, Any]:
    """Return a round of the history."""
    return {**asdict(election), "losses": {w: finite(loss) for w, loss in election.losses.items()}}


def _loss(elections: Reversible[RoundOrdered]) -> float | None:
    """Return the mean loss of the workers of the last global round, as reported then; None: no finite loss."""
    last = next((e for e in reversed(elections) if e.scope == "global"), None)
    losses = [x for loss in last.losses.values() if (x := finite(loss)) is not None] if last else []
    return statistics.fmean(losses) if losses else None
