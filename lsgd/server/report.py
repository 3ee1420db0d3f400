"""The state of a run as JSON text, for ``lsgd status``, and as :mod:`lsgd.server.record` writes it down."""

import json
import statistics
from collections.abc import Reversible
from dataclasses import asdict
from typing import Any

from lsgd.protocol.messages import MAX_NBYTES
from lsgd.server.history import Election
from lsgd.server.member_states import MemberState
from lsgd.server.roster import Member, Roster, by_place, finite
from lsgd.server.state import RunState

MAX_LEADERS = 1000
"""Most rounds of the history that a report has; of a longer one, every second, third, ... is left out."""

_STATES = {
    MemberState.HELD: "held",
    MemberState.BUSY: "live",
    MemberState.STRAGGLER: "straggler",
    MemberState.CUT: "cut",
}


def report(state: RunState, now: float) -> str:
    """Return the run's state and its last rounds; docs/operations.md describes the keys."""
    elections = list(state.book.elections)
    step = -(-len(elections) // MAX_LEADERS) or 1
    document = summary(state, now) | {"leaders": [entry(election) for election in elections[::-step][::-1]]}
    text = json.dumps(document)
    if len(text) > MAX_NBYTES * 3 // 4:  # a run of thousands: the history's losses go first
        document["leaders"] = [{**entry(e), "losses": {}} for e in elections[::-step][::-1]]
        text = json.dumps(document)
    return text


def summary(state: RunState, now: float) -> dict[str, Any]:
    """Return the run's state without its rounds."""
    roster, book = state.roster, state.book
    reason = state.stopping or state.waits_for(now)
    return {
        "run": state.run,
        "state": _state(state),
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
        "events": state.events,
        "members": [_line(roster, m, now) for m in sorted((roster.left | roster.members).values(), key=by_place)],
    }


def _line(roster: Roster, member: Member, now: float) -> dict[str, Any]:
    here = roster.members.get(member.worker) is member
    return {
        "worker": member.worker,
        "node": member.join.node,
        "rank": member.rank if here else -1,
        "state": _STATES.get(member.state, "away") if here else "left",
        "reason": member.left,
        "code": member.left.code,
        "done": roster.made.get(member.worker, 0) + (member.done if here else 0),
        "loss": finite(member.loss),
        "times_leader": member.times_leader,
        "heard_s_ago": round(now - member.heard_at, 3),
    }


def entry(election: Election) -> dict[str, Any]:
    """Return a round of the history."""
    return {**asdict(election), "losses": {w: finite(loss) for w, loss in election.losses.items()}}


def _loss(elections: Reversible[Election]) -> float | None:
    """Return the mean of what the workers of the last global round had reported then; None: no finite loss."""
    last = next((e for e in reversed(elections) if e.scope == "global"), None)
    losses = [x for loss in last.losses.values() if (x := finite(loss)) is not None] if last else []
    return statistics.fmean(losses) if losses else None


def _state(state: RunState) -> str:
    if state.book.final or state.over:
        return "over"
    if state.stopping:
        return "stopping"
    return "running" if state.roster.generation else "waiting"
