"""Who joins the run, and who leaves it."""

from collections.abc import Sequence

from lsgd.protocol.messages import Join, NodeHello, Over, Refused, Waiting, Welcome
from lsgd.run_folder import stage_of
from lsgd.server import answers, endings
from lsgd.server.greetings import differences, objection, origin_of
from lsgd.server.life import LifeState
from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import Member, MemberState, by_place
from lsgd.server.state import RunState


def join(state: RunState, join: Join) -> None:
    """Answer a worker that asks to join."""
    if join.stage < stage_of(state.run):  # it goes through that one without training
        state.answer_to(join, Welcome(state.run, state.plan.to_json(), 0, 1, (), newcomer=True))
        return
    old = state.roster.members.get(join.worker)
    if old is not None and old.join.incarnation == join.incarnation:
        old.heard_at = state.now
        if state.stopping and old.entry.step < 0:
            state.answer(old, Refused(state.failed) if state.failed else Over(state.stopping))
            remove(state, old, Why.RUN_OVER())
        else:
            _welcome(state, [old])
    elif state.stopping and not state.failed:
        state.answer_to(join, Over(state.stopping))
        state.note(Why.TOO_LATE(worker=join.worker))
    elif reason := _objection(state, join, old):
        state.answer_to(join, Refused(reason))
        state.note(Why.IS_REFUSED(worker=join.worker, reason=reason))
    elif old is not None and state.now - old.heard_at < state.plan.run.lease_s / 2 and not state.is_silent(old):
        contested = Why.NAME_CONTESTED(worker=join.worker, heard_s=state.now - old.heard_at)
        state.answer_to(join, Waiting(0, contested))
    else:
        if old is not None:
            remove(state, old, Why.REPLACED())
        _admit(state, join)


def _objection(state: RunState, join: Join, old: Member | None) -> Reason:
    """Return why a worker cannot join, or no reason; ``old`` is the member with its name."""
    if state.failed:
        return state.failed
    if state.roster.has_ended(join.worker, join.incarnation) and not _never_asked(state, join):
        return Why.CAME_BACK(worker=join.worker)
    if old is not None:
        if old.heard_at > state.gathering.claimed_since(join, state.now):
            return Why.NAME_TAKEN(worker=join.worker, heard_s=state.now - old.heard_at)
    others = [m.join for m in state.roster.members.values() if m is not old]
    return objection(join, others, state.plan.transport)


def _never_asked(state: RunState, join: Join) -> bool:
    """Whether a process was evicted for its silence before it could hear that it is welcome: it joins again."""
    before = state.roster.left.get(join.worker)
    return before is not None and before.join.incarnation == join.incarnation and before.was_silent and before.seq < 1


def _admit(state: RunState, join: Join) -> None:
    member = Member(join, state.now)
    if not state.roster.members:
        state.gathering.since = state.now
    state.roster.add(member)
    state.gathering.claims.pop(join.worker, None)
    state.note(Why.JOINS(worker=join.worker, address=join.address, joined=state.joined()))
    _welcome(state, [member])


def announce(state: RunState, hello: NodeHello) -> None:
    """Note how many workers a node has, and that those of its former local server are gone unless they are heard."""
    state.gathering.announced[hello.node] = max(hello.workers, 1)
    if state.gathering.meet(hello.node, hello.incarnation):
        state.roster.closed_at[hello.node] = state.now
    _welcome(state, [])


def _welcome(state: RunState, members: list[Member]) -> None:
    """Welcome ``members``, or everybody as soon as enough have joined; until then, let them wait."""
    everybody = sorted(state.roster.members.values(), key=by_place)
    if state.life.state is LifeState.GATHERING and state.suffices(len(everybody)):
        state.life.move(LifeState.WELCOMING, state.now)
        members = everybody
        state.gathering.complete(state.now, everybody[0].worker)
    if state.life.state is LifeState.GATHERING:
        for member in members:
            state.answer(member, Waiting(0, state.joined(names=True)))
        return
    ranks = {member: rank for rank, member in enumerate(everybody)}
    has_begun = state.roster.generation is not None
    size = max(len(everybody), 0 if has_begun else state.wanted)
    first, access = [member.join for member in state.roster.members.values()][:1], state.tenure.access
    for member in members:
        warnings = tuple(warned for _, warned in differences(member.join, first) if warned)
        if member.entry.step < 0:
            state.roster.welcome(member, _place_in_loop(state, member, everybody))
        more = access.certificate, access.relay, access.secret, state.gathering.first, member.entry.step, has_begun
        state.answer(member, Welcome(state.run, state.plan.to_json(), ranks[member], size, warnings, *more))


def _place_in_loop(state: RunState, member: Member, everybody: Sequence[Member]) -> int:
    """Return where a worker's own loop begins: where those that train are, its predecessor was, or its checkpoint."""
    if state.roster.generation is None:
        return max(member.join.step, origin_of(m.join for m in everybody).iterations // len(everybody))
    others = [m for m in everybody if m.entry.step >= 0 and m.asked.steps and m is not member]
    before = state.roster.left.get(member.worker)
    like = [m for m in others if m.call or m.iterates] or ([before] if before else others)
    return sum(m.step for m in like) // len(like) if like else member.join.step


def end_waiting(state: RunState) -> None:
    """If the first round has waited for too long: continue without those that never asked, or refuse everybody."""
    members, waited_s = state.roster.members, state.plan.run.join_timeout_s
    if state.roster.generation is not None or not members or state.now - state.gathering.since <= waited_s:
        return
    if state.suffices(len(members)):
        for member in state.roster.within(MemberState.JOINED):
            remove(state, member, Why.NEVER_ASKED(waited_s=waited_s))
        return
    reason = Why.TOO_FEW(waited_s=waited_s, joined=state.joined(names=True))
    for member in list(members.values()):
        refuse(state, member, reason)
    if state.life.state is LifeState.WELCOMING:
        state.life.move(LifeState.GATHERING, state.now)


def refuse(state: RunState, member: Member, reason: Reason) -> None:
    """Remove a member that cannot take part."""
    state.answer(member, Refused(reason))
    remove(state, member, Why.REFUSED(reason=reason))


def node_leaves(state: RunState, node: int, reason: Reason) -> None:
    """Let the members of a node leave."""
    state.gathering.leaves(node)
    for member in [m for m in state.roster.members.values() if m.join.node == node]:
        state.roster.dismiss(member, reason)
        if member.state in (MemberState.HELD, MemberState.CUT, MemberState.FINISHED, MemberState.PAUSED):
            answers.dismiss(state, member)
        answers.recall(state, [member])


def remove(state: RunState, member: Member, reason: Reason) -> None:
    """End a member's incarnation: its grant goes back, its round has failed, its generation is over."""
    endings.settle(state, member, member.done)
    in_generation = member.rank >= 0 and member.state is not MemberState.ENDED
    state.roster.remove(member, reason)
    state.data.forget(member.worker)
    state.gathering.since = state.now
    state.note(Why.LEAVES(worker=member.worker, reason=reason, done=member.done))
    endings.left_round(state, member, Why.GONE, reason=reason)
    if in_generation:
        endings.end_generation(state, Why.MEMBER_LEFT(worker=member.worker, reason=reason))
