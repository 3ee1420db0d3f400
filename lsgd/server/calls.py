"""The call that all workers make together, to average numbers or only to wait: who has come, and the answer.

This file implements rule 14 at the top of :mod:`lsgd.server.coordinator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from lsgd.means import mean_of
from lsgd.protocol.messages import MAX_LOGGED, Met
from lsgd.protocol.wants import Call
from lsgd.server.changes import Changes
from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import Member, MemberState, model_of, named

if TYPE_CHECKING:
    from lsgd.server.state import RunState

WAITING = (MemberState.HELD, MemberState.PAUSED, MemberState.CUT)
"""The states in which a worker can be answered: it is in no round."""


@dataclass(eq=False)
class Calls:
    """The answers of the last calls; those who wait for the next one have a ``call`` in the roster.

    Attributes:
        answered: incarnation and answer of each worker, in case the answer is lost; the journal keeps them.
        means: the answers' numbers since the last global round, at most :data:`MAX_LOGGED` names.
    """

    answered: dict[str, tuple[int, Met]] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    _looked: tuple[int, int, bool] = (-1, 0, False)  # at the last look: changes of the state, and what is_due takes

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        return {w: [who, met.number, met.values, met.workers, met.error] for w, (who, met) in self.answered.items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Sequence[Any]]) -> Calls:
        """Return the calls that :meth:`to_json` described."""
        return cls({worker: (who, Met(*fields)) for worker, (who, *fields) in saved.items()})

    def again(self, worker: str, incarnation: int, call: Call) -> Met | None:
        """Return the answer to a call, if it has been given."""
        who, met = self.answered.get(worker, (0, None))
        return met if met and who == incarnation and met.number >= call.number else None

    def take_means(self) -> dict[str, float]:
        """Return the answers' numbers since the last call of this."""
        means, self.means = self.means, {}
        return means

    def is_due(self, held: int, *, stopping: bool) -> bool:
        """Whether anything has changed since the last look; ``held``: number of held members, 0 unless all are."""
        before, self._looked = self._looked, (self.changes.count, held, stopping)
        return before != self._looked


def come(state: RunState, member: Member, call: Call) -> None:
    """Take in a worker's call: refuse it if others wait in another one.

    One that has made no iteration yet is answered alone if one that has waits in another: its call is behind that one.
    """
    for odd, other in _callers(state).items():
        if other.numbers.keys() == call.numbers.keys():
            continue
        if bool(member.done) == bool(odd.done):
            words = {"call": _words(call), "other": odd.worker, "theirs": _words(other)}
            _answer(state, member, Met(call.number, {}, 0, Why.OTHER_CALL(worker=member.worker, **words)))
            return
        late, its = (odd, other) if member.done else (member, call)
        if late.state in WAITING:  # otherwise it asks again, after its round
            _answer(state, late, Met(its.number, its.numbers, 1))
        if late is member:
            return
    if member.held and (call.aside or state.phases.schedule.identical):  # it has nothing that a round could take in
        pause(state, member)


def pause(state: RunState, member: Member) -> None:
    """Let rounds continue without a worker that waits in a call."""
    state.roster.move(member, MemberState.PAUSED, Why.PAUSES(worker=member.worker))


def conclude(state: RunState) -> None:
    """Answer all calls once everybody has come who still trains; if the run stops, nobody else will come."""
    held, live = state.roster.held, state.roster.live
    if not state.calls.is_due(held if held == live else 0, stopping=bool(state.stopping)):
        return
    callers = _callers(state)
    if not callers or _missing(state) or any(m.state not in WAITING for m in callers):
        return
    calls = list(callers.values())
    means = {name: mean_of([call.numbers[name] for call in calls]) for name in calls[0].numbers}
    both = means | state.calls.means | means  # the newest numbers, and their names first
    state.calls.means = dict(islice(both.items(), MAX_LOGGED))
    answered = state.calls.answered.items()  # who does not take part may not have heard of its last one yet
    state.calls.answered = {worker: last for worker, last in answered if worker in state.roster.members}
    for member, call in callers.items():
        _answer(state, member, Met(call.number, means, len(callers)))


def _callers(state: RunState) -> dict[Member, Call]:
    """Return the members that wait in a call and take part in it; who has been dismissed has only to leave."""
    return {m: m.call for m in state.roster.members.values() if m.call and m.state is not MemberState.ENDED}


def awaited(state: RunState, call: Call) -> Reason:
    """Say whom a worker's call waits for."""
    return Why.MEETING(call=_words(call), who=named(_missing(state)) or "those in a round")


def _answer(state: RunState, member: Member, met: Met) -> None:
    """Answer a call; the next round waits for the worker, which now goes on, unless others cannot reach it."""
    state.calls.answered[member.worker] = member.join.incarnation, met
    state.roster.goes_on(member)
    state.progress.moved_at = state.now
    state.roster.move(member, MemberState.PAUSED if member.state is MemberState.CUT else MemberState.BUSY)
    state.answer(member, met)


def _missing(state: RunState) -> Sequence[Member]:
    """Return the members that have not come, and still may.

    Newcomers do not train if only paused callers can give them the model: those continue first.
    """
    over = (MemberState.FINISHED, MemberState.ENDED)
    members = state.roster.members.values()
    missing = [m for m in members if m.iterates and not (m.leaving or m.state in over)]
    paused = (m for m in state.roster.within(MemberState.PAUSED) if m.call)
    in_vain = all(m.held for m in missing) and model_of(paused) > model_of(missing)
    return [] if state.stopping or in_vain else missing


def _words(call: Call) -> str:
    return f"mean() of {', '.join(sorted(call.numbers))}" if call.numbers else "barrier()"
