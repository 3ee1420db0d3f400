"""What holds of a run's state between two messages: the invariants of its parts, and those between them."""

import json
import math
from typing import Any

from lsgd.server.journal import capture, restore
from lsgd.server.roster import MAX_LEFT, MemberState, Roster
from lsgd.server.state import RunState


def check_state(state: RunState) -> None:
    """Assert the invariants of the parts of a run's state, and those between them."""
    roster, ledger = state.roster, state.ledger
    members = list(roster.members.values())
    check_roster(roster)
    _check_book(state)
    _check_ledger(state)
    reported = sum(m.done for m in members) + sum(roster.made.values())
    assert ledger.count == ledger.base + reported or len(roster.left) == MAX_LEFT  # some are forgotten
    assert not state.stopping or ledger.tokens == 0
    has_grant = (MemberState.BUSY, MemberState.STRAGGLER, MemberState.SILENT)
    assert all(m.state in has_grant for m in members if m.granted)
    assert all(m.state is MemberState.BUSY for m in members if m.round)
    assert all(m.answer is None for m in members if m.state is MemberState.CUT)


def check_roster(roster: Roster) -> None:
    """Assert that the counts fit the members, and the generation fits its queues."""
    everybody = list(roster.members.values())
    inside = sorted((m for m in everybody if m.rank >= 0), key=lambda m: m.rank)
    names = roster.generation.members if roster.generation else ()
    assert all(name == m.worker for name, m in roster.members.items())
    assert roster.live == len(roster.within(MemberState.HELD, MemberState.BUSY))
    assert roster.held == len(roster.within(MemberState.HELD))
    assert roster.absent == len(names) - sum(m.live for m in inside)
    assert [names[m.rank] for m in inside] == [m.worker for m in inside]
    assert [m.worker for g in roster.queues.values() for m in g.members] == list(names)
    for index, queue in enumerate(roster.queues.values()):
        assert queue.index == index
        assert queue.held == sum(m.held for m in inside if m.join.node == queue.node)
    assert roster.broken or all(m.rank >= 0 for m in everybody if m.synced)
    _check_restored(roster)


def _check_restored(roster: Roster) -> None:
    """Assert that a server can continue with these members, as from a journal."""
    members, left = roster.members.values(), roster.left.values()
    again = Roster(members, left, roster.made, roster.generation, roster.broken, roster.replaced)
    assert (again.live, again.held, again.absent) == (roster.live, roster.held, roster.absent)
    assert _places(again) == _places(roster)


def _places(roster: Roster) -> list[tuple[int, list[str]]]:
    return [(queue.node, [m.worker for m in queue.members]) for queue in roster.queues.values()]


def _check_book(state: RunState) -> None:
    book, members = state.book, state.roster.members.values()
    assert {m for opened in book.open.values() for m in opened.waiting} == {m for m in members if m.round}
    assert not book.final or len(book.open) <= 1
    for id, opened in book.open.items():
        assert id == opened.round.id < book.next_id and opened.waiting
        for member in opened.waiting:
            assert member.round is opened and member.record.committed < id and member.rank >= 0
            assert member.answer is not None and member.answer.round is opened.round


def _check_ledger(state: RunState) -> None:
    ledger, limit = state.ledger, state.plan.run.iterations
    granted = [m.granted for m in state.roster.members.values()]
    assert ledger.tokens >= 0 and all(queue.tokens >= 0 for queue in state.roster.queues.values())
    assert all(iterations >= 0 for iterations in granted)
    assert ledger.tokens <= max(0, (limit or math.inf) - ledger.count - sum(granted))


SAID_AGAIN = ("run", "count", "base", "unheard", "changes", "elapsed_s")
"""What the journal has now and then only, because members say it again, or because it is a time; and its name."""

MEMBER_SAYS_AGAIN = (
    *("done", "shared", "committed", "granted", "sent_nbytes"),
    "has",  # it has completed a round, or says so again
    "usual",
)


class KeptState:
    """Asserts that a server which is killed after any message continues from what the journal has then.

    The journal is written when the state's ``changes`` have changed. So what it has to have must not change without.
    ``restores``: whether to restore the state, too, each time that it is written.
    """

    def __init__(self, *, restores: bool = False) -> None:
        self._restores = restores
        self._state: RunState | None = None
        self._changes = -1
        self._kept = ""

    def check(self, state: RunState) -> None:
        """Compare the journal with the live state, and the state that is restored from it, too."""
        now = _to_keep(state)
        if state is self._state and state.changes == self._changes:
            assert now == self._kept, _differ(_read(self._kept), _read(now))
            return
        self._state, self._changes, self._kept = state, state.changes, now
        if self._restores:
            again = _read(_to_keep(restore(json.loads(json.dumps(capture(state, state.now))), state.now)))
            assert again == _read(now), _differ(again, _read(now))


def _differ(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one, other
    return {name: _differ(one.get(name), other.get(name)) for name in one | other if one.get(name) != other.get(name)}


def _read(kept: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kept)
    return found | {"plan": json.loads(found["plan"])}  # 10 is 10.0


def _to_keep(state: RunState) -> str:
    saved = {name: what for name, what in capture(state, state.now).items() if name not in SAID_AGAIN}
    saved["members"] = {each["join"]["worker"]: _member_to_keep(each) for each in saved["members"]}
    saved["left"] = [_member_to_keep(each) for each in saved["left"]]
    saved["open"] = [each["round"]["id"] for each in saved["open"]]
    saved["links"] = {worker: [*cut[:2], cut[3]] for worker, cut in saved["links"].items()}  # without a time
    return json.dumps(saved)


def _member_to_keep(saved: dict[str, Any]) -> dict[str, Any]:
    live = MemberState[saved["state"]].live or saved["state"] == "CUT"  # its request comes again
    kept = {name: what for name, what in saved.items() if name not in MEMBER_SAYS_AGAIN}
    _, wants, *_ = saved["asked"]
    return kept | {"state": "BUSY" if live else saved["state"], "asked": wants}
