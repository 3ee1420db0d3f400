"""Who is out, why, and until when: the silent, the stragglers, those whom others cannot reach, those of a lost node.

Why somebody is back in the rounds is in :mod:`lsgd.server.next_step`, and :class:`~lsgd.server.links.Links` knows until
when a link keeps one out. This file implements rules 9, 10 and 11 at the top of :mod:`lsgd.server.coordinator`.
"""

import math
from collections.abc import Collection, Sequence

from lsgd.server import endings
from lsgd.server.admission import remove
from lsgd.server.links import connected, pairs_of, unreachable, whole_nodes
from lsgd.server.reasons import CHECK, Why
from lsgd.server.roster import Has, Member, MemberState, OpenRound, model_of, named
from lsgd.server.state import RunState
from lsgd.server.succession import is_minority


def evict_silent(state: RunState) -> None:
    """Evict members whose lease is over; if a standby may continue with most nodes, only after ``patience_s``."""
    run, before = state.plan.run, state.roster.spared
    expired = _expired(state)
    if expired and _leaves_a_minority(state, expired):
        expired = [m for m in expired if state.now - m.heard_at > state.patience_s]
    if not before and (spared := state.roster.spared):
        quiet_s = state.now - max(m.heard_at for m in spared)
        waits_s = max(run.server_timeout_s, state.patience_s if _leaves_a_minority(state, spared) else 0.0)
        state.note(Why.ALL_SILENT(quiet_s=quiet_s, who=named(spared), waits_s=waits_s))
    for member in expired:
        granted = member.granted
        remove(state, member, Why.SILENT(quiet_s=state.now - member.heard_at))
        member.account.granted = granted


def _expired(state: RunState) -> list[Member]:
    """Return the members whose lease is over, at first without the last ones with the model of a run that has trained.

    If all of those are silent, the likely cause is this server's own link, or a frozen local server.
    """
    roster, run, now = state.roster, state.plan.run, state.now
    holders = roster.holders() if state.ledger.count > 0 else []
    quiet_s = now - max((m.heard_at for m in holders), default=now)
    if roster.spared and quiet_s <= run.lease_s:  # one is back: the messages of the others are on their way
        for member in holders:
            member.heard_at = max(member.heard_at, now - quiet_s)
    # Those who fall silent together have said their last words at different times: none goes before it is known.
    waits = run.lease_s / 2 < quiet_s <= max(run.lease_s, run.server_timeout_s)
    together = set(holders) if waits else set()
    roster.spared = together if quiet_s > run.lease_s else set()
    return [m for m in roster.members.values() if now - m.heard_at > run.lease_s and m not in together]


def leave_out_silent(state: RunState) -> None:
    """Let the others train on without live members that are silent; the lease decides whether they may come back.

    Not if nobody else has the run's model who was heard a moment ago: then this server's own link may be down. Nor
    before all others have said what they made, after a restart, nor once the run ends: its last round waits for the
    lease.
    """
    roster, fresh_s = state.roster, state.silence_s / 2
    if roster.generation is None or state.tenure.took_over or state.stopping:
        return
    silent = {m for m in roster.members.values() if state.is_silent(m)}
    if missed := _cost_too_much(state):
        silent, fresh_s = silent | missed, state.missed_s / 2
    out = [m for m in roster.members.values() if m in silent and m.live]
    if not out or _leaves_a_minority(state, silent):
        return
    fresh = (state.now - m.heard_at <= fresh_s for m in roster.holders() if m not in silent)
    if state.ledger.count > 0 and not any(fresh):
        return
    if state.ledger.unheard and any(m not in silent for m in roster.within(MemberState.BUSY)):
        return
    reason = Why.SILENT(quiet_s=state.now - max(m.heard_at for m in out))
    words = {"who": named(out), "are": "is" if len(out) == 1 else "are"}
    state.note(Why.LEFT_OUT(reason=reason, **words))
    state.ledger.set_aside(out)
    for member in out:
        endings.left_round(state, member, Why.FELL_SILENT, reason=reason)
        roster.move(member, MemberState.SILENT, reason)


def _cost_too_much(state: RunState) -> set[Member]:
    """Return the members that have missed heartbeats, if the wait of all others has cost more than those bring.

    What they bring are the iterations that only their own models have: those are lost if they live and are left out.
    So the two mistakes, to wait for the dead and to leave out the living, cost about the same at most.
    """
    roster, now = state.roster, state.now
    missed = {m for m in roster.members.values() if m.live and now - m.heard_at > state.missed_s}
    held = [m for m in roster.within(MemberState.HELD) if m not in missed]
    step_s = state.phases.pace.step_s
    if not missed or len(held) + len(missed) < roster.live or not math.isfinite(step_s):
        return set()
    waited_s = sum(now - m.held_at for m in held)
    return missed if waited_s > sum(m.unshared for m in missed) * step_s else set()


def hear_again(state: RunState, member: Member) -> None:
    """Note that a silent member is there after all: it comes back with its next request."""
    heard = Why.HEARD(worker=member.worker)
    state.note(heard)
    state.roster.move(member, MemberState.STRAGGLER, heard)


def _leaves_a_minority(state: RunState, silent: Collection[Member]) -> bool:
    """Whether the nodes without these are a part that waits for the others, which a standby may serve."""
    nodes = {m.join.node for m in state.roster.members.values()}
    here = {m.join.node for m in state.roster.members.values() if m not in silent}
    return (state.tenure.guarded or state.tenure.took_over) and is_minority(len(nodes), len(here))


def take_back(state: RunState, worker: str, incarnation: int) -> Member | None:
    """Let a worker that was evicted for its silence return as a STRAGGLER with its model, if nobody has the run's.

    It has an older one itself if a generation has begun without it.
    """
    roster = state.roster
    member = roster.left.get(worker)
    if member is None or member.join.incarnation != incarnation or worker in roster.members:
        return None
    if not member.was_silent or not model_of([member]) or roster.holders():
        return None
    if roster.generation is not None and worker not in roster.generation.members:
        member.falls_behind()
    back = Why.BACK(worker=worker, model=member.model)
    roster.readmit(member, back)
    state.note(back)
    return member


def evict_lost_node(state: RunState) -> None:
    """Evict the workers of the node that served before this one, once enough nodes follow this server."""
    if not state.tenure.took_over:
        return
    before, here = state.tenure.terms[-2].node, state.gathering.announced.keys()
    nodes = {before, *here, *(m.join.node for m in state.roster.members.values())}
    if before == state.tenure.term.node or before in here or is_minority(len(nodes), len(here)):
        return
    for member in [m for m in state.roster.members.values() if m.join.node == before]:
        remove(state, member, Why.NODE_GONE(node=before))


def evict_stragglers(state: RunState) -> None:
    """Let the next round start without members that have kept all others waiting for ``patience_s``.

    A member in an open round is no straggler: that round completes or fails by its own deadlines. While only
    stragglers have the run's model, the others keep waiting: without it they would start over.
    """
    roster, patience_s = state.roster, state.patience_s
    if state.now - state.progress.moved_at < patience_s:
        return
    if state.book.open or not 0 < roster.held < roster.live:
        return
    stragglers = roster.within(MemberState.BUSY)
    held = roster.within(MemberState.HELD)
    if not state.stopping and all(m.call for m in held):  # they wait for its call, not for a round
        return
    if not state.stopping and any(m.synced for m in stragglers) and not any(m.synced for m in held):
        return
    are, them = ("is", "it") if len(stragglers) == 1 else ("are", "them")
    words = {"who": named(stragglers), "are": are, "them": them, "patience_s": patience_s}
    reason = Why.EVICTED(id=state.book.next_id, **words)
    state.note(reason)
    endings.end_generation(state, reason)
    state.ledger.set_aside(stragglers)
    for member in stragglers:
        roster.move(member, MemberState.STRAGGLER, reason)


def dropped(state: RunState, member: Member, round_id: int, error: str, broken: Sequence[int] = ()) -> None:
    """Note that a member could not complete a round; ``broken``: pairs of ranks that cannot reach each other."""
    opened = member.round
    if opened is None or opened.round.id != round_id:
        return
    if opened.round.probe and (pairs := pairs_of(broken, len(opened.round.generation.indices))):
        _cut_off(state, opened, pairs)
    else:
        endings.fail_round(state, opened, Why.ERROR(worker=member.worker, error=error))


def _cut_off(state: RunState, opened: OpenRound, pairs: Sequence[tuple[int, int]]) -> None:
    """Fail a round because members cannot reach each other, and continue without as few as possible."""
    names, everybody = opened.round.generation.members, state.roster.members
    members = {rank: everybody[name] for rank, name in enumerate(names) if name in everybody}
    holders = {rank for rank, m in members.items() if m.synced}
    holders = holders or {rank for rank, m in members.items() if m.has is Has.OLDER}
    kept = connected(len(names), pairs, holders)
    cut = [rank for rank in range(len(names)) if rank not in kept]
    reason = unreachable(names, pairs)
    state.book.failures = 0  # so that this failure ends no run
    endings.fail_round(state, opened, reason)
    state.book.failures = 0
    wait_s = state.links.cut((names[rank] for rank in cut), reason, state.now)
    who = whole_nodes(names, cut)
    state.note(Why.EVICTED_LINK(who=who, wait_s=wait_s, reason=reason, check=CHECK))
