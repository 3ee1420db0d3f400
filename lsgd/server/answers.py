"""How requests are answered: with iterations, the end, the same as before, or what they wait for."""

from collections.abc import Iterable
from dataclasses import replace

from lsgd.protocol.messages import GenerationOver, Go, Recall, Refused, Round, Stop, Waiting
from lsgd.server.next_step import awaited
from lsgd.server.reasons import Why
from lsgd.server.roster import Member, MemberState
from lsgd.server.state import RunState


def give(state: RunState, member: Member, seq: int, most: int = 1) -> bool:
    """Answer the request ``seq`` with up to ``most`` iterations; return whether both queues had a token."""
    queue = state.roster.queue_of(member)
    if queue is None or not member.synced or not member.iterates or not state.ledger.has_token(queue):
        return False
    if state.course.schedule.lockstep:  # every iteration is a round: a grant that came back is no token
        return False
    member.asked = replace(member.asked, seq=seq)
    iterations = state.ledger.grant(member, queue, most, state.roster.live)
    _go(state, member, None, iterations)
    return True


def order(state: RunState, member: Member, order: Round) -> None:
    """Answer a held request with a round and, unless that is the final one, an iteration."""
    if order.final:
        _reply(state, member, Stop(member.seq, order, state.stopping), MemberState.BUSY)
    else:
        _go(state, member, order, 1)


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


def _go(state: RunState, member: Member, order: Round | None, iterations: int) -> None:
    _reply(state, member, Go(member.seq, order, state.share(state.now), iterations), MemberState.BUSY)


def _reply(state: RunState, member: Member, answer: Go | Stop, after: MemberState) -> None:
    """Answer a held request, and remember the answer for repeated requests."""
    member.answer = answer
    state.roster.move(member, after)
    state.answer(member, answer)
