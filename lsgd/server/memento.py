"""The coordinator's state as plain data, and back: what a global server that is started again goes on with.

Captured are rounds, generations and members, with what each has reported so far; not every single grant (but those
of members that were left out), and no tokens. So a restored coordinator has nothing to grant until all live members
have asked, and with that have reported what they did in the meantime: then no grant is outstanding, the count is
exact, and a global round comes. An open round is answered the same, to those that ask for it again.
"""

import dataclasses
import math
from typing import Any

from lsgd.errors import ConfigError
from lsgd.plan.plan import Plan, algorithm_of, table_of
from lsgd.protocol.messages import Generation, Go, Join, Round, Stop
from lsgd.server.coordinator import Coordinator
from lsgd.server.members import Member, OpenRound, Phase

VERSION = 4
"""Of the form of the data."""

AGAIN = "the global server was started again"


def capture(coordinator: Coordinator, now: float) -> dict[str, Any]:
    """Return the state of a run, as JSON can have it."""
    started = coordinator.started_at
    generation = coordinator.generation
    return {
        "version": VERSION,
        "run": coordinator.run,
        "plan": coordinator.plan.to_json(),
        "closed": coordinator.closed,
        "stopping": coordinator.stopping,
        "final": coordinator.final,
        "broken": coordinator.broken,
        "failures": coordinator.failures,
        "count": coordinator.count,
        "unheard": _unheard(coordinator),
        "rounds": coordinator.rounds,
        "elapsed_s": None if started is None else now - started,
        "phase": coordinator.course.number,
        "algorithm": table_of(coordinator.course.algorithm),
        "next_algorithm": table_of(coordinator.course.next_algorithm),
        "generation": None if generation is None else dataclasses.asdict(generation),
        "open": [
            {"round": _round(o.round), "waiting": sorted(m.worker for m in o.waiting)}
            for o in coordinator.open.values()
        ],
        "members": [_member(m) for m in coordinator.members.values()],
        "digests": {digest: m.worker for digest, m in coordinator.digests.items()},
        "left": [_member(m) for m in coordinator.roster.left.values()],
        "made": coordinator.roster.made,
        "links": coordinator.links.capture(now),
    }


def restore(state: dict[str, Any], now: float) -> Coordinator:
    """Return a coordinator with the state that :func:`capture` returned.

    Raises:
        ConfigError: the state is of another version, or no state.
    """
    if state.get("version") != VERSION:
        raise ConfigError(f"it is of version {state.get('version')}, this lsgd reads version {VERSION}")
    try:
        return _restore(state, now)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"it holds no state of a run: {error!r}") from None


def _restore(state: dict[str, Any], now: float) -> Coordinator:
    coordinator = Coordinator(Plan.from_json(state["plan"]), state["run"])
    coordinator.stopping, coordinator.final = state["stopping"], state["final"]
    coordinator.closed, coordinator.failures = state["closed"], state["failures"]
    coordinator.broken, coordinator.count = state["broken"], state["count"]
    coordinator.unheard = state["unheard"]
    coordinator.rounds = dict(state["rounds"])
    coordinator.started_at = None if state["elapsed_s"] is None else now - state["elapsed_s"]
    algorithms = [algorithm_of(state[key], "the journal") for key in ("algorithm", "next_algorithm")]
    coordinator.course.resume(state["phase"], *algorithms)
    coordinator.links.restore(state["links"], now)
    roster = coordinator.roster
    roster.made = dict(state["made"])
    roster.left = {m.worker: m for m in (_member_of(saved, now) for saved in state["left"])}
    for saved in state["members"]:
        roster.add(_member_of(saved, now))
    coordinator.digests = {digest: roster.members[worker] for digest, worker in state["digests"].items()}
    if state["generation"] is not None:
        saved = state["generation"]
        lists = {name: tuple(saved[name]) for name in ("nodes", "node_sizes", "indices")}
        roster.generation = Generation(**{**saved, **lists})
    for opened in state["open"]:
        _reopen(coordinator, opened)
    coordinator.resume(now)
    return coordinator


def _reopen(coordinator: Coordinator, saved: dict[str, Any]) -> None:
    """Open a round again, for those who had not completed it."""
    round = _round_of(saved["round"], coordinator.generation)
    waiting = {coordinator.members[name] for name in saved["waiting"]}
    coordinator.open[round.id] = opened = OpenRound(round, waiting)
    for member in waiting:
        member.round, member.seq = opened, member.seq + 1
        member.answer = (
            Stop(member.seq, round, AGAIN)
            if round.final
            else Go(member.seq, round, coordinator.progress(0.0), AGAIN)
        )


def _unheard(coordinator: Coordinator) -> int:
    """Return the most iterations that live members can make before anything else is captured."""
    granted = sum(m.granted for m in coordinator.members.values() if m.live)
    return coordinator.unheard + int(coordinator.tokens) + granted


def _member(member: Member) -> dict[str, Any]:
    return {
        "join": dataclasses.asdict(member.join),
        "phase": member.phase.name,
        "rank": member.rank,
        "synced": member.synced,
        "granted": member.granted,
        "leaving": member.leaving,
        "seq": member.seq,
        "done": member.done,
        "committed": member.committed,
        "loss": _finite(member.loss),
        "times_leader": member.times_leader,
        "silent": member.silent,
    }


def _member_of(saved: dict[str, Any], now: float) -> Member:
    member = Member(Join(**saved["join"]), now)
    member.phase = Phase[saved["phase"]]
    member.seq = saved["seq"]
    if member.live or member.phase in (Phase.LATE, Phase.CUT):
        member.seq -= (
            1  # whether or not its last answer has arrived, it may ask for it as if for the first time
        )
    if member.live or member.phase is Phase.CUT:
        member.phase = Phase.BUSY
    elif member.phase is Phase.LATE or saved["silent"]:
        member.granted = saved["granted"]  # it is not waited for: what it may make is set aside
    for name in ("rank", "synced", "leaving", "done", "committed", "loss", "times_leader", "silent"):
        setattr(member, name, saved[name])
    return member


def _round(round: Round) -> dict[str, Any]:
    return {
        field.name: getattr(round, field.name)
        for field in dataclasses.fields(round)
        if field.name != "generation"
    }


def _round_of(saved: dict[str, Any], generation: Generation | None) -> Round:
    assert generation is not None
    lists = {"leaders": tuple(saved["leaders"]), "new": tuple(saved["new"])}
    return Round(**{**saved, **lists}, generation=generation)


def _finite(loss: float | None) -> float | None:
    """Return a loss as JSON can have it."""
    return loss if loss is not None and math.isfinite(loss) else None
