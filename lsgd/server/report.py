"""The state of a run as JSON text, for ``lsgd status`` and for what a training script writes at its end."""

import json
import math
from dataclasses import asdict
from typing import Any

from lsgd.protocol.messages import MAX_NBYTES
from lsgd.server.coordinator import Coordinator
from lsgd.server.history import Election
from lsgd.server.members import Member, Phase, by_place

MAX_LEADERS = 1000
"""Most rounds of the history that a report has; of a longer one, every second, third, ... is left out."""


def report(coordinator: Coordinator, now: float) -> str:
    """Return the run's state; docs/operations.md describes the keys."""
    started = coordinator.started_at
    elections = list(coordinator.elections)
    step = -(-len(elections) // MAX_LEADERS) or 1
    document = {
        "run": coordinator.run,
        "state": _state(coordinator),
        "reason": coordinator.stopping or coordinator.waits_for(now),
        "algorithm": coordinator.course.algorithm.name,
        "count": coordinator.count,
        "iterations": coordinator.plan.run.iterations,
        "progress": coordinator.progress(now),
        "seconds": 0.0 if started is None else now - started,
        "rounds_local": coordinator.rounds["local"],
        "rounds_global": coordinator.rounds["global"],
        "generation": coordinator.generation.number if coordinator.generation else 0,
        "groups": len(coordinator.groups),
        "members": [_line(coordinator, m, now) for m in _everybody(coordinator)],
        "leaders": [_entry(election) for election in elections[::-step][::-1]],
    }
    text = json.dumps(document)
    if len(text) > MAX_NBYTES * 3 // 4:  # a run of thousands: the history's losses go first
        document["leaders"] = [{**_entry(e), "losses": {}} for e in elections[::-step][::-1]]
        text = json.dumps(document)
    return text


def _everybody(coordinator: Coordinator) -> list[Member]:
    """Return all members, those that are gone too, in the order of ranks."""
    roster = coordinator.roster
    return sorted((roster.left | roster.members).values(), key=by_place)


def _line(coordinator: Coordinator, member: Member, now: float) -> dict[str, Any]:
    here = coordinator.members.get(member.worker) is member
    states = {Phase.HELD: "held", Phase.BUSY: "live", Phase.LATE: "late", Phase.CUT: "cut"}
    state = states.get(member.phase, "away") if here else "left"
    return {
        "worker": member.worker,
        "node": member.join.node,
        "rank": member.rank if here else -1,
        "state": state,
        "done": coordinator.roster.made.get(member.worker, 0) + (member.done if here else 0),
        "loss": _finite(member.loss),
        "times_leader": member.times_leader,
        "heard_s_ago": round(now - member.heard_at, 3),
    }


def _entry(election: Election) -> dict[str, Any]:
    return {**asdict(election), "losses": {w: _finite(loss) for w, loss in election.losses.items()}}


def _finite(loss: float | None) -> float | None:
    """Return a loss as JSON can have it: one that is no number is none."""
    return loss if loss is not None and math.isfinite(loss) else None


def _state(coordinator: Coordinator) -> str:
    if coordinator.final or coordinator.over:
        return "over"
    if coordinator.stopping:
        return "stopping"
    return "running" if coordinator.generation else "waiting"
