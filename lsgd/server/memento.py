"""Converts the state of a run to plain data and back, so that a restarted global server can continue it.

The data has rounds, generations and members, with what each has reported so far; of grants only those of evicted
members, and no tokens. So a restored run has nothing to grant until all live members have asked and so reported what
they did meanwhile. Then no grant is outstanding, the count is exact, and a global round follows. Members that ask again
for an open round get the same answer.
"""

import dataclasses
import math
from typing import Any

from lsgd.errors import ConfigError
from lsgd.plan.plan import Plan, algorithm_of, table_of
from lsgd.protocol.messages import Generation, Go, Join, Round, Stop
from lsgd.server.member_states import MemberState
from lsgd.server.pace import Pace
from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import Member, OpenRound, Roster, finite
from lsgd.server.rounds import RoundBook
from lsgd.server.state import RunState
from lsgd.server.tokens import Ledger
from lsgd.server.ways import Ways

VERSION = 8
"""Version of the format."""

_KEPT = ("rank", "synced", "done", "committed", "times_leader", "usual")
"""Fields of a member that are kept unchanged."""


def capture(state: RunState, now: float) -> dict[str, Any]:
    """Return the state of a run, for JSON."""
    roster, ledger, book, course = state.roster, state.ledger, state.book, state.course
    return {
        "version": VERSION,
        "run": state.run,
        "plan": state.plan.to_json(),
        "closed": state.closed,
        "stopping": state.stopping.to_json(),
        "failed": state.failed.to_json(),
        "count": ledger.count,
        "base": ledger.base,
        "unheard": ledger.at_risk(roster.members.values()),
        "rounds": book.ordered,
        "failures": book.failures,
        "final": book.final,
        "elapsed_s": None if state.started_at is None else now - state.started_at,
        "phase": course.number,
        "algorithm": table_of(course.algorithm),
        "next_algorithm": table_of(course.next_algorithm),
        "pace": course.pace.to_json(),
        "why": course.why.to_json(),
        "generation": None if roster.generation is None else _fields(roster.generation),
        "broken": roster.broken.to_json(),
        "open": [
            {"round": _fields(o.round, "generation"), "waiting": sorted(m.worker for m in o.waiting)}
            for o in book.open.values()
        ],
        "members": [_member(m) for m in roster.members.values()],
        "digests": {digest: m.worker for digest, m in roster.digests.items()},
        "left": [_member(m) for m in roster.left.values()],
        "made": roster.made,
        "links": state.links.capture(now),
        "ways": state.ways.capture(),
    }


def restore(saved: dict[str, Any], now: float) -> RunState:
    """Return the state that :func:`capture` captured, with no member silent or waiting yet.

    Raises:
        ConfigError: the data has another version, or is not a state.
    """
    if saved.get("version") != VERSION:
        raise ConfigError(f"it is of version {saved.get('version')}, this lsgd reads version {VERSION}")
    try:
        return _state_of(saved, now)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"it holds no state of a run: {error!r}") from None


def _state_of(saved: dict[str, Any], now: float) -> RunState:
    generation = Generation(**_of_lists(saved["generation"])) if saved["generation"] else None
    members = {m.worker: m for m in (_member_of(each, now) for each in saved["members"])}
    opened = []
    for each in saved["open"]:
        order = Round(**_of_lists(each["round"] | {"generation": generation}))
        opened.append(OpenRound(order, {members[name] for name in each["waiting"]}))
    state = RunState(
        Plan.from_json(saved["plan"]),
        saved["run"],
        now=now,
        roster=Roster(
            members.values(),
            [_member_of(each, now) for each in saved["left"]],
            saved["made"],
            generation,
            Reason(*saved["broken"]),
            {digest: members[worker] for digest, worker in saved["digests"].items()},
        ),
        ledger=Ledger(saved["count"], saved["base"], saved["unheard"]),
        book=RoundBook(saved["rounds"], saved["failures"], saved["final"], opened),
        started_at=None if saved["elapsed_s"] is None else now - saved["elapsed_s"],
        ways=Ways(*saved["ways"]),
        stopping=Reason(*saved["stopping"]),
        failed=Reason(*saved["failed"]),
        closed_at=now if saved["closed"] else math.inf,
    )
    algorithm, following = (algorithm_of(saved[key], "the journal") for key in ("algorithm", "next_algorithm"))
    pace, why = Pace(**saved["pace"]), Reason(*saved["why"])
    state.course.resume(saved["phase"], algorithm, following, pace, why)
    state.links.restore(saved["links"], now)
    for each in opened:
        _answer_again(state, each)
    return state


def _answer_again(state: RunState, opened: OpenRound) -> None:
    """Give members that had not completed a round the answer that ordered it."""
    order, again = opened.round, Why.AGAIN()
    for member in opened.waiting:
        member.round, member.seq = opened, member.seq + 1
        go = Go(member.seq, order, state.progress(state.now), again)
        member.answer = Stop(member.seq, order, again) if order.final else go


def _member(member: Member) -> dict[str, Any]:
    return {name: getattr(member, name) for name in (*_KEPT, "granted", "seq")} | {
        "join": _fields(member.join),
        "state": member.state.name,
        "loss": finite(member.loss),
        "leaving": member.leaving.to_json(),
        "left": member.left.to_json(),
    }


def _member_of(saved: dict[str, Any], now: float) -> Member:
    member = Member(
        Join(**saved["join"]),
        now,
        MemberState[saved["state"]],
        seq=saved["seq"],
        loss=saved["loss"],
        leaving=Reason(*saved["leaving"]),
        left=Reason(*saved["left"]),
        **{name: saved[name] for name in _KEPT},
    )
    if member.live or member.state in (MemberState.STRAGGLER, MemberState.CUT):
        member.seq -= 1  # its last answer may not have arrived: it may ask with that number again
    if member.live or member.state is MemberState.CUT:
        member.state = MemberState.BUSY
    elif member.state is MemberState.STRAGGLER or member.was_silent:
        member.granted = saved["granted"]  # nobody waits for it: its grant is set aside
    return member


def _fields(message: Generation | Join | Round, *without: str) -> dict[str, Any]:
    """Return a message's fields, except those that are kept elsewhere."""
    names = (field.name for field in dataclasses.fields(message))
    return {name: getattr(message, name) for name in names if name not in without}


def _of_lists(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a message from JSON, with tuples for lists."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
