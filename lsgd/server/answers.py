"""How requests are answered: with iterations, the end, the same as before, or what they wait for."""

from collections.abc import Iterable
from dataclasses import replace

from lsgd.protocol.messages import GenerationOver, Go, Recall, Refused, Stop, Waiting
from lsgd.server.next_step import awaited
from lsgd.server.reasons import Why
from lsgd.server.roster import Member, MemberState, OpenRound
from lsgd.server.state import RunState


def give(state: RunState, member: Member, seq: int, iterations: int) -> None:
    """Answer the request ``seq`` with iterations."""
    member.asked = replace(member.asked, seq=seq)
    _reply(state, member, Go(seq, None, state.share(state.now), iterations), MemberState.BUSY)


def order(state: RunState, members: Iterable[Member], opened: OpenRound) -> None:
    """Answer the held requests of a round's members with it and, unless it is the final one, an iteration."""
    state.roster.enter(opened)
    progress, order = state.share(state.now), opened.round
    for member in members:
        final = Stop(member.seq, order, state.stopping) if order.final else None
        member.answer = final or Go(member.seq, order, progress, 1)
        state.answer(member, member.answer)


def dismiss(state: RunState, member: Member) -> None:
    """Answer a held request with the end; if the run has failed, the worker fails too."""
    if state.failed:
        state.roster.move(member, MemberState.ENDED, state.failed)
        state.answer(member, Refused(state.failed))
        return
    late = state.book.final and member.record.committed < state.book.next_id - 1
    failed = not member.leaving and (state.in_vain or member.state is MemberState.CUT)
    _reply(state, member, Stop(member.seq, None, member.leaving or state.stopping, failed, late), MemberState.ENDED)


def repeat(state: RunState, member: Member) -> None:
    """Answer the same request again."""
    answer = member.answer
    if answer is None:
        state.answer(member, Waiting(member.seq, awaited(state, member)))
        return
    if answer.round is not None and member.round is None and member.record.committed < answer.round.id:
        state.answer(member, GenerationOver(answer.round.generation.number, Why.ROUND_FAILED()))
    state.answer(member, answer)


def recall(state: RunState, members: Iterable[Member]) -> None:
    """Recall grants from ``members`` that have more than their next iteration."""
    lent = state.ledger.lent
    for member in [m for m in members if m in lent]:
        del lent[member]
        if member.granted > 2:
            state.answer(member, Recall())


def _reply(state: RunState, member: Member, answer: Go | Stop, after: MemberState) -> None:
    """Answer a held request, and remember the answer for repeated requests."""
    member.answer = answer
    state.roster.move(member, after)
    state.answer(member, answer)
