"""Carries out what is next: answers those who ask, starts rounds that are due, and ends the run.

This file implements rules 2 to 4, 6 and 10 to 16 at the top of :mod:`lsgd.server.coordinator`.
"""

import math
from collections.abc import Iterable, Sequence

from lsgd.protocol.events import GenerationBegan
from lsgd.server import answers, calls, endings, next_step
from lsgd.server.greetings import transport_of
from lsgd.server.life import LifeState
from lsgd.server.phases import Stretch
from lsgd.server.reasons import Why, number_of
from lsgd.server.roster import Member, MemberState, NodeQueue, named
from lsgd.server.rounds import election, new_round, roles
from lsgd.server.state import RunState
from lsgd.server.waits import Wait
from lsgd.settings import same_form


def serve(state: RunState, member: Member) -> None:
    """Answer a new request, unless it is held: with an iteration, its node's round, the end, or why it is cut off."""
    if member.call:
        calls.come(state, member, member.call)
    if state.closed or member.leaving:
        answers.dismiss(state, member)
    elif member.state is MemberState.CUT:
        answers.repeat(state, member)
    elif member.has_finished and not state.stopping and (member.synced or state.phases.schedule.identical):
        finishes = Why.FINISHES(worker=member.worker, done=member.done)
        state.note(finishes)
        state.roster.move(member, MemberState.FINISHED, finishes)
        answers.repeat(state, member)
    elif member.held and not give(state, member, member.seq) and (queue := queue_of(state, member)):
        if not _start_local(state, queue) and state.ledger.lent:
            answers.recall(state, queue.members if state.ledger.tokens >= 1 else state.ledger.lent)


def give(state: RunState, member: Member, seq: int, most: int = 1) -> bool:
    """Answer the request ``seq`` with up to ``most`` iterations; return whether both queues had a token."""
    ledger, queue = state.ledger, queue_of(state, member)
    if queue is None or not member.synced or not member.iterates or min(ledger.tokens, queue.tokens) < 1:
        return False
    if state.phases.schedule.lockstep:  # every iteration is a round: a grant that came back is no token
        return False
    answers.give(state, member, seq, ledger.grant(member, queue, most, state.roster.live))
    return True


def queue_of(state: RunState, member: Member) -> NodeQueue | None:
    """Return the queue of the member's node in the current generation, None outside it."""
    return state.roster.queues[member.join.node] if member.rank >= 0 else None


def advance(state: RunState) -> None:
    """Conclude calls, start the rounds that are due, and notice the end."""
    calls.conclude(state)
    roster = state.roster
    if state.ledger.released:
        state.ledger.released = False
        _serve_held(state)
        for queue in roster.queues.values():
            _start_local(state, queue)
    while not isinstance(step := next_step.choose(state), Wait):
        _carry_out(state, step)
        if isinstance(step, next_step.Final | next_step.Train):  # its members are busy: nothing else is due
            return


def _carry_out(state: RunState, step: next_step.Step) -> None:
    """Do what is next."""
    match step:
        case next_step.HoldAgain(members, relents):
            if relents:
                state.links.relent(state.now)
            endings.hold_again(state, members)
        case next_step.LimitWait():
            state.life.move(LifeState.LAST_WAIT, state.now)
        case next_step.Finish():
            state.life.move(LifeState.OVER, state.now)
        case next_step.Lost(fails):
            _lose_model(state, fails=fails)
        case next_step.GoBack():
            _go_back(state, step)
        case next_step.Pause(callers):
            for member in callers:
                calls.pause(state, member)
        case next_step.EndRun(reason, stretch):
            if stretch is not None:
                _begin_stretch(state, stretch)
            endings.stop(state, reason)
        case next_step.Close():
            endings.close(state)
        case next_step.Final(members):
            _begin_generation(state, members)
            _order(state, "global", members, state.roster.queues.values(), final=True)
        case next_step.Serve(stretch, leaving, tokens):
            _begin_stretch(state, stretch, leaving)
            endings.without_the_gone(state)  # the tokens are for that, too
            state.ledger.begin_round([], tokens, state.roster.queues.values(), math.inf)
            _serve_held(state)
        case _:
            _train(state, step)


def _serve_held(state: RunState) -> None:
    """Grant held requests what is in the queues."""
    for member in state.roster.within(MemberState.HELD):
        give(state, member, member.seq)


def _start_local(state: RunState, queue: NodeQueue) -> bool:
    """Start a node's round if it is due; return whether it was."""
    roster, ledger, size = state.roster, state.ledger, len(queue.members)
    if queue.held < size or queue.tokens >= 1 or ledger.tokens < size or roster.broken or roster.absent:
        return False
    _order(state, "local", queue.members, [queue], ledger.tokens, state.phases.schedule.local_period - 1)
    return True


def _train(state: RunState, step: next_step.Train) -> None:
    """Start a global round."""
    _announce(state, step.stretch, step.leaving)
    _begin_generation(state, step.members)
    schedule, queues = step.stretch.algorithm.schedule(), state.roster.queues.values()
    local_rounds = len(queues) > 1 and schedule.local_period < schedule.period
    per_member = schedule.local_period - 1 if local_rounds else math.inf
    _order(state, "global", step.members, queues, step.tokens, per_member, stretch=step.stretch)


def _begin_stretch(state: RunState, stretch: Stretch, leaving: Sequence[Member] = ()) -> None:
    """Begin a stretch of the plan without a round."""
    _announce(state, stretch, leaving)
    state.phases.follow(stretch)


def _announce(state: RunState, stretch: Stretch, leaving: Sequence[Member]) -> None:
    """Tell that a stretch of the plan begins now, and dismiss members that leave before it."""
    phases, before = state.phases, state.phases.schedule
    if stretch.number != phases.number:
        _begin_phase(state, stretch.number, stretch.algorithm.name)
        begins_anew = state.roster.generation is not None and not same_form(phases.algorithm, stretch.algorithm)
        state.book.averages |= begins_anew and not before.identical
        for member in state.roster.members.values():
            if begins_anew and not member.synced:  # the next algorithm knows no common model of this one
                endings.lose_own(state, member)
    for member in leaving:
        state.roster.dismiss(member, Why.GOES_ON())
        answers.dismiss(state, member)
    schedule = stretch.algorithm.schedule()
    if (schedule.period, schedule.delay) != (before.period, before.delay):
        delay = f" with a delay of {schedule.delay}" if schedule.delay else ""
        state.note(Why.PERIOD(period=schedule.period, delay=delay, reason=stretch.why))


def _begin_phase(state: RunState, number: int, algorithm: str) -> None:
    """Tell that a phase begins, or begins again."""
    state.book.fresh = True
    state.note(Why.PHASE(number=number + 1, algorithm=algorithm, count=state.ledger.count))


def _begin_generation(state: RunState, members: Sequence[Member]) -> None:
    """Make ``members`` the generation, unless they already are."""
    roster = state.roster
    before, reason = roster.generation, roster.broken
    if before is not None and not reason and before.members == tuple(m.worker for m in members):
        return
    if before is None and state.ledger.count:
        others = named(m for m in members if not m.synced)
        takers = f"; taking over their model: {others}" if others else ""
        holders = named(m for m in members if m.synced)
        state.note(Why.RESUMED(count=state.ledger.count, holders=holders, takers=takers))
    transport, nccl_nodes = transport_of(state.plan.transport, [m.join for m in members])
    missed = state.links.ways.missed({m.join.node for m in members})
    # Each generation has a round of its own at least, so this number is after those of rounds that are not known here.
    least = state.book.next_id if state.tenure.took_over and state.book.skipped else 1
    generation = roster.begin_generation(members, transport, missed, nccl_nodes, least)
    if before is None and not state.stopping:
        state.life.move(LifeState.TRAINING, state.now)
    if before is not None and not any(m.synced for m in members):
        state.note(Why.NO_HOLDER())
    state.happened(GenerationBegan(generation, reason.code, str(reason)))
    workers, nodes = number_of(len(members), "worker"), number_of(len(roster.queues), "node")
    words = {"transport": generation.carriers, "why": f" ({reason})" if reason else "", "reason": reason}
    state.note(Why.GENERATION(number=generation.number, workers=workers, nodes=nodes, **words))
    state.book.fresh = True


def _order(
    state: RunState,
    scope: str,
    members: Sequence[Member],
    queues: Iterable[NodeQueue],
    tokens: float = 0.0,
    per_member: float = math.inf,
    *,
    stretch: Stretch | None = None,
    final: bool = False,
) -> None:
    """Order a round of ``members``, all of them held, and answer them.

    The ``queues`` of their nodes are filled to ``per_member`` for each member, and the run's queue to ``tokens``, but
    not for the ``final`` one. ``stretch``: that begins with the round; None: the present one goes on.
    """
    book, phases, roster, is_global = state.book, state.phases, state.roster, scope == "global"
    assert roster.generation is not None
    if state.progress.started_at is None:
        state.progress.started_at = state.now
        book.checkpoints.start(state.now)
    _is_found(state)
    fresh = book.fresh
    probe = fresh and _doubts(state, members)
    schedule = stretch.algorithm.schedule() if stretch else phases.schedule
    copies, lot = schedule.identical and fresh and not final, f"{state.run} {book.next_id}"
    who = roles(members, queues, len(roster.generation.nodes), copies=copies, rule=schedule.election, lot=lot)
    if stretch:
        phases.follow(stretch)
    if is_global and (roster.left or len(members) < len(roster.members)):
        endings.goes_on(state, final=final)
    for member in members if who.new else ():
        if member.rank in who.new:
            endings.settle_own(state, member)
    if is_global:
        phases.pace.ordered(state.now, state.ledger.count, first=fresh)
        state.tenure.took_over, state.ledger.unheard = False, 0  # all members have reported what they made
    if not final:
        state.ledger.begin_round(members, tokens, queues, per_member)
    opened = book.order(new_round(state, scope, members, who, final=final, probe=probe), members, state.now)
    who.leader.record.times_leader += state.leads
    means = state.calls.take_means() if is_global and state.calls.means else {}
    seconds = state.now - state.progress.started_at
    entry = election(opened.round, who.leader if state.leads else None, members, seconds, means)
    book.elections.append(entry)
    words = book.line_of(entry, state.now, final=final, lockstep=schedule.lockstep)
    state.happened(entry)
    if words:
        state.note(words)
    answers.order(state, members, opened)


def _doubts(state: RunState, members: Iterable[Member]) -> bool:
    """Whether some of ``members`` may be unable to reach each other, or have not tried yet."""
    generation = state.roster.generation
    assert generation is not None
    untried = generation.transport == "tcp" and state.links.ways.unknown(generation.nodes)
    return untried or state.book.failures > 0 or state.links.suspects((m.worker for m in members), state.now)


def _go_back(state: RunState, step: next_step.GoBack) -> None:
    """Continue from a checkpoint; without one a new run begins at 0, and so does one that may start over."""
    count, resumed, phases = state.ledger.count, step.origin.iterations, state.phases
    state.ledger.go_back(resumed)
    for member in (*state.roster.members.values(), *state.roster.left.values()):
        member.account.share(member.done)
    state.roster.replaced.clear()
    if state.roster.generation is not None:
        why = Why.GONE_BACK if resumed else Why.BEGUN_ANEW
        state.note(why(count=count, resumed=resumed, lost=count - resumed))
        if phases.rewind(resumed):
            _begin_phase(state, phases.number, phases.next_algorithm.name)
    _is_found(state)
    for member in step.members:
        if next_step.from_checkpoint(member, step.origin):
            member.learns()
        else:
            member.falls_behind()


def _is_found(state: RunState) -> None:
    """Note that the run has a model to continue from."""
    if state.life.state is LifeState.STRANDED:
        state.life.move(LifeState.TRAINING, state.now)


def _lose_model(state: RunState, *, fails: bool) -> None:
    """Note that nobody has the run's model; after a while, that fails the run."""
    reason = Why.MODEL_LOST(count=state.ledger.count)
    if state.life.state is LifeState.TRAINING:
        state.life.move(LifeState.STRANDED, state.now)
        state.note(reason)
    if fails:
        endings.fail(state, reason)
