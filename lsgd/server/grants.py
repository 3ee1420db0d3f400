"""How requests are answered: with iterations, the end, the same as before, or what they wait for."""

from collections.abc import Iterable

from lsgd.protocol.messages import GenerationOver, Go, Recall, Refused, Round, Stop, Waiting
from lsgd.server.member_states import MemberState
from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import Member
from lsgd.server.state import RunState

_TOKEN = Why.TOKEN()


class Grants:
    """Answers the requests of a run's members.

    Args:
        state: of the run.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state

    def give(self, member: Member, seq: int, most: int = 1) -> bool:
        """Answer the request ``seq`` with up to ``most`` iterations and no round, if both queues have a token.

        Returns whether they had.
        """
        state = self._state
        queue = state.roster.queue_of(member)
        if queue is None or not member.synced or member.last or not state.ledger.has_token(queue):
            return False
        if state.course.schedule.lockstep:  # every iteration is a round: a grant that came back is no token
            return False
        member.seq = seq
        iterations = state.ledger.grant(member, queue, most, state.roster.live)
        self._go(member, None, _TOKEN, iterations)
        return True

    def order(self, member: Member, order: Round, reason: Reason) -> None:
        """Answer a held request with a round and, unless that is the final one, an iteration."""
        if order.final:
            self._reply(member, Stop(member.seq, order, self._state.stopping), MemberState.BUSY)
        else:
            self._go(member, order, reason, 1)

    def dismiss(self, member: Member) -> None:
        """Answer a held request with the end; if the run has failed, the worker fails too."""
        state = self._state
        if state.failed:
            state.roster.move(member, MemberState.ENDED, state.failed)
            state.answer(member, Refused(state.failed))
            return
        failed = not member.leaving and (state.in_vain or member.state is MemberState.CUT)
        self._reply(member, Stop(member.seq, None, member.leaving or state.stopping, failed), MemberState.ENDED)

    def let_go(self, members: list[Member]) -> list[Member]:
        """Dismiss the ``members`` that leave and return the others.

        If only those that leave have the run's model, dismiss nobody and return an empty list.
        """
        leaves, stays = [m for m in members if m.last], [m for m in members if not m.last]
        if any(m.synced for m in leaves) and not any(m.synced for m in stays):
            return []
        for member in leaves:
            member.leaving = Why.GOES_ON()
            self.dismiss(member)
        return stays

    def repeat(self, member: Member) -> None:
        """Answer the same request again."""
        state, answer = self._state, member.answer
        if answer is None:
            cut = member.state is MemberState.CUT
            reason = state.links.words(member.worker, state.now) if cut else state.waits_for(state.now)
            state.answer(member, Waiting(member.seq, reason))
            return
        if answer.round is not None and member.round is None and member.committed < answer.round.id:
            state.answer(member, GenerationOver(answer.round.generation.number, Why.ROUND_FAILED()))
        state.answer(member, answer)

    def recall(self, members: Iterable[Member]) -> None:
        """Recall grants from ``members`` that have more than their next iteration."""
        lent = self._state.ledger.lent
        for member in [m for m in members if m in lent]:
            del lent[member]
            if member.granted > 2:
                self._state.answer(member, Recall())

    def _go(self, member: Member, order: Round | None, reason: Reason, iterations: int) -> None:
        progress = self._state.progress(self._state.now)
        self._reply(member, Go(member.seq, order, progress, reason, iterations), MemberState.BUSY)

    def _reply(self, member: Member, answer: Go | Stop, state: MemberState) -> None:
        """Answer a held request, and remember the answer for repeated requests."""
        member.answer = answer
        self._state.roster.move(member, state)
        self._state.answer(member, answer)
