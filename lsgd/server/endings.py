"""What ends: a member's part in a round, a round, a generation, the run; and what follows from it.

This file implements rules 6, 7, 9 and 11 at the top of :mod:`lsgd.server.coordinator`.
"""

from collections.abc import Iterable, Sequence

from lsgd.means import finite
from lsgd.protocol.events import RoundCompleted, RoundFailed
from lsgd.protocol.messages import GenerationOver, Refused
from lsgd.server import answers
from lsgd.server.life import LifeState
from lsgd.server.links import named_pairs
from lsgd.server.reasons import Reason, Why, number_of
from lsgd.server.roster import Has, Member, MemberState, OpenRound, named
from lsgd.server.state import RunState

EXCHANGE_STEPS = 10
"""Most steps of a round that members wait for, each with the deadline ``exchange_timeout_s``."""

STALLED_PATIENCES = 10
"""How long workers that have finished, or leave, wait for others that do nothing, as a multiple of ``patience_s``."""


def stop(state: RunState, reason: Reason) -> None:
    """End the run: withdraw all tokens; the consensus round follows when all live members are held."""
    if not state.stopping:
        hold_again(state, state.roster.within(MemberState.FINISHED))
        state.life.ends_for(reason)
        state.life.move(LifeState.STOPPING, state.now)
        state.ledger.withdraw()
        state.links.relent(state.now)
        answers.recall(state, state.ledger.lent)
        state.note(Why.STOPPING(reason=reason))


def hold_again(state: RunState, members: Iterable[Member]) -> None:
    """Hold the requests of members that were outside rounds, so that the next one has them."""
    for member in members:
        member.held_at = state.now
        state.roster.move(member, MemberState.HELD)


def fail(state: RunState, reason: Reason) -> None:
    """End the run for all its members at once, as failed: nothing of what it has learned counts."""
    stop(state, reason)
    state.life.ends_for(reason, failed=True)
    close(state)
    for member in state.roster.members.values():
        if member.state is not MemberState.ENDED:  # it asks later, perhaps when this server has ended
            state.answer(member, Refused(reason))


def close(state: RunState) -> None:
    """From now on, answer every request with the end."""
    if not state.closed:
        state.life.move(LifeState.CLOSED, state.now)
    for member in state.roster.within(MemberState.HELD, MemberState.CUT):
        answers.dismiss(state, member)


def settle(
    state: RunState,
    member: Member,
    done: int,
    round_id: int = 0,
    skips: Why | None = None,
    *,
    lacking: bool = False,
) -> None:
    """Count what a member has done, and the round that it has completed; its unused grant goes back.

    ``round_id``: the last one that it has completed; ``skips``: why it will not complete the one that it is in, None if
    it may yet; ``lacking``: as in :class:`Completed`.
    """
    roster = state.roster
    state.ledger.settle(
        member, done, roster.queues, state.limit, roster.members.values(), stopping=bool(state.stopping)
    )
    if member.rank < 0 or state.phases.schedule.identical:
        settle_own(state, member)
    if round_id > member.record.committed:
        committed(state, member, round_id, lacking=lacking)
    if skips is not None and member.round is not None:
        left_round(state, member, skips)


def use(state: RunState, member: Member, done: int, keep: int = 0) -> None:
    """Count what a member has done, and keep the last ``keep`` iterations of its grant."""
    state.ledger.use(member, done, keep)
    if member.rank < 0 or state.phases.schedule.identical:
        settle_own(state, member)


def without_the_gone(state: RunState) -> None:
    """Count no longer what those that have left have made since their last global round: others make it again."""
    for worker, iterations in state.roster.replaced.items():
        lose(state, worker, iterations)
    state.roster.replaced.clear()
    for member in state.roster.left.values():
        lose_own(state, member)


def goes_on(state: RunState, *, final: bool) -> None:
    """Note that a global round is made without those that have left, or are no members of the generation.

    After a ``final`` one there is no later round for what they have learned.
    """
    without_the_gone(state)
    for member in state.roster.members.values():
        if member.rank < 0:
            falls_behind(state, member)
            if final:
                lose_own(state, member)


def falls_behind(state: RunState, member: Member) -> None:
    """Note that the run goes on without what a member has."""
    member.falls_behind()
    settle_own(state, member)


def settle_own(state: RunState, member: Member) -> None:
    """Decide whether what a member has made since its last global round still counts.

    Where models are identical, the others have made it, too. Without the run's model, a member takes over another's,
    and loses it, unless all know a common model, to which it adds what it has learned in a later round.
    """
    if state.phases.schedule.identical:
        member.account.share(member.done)
    elif not member.synced and (state.book.final or not state.phases.schedule.common):
        lose_own(state, member)


def lose_own(state: RunState, member: Member) -> None:
    """Count no longer what a member has made since its last global round: no model of the run will have it."""
    if member.unshared:
        lose(state, member.worker, member.unshared)
        member.account.share(member.done)


def lose(state: RunState, worker: str, iterations: int) -> None:
    """Count some of what a worker has made no longer."""
    state.note(Why.LOSES(worker=worker, lost=number_of(iterations, "iteration")))
    state.roster.changes.count += 1
    state.ledger.lose(iterations)


def committed(
    state: RunState,
    member: Member,
    round_id: int,
    sent_nbytes: int | None = None,
    transfer_s: float = 0.0,
    *,
    lacking: bool = False,
) -> None:
    """Note that a member has completed a round.

    ``sent_nbytes``: in all its rounds, None if it did not say; ``transfer_s`` and ``lacking``: as in
    :class:`Completed`.
    """
    opened = state.book.complete(member, round_id, state.now, sent_nbytes, lacking=lacking)
    if opened is None:
        return
    opened.transfer_s = max(opened.transfer_s, finite(transfer_s) or 0.0)
    state.progress.moved_at = state.now
    if opened.round.final:
        state.roster.move(member, MemberState.ENDED)
    if opened.waiting:
        return
    took_s = None if opened.opened_at is None else state.now - opened.opened_at
    state.happened(RoundCompleted(round_id, took_s, opened.sent_nbytes))
    if opened.round.scope == "global":
        training = sum(m.rank >= 0 and m.has is not Has.PARTS for m in state.roster.members.values())
        state.phases.pace.completed(state.now, training, opened.transfer_s)
        state.book.took_part(len(opened.round.generation.indices), len(state.roster.members))
    if opened.round.final:
        close(state)


def found(state: RunState, member: Member, round_id: int, missed: Sequence[int]) -> None:
    """Note which nodes cannot dial which, as a member has found in a probed round."""
    opened = member.round
    if opened is None or opened.round.id != round_id or not opened.round.probe:
        return
    nodes = opened.round.generation.nodes
    if pairs := state.links.ways.found(nodes, missed):
        state.note(Why.RELAYED(**named_pairs([f"node{a} and node{b}" for a, b in pairs])))


def left_round(state: RunState, member: Member, why: Why, **values: object) -> None:
    """Note that a member will not complete the round that it is in, if any."""
    if member.round is not None:
        fail_round(state, member.round, why(worker=member.worker, **values))


def fail_round(state: RunState, opened: OpenRound, reason: Reason) -> None:
    """End a round that somebody could not complete: members that have not completed it drop it and ask again."""
    state.book.fail(opened, counts=not state.roster.broken)
    state.happened(RoundFailed(opened.round.id, reason.code, str(reason)))
    state.note(Why.ROUND_FAILS(id=opened.round.id, reason=reason))
    state.ledger.withdraw()
    end_generation(state, reason)
    if state.book.hopeless and not state.closed:
        in_vain = Why.ROUNDS_FAIL(failures=state.book.failures, reason=reason)
        stop(state, in_vain)
        state.life.ends_for(in_vain)  # it may have stopped already, and this was the last round


def end_generation(state: RunState, reason: Reason) -> None:
    """End the generation and notify its members, unless it is over already."""
    state.phases.pace.interrupted()
    for member in state.roster.end_generation(reason):
        assert state.roster.generation is not None
        state.answer(member, GenerationOver(state.roster.generation.number, reason))


def end_stalled(state: RunState) -> None:
    """Stop the run if those that have finished, or leave, wait for others, and nothing has moved for long."""
    waited_s = STALLED_PATIENCES * state.patience_s
    if state.stopping or state.now - state.progress.moved_at < waited_s:
        return
    roster = state.roster
    waiting = roster.within(MemberState.FINISHED)
    if not roster.within(MemberState.PAUSED):  # who leaves does not end a run in which the others evaluate
        waiting += [m for m in roster.within(MemberState.HELD) if not (m.iterates or m.call)]
    if waiting and (others := [m for m in roster.members.values() if m not in waiting]):
        stop(state, Why.STALLED(who=named(others), waited_s=waited_s, count=state.ledger.count))


def fail_stuck(state: RunState) -> None:
    """Fail the open rounds if nothing has moved for longer than the deadlines of any exchange allow.

    A transfer that goes on may take as long as it needs: a member gives up one that stands still by itself.
    """
    longest_s = state.patience_s + EXCHANGE_STEPS * state.plan.run.exchange_timeout_s
    if not state.book.open or state.now - state.progress.moved_at < longest_s:
        return
    state.progress.moved_at = state.now
    for opened in list(state.book.open.values()):
        fail_round(state, opened, Why.STUCK(who=named(opened.waiting), longest_s=longest_s))
