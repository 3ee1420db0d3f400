"""When a round starts, who takes part, what its completion or failure means, and how the run ends.

This file implements rules 2 to 4, 6, 7 and 9 to 13 at the top of :mod:`lsgd.server.coordinator`.
"""

import math
from collections.abc import Iterable, Sequence

from lsgd.protocol.events import GenerationBegan, PeriodChosen, PhaseBegan, RoundCompleted, RoundFailed
from lsgd.protocol.messages import GenerationOver, Round
from lsgd.server.admission import origin_of, transport_of
from lsgd.server.grants import Grants
from lsgd.server.links import MAX_NAMED, connected, pairs_of, told, whole_nodes
from lsgd.server.member_states import MemberState
from lsgd.server.reasons import CHECK, Reason, Why, number_of
from lsgd.server.roster import Member, NodeQueue, OpenRound, by_place, named
from lsgd.server.rounds import FIRST_LINES, LINES_EVERY_S, election, line, roles
from lsgd.server.state import RunState

EXCHANGE_STEPS = 10
"""Most steps of a round that members wait for, each with the deadline ``exchange_timeout_s``."""


class Scheduler:
    """Orders the rounds of a run.

    Args:
        state: of the run.
        grants: answers its requests.
    """

    def __init__(self, state: RunState, grants: Grants) -> None:
        self._state = state
        self._grants = grants
        self._final_due_at: float | None = None
        self._line_at = -math.inf
        self._said_period = 0

    # -- the end -----------------------------------------------------------------------------------------------

    def stop(self, reason: Reason) -> None:
        """End the run: withdraw all tokens; the consensus round follows when all live members are held."""
        state = self._state
        if not state.stopping:
            state.stopping = reason
            state.changes += 1
            state.ledger.withdraw()
            state.links.relent(state.now)
            self._grants.recall(state.ledger.lent)
            state.note(Why.STOPPING(reason=reason))

    def _close(self) -> None:
        """From now on, answer every request with the end."""
        self._state.closed_at = self._state.now
        self._state.changes += 1
        for member in self._state.roster.within(MemberState.HELD, MemberState.CUT):
            self._grants.dismiss(member)

    # -- rounds that start -------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Start the rounds that are due, and notice the end."""
        state, roster = self._state, self._state.roster
        if state.ledger.released:
            state.ledger.released = False
            self._serve_held()
        if state.stopping and roster.generation is None and not state.closed:
            self._close()
        if state.stopping and not roster.members:
            state.over = True
        if not roster.live:
            self._let_back()
        live = roster.live
        if state.book.final or not live or roster.held < live:
            return
        if roster.generation is not None or state.suffices(live):
            self._start_global()

    def _serve_held(self) -> bool:
        """Grant held requests what is in the queues, start local rounds that are due; return whether any were."""
        roster = self._state.roster
        granted = [self._grants.give(member, member.seq) for member in roster.within(MemberState.HELD)]
        started = [self.start_local(queue) for queue in roster.queues.values()]
        return any(granted) or any(started)

    def start_local(self, queue: NodeQueue) -> bool:
        """Start a node's round if it is due; return whether it was."""
        roster, ledger, size = self._state.roster, self._state.ledger, len(queue.members)
        if queue.held < size or queue.tokens >= 1 or ledger.tokens < size or roster.broken or roster.absent:
            return False
        ledger.begin_round(queue.members, ledger.tokens, [queue], self._state.course.schedule.local_period - 1)
        self._order("local", queue.members, [queue])
        return True

    def _let_back(self) -> None:
        """Hold the requests of cut-off members whose time is over.

        All of them at once if nobody else is left, or if only they have the run's model.
        """
        state = self._state
        cut = state.roster.within(MemberState.CUT)
        left = state.roster.within(MemberState.HELD, MemberState.BUSY, MemberState.STRAGGLER, MemberState.PAUSED)
        if not left or _model_of(cut) > _model_of(left):
            state.links.relent(state.now)
        for member in cut:
            if not state.links.bars(member.worker, state.now):
                member.held_at = state.now
                state.changes += 1
                state.roster.move(member, MemberState.HELD)

    def _start_global(self) -> None:
        self._let_back()
        state, roster, course = self._state, self._state.roster, self._state.course
        members = sorted(roster.within(MemberState.HELD, MemberState.BUSY), key=by_place)
        if roster.generation is None:
            self._go_back(members)
        elif self._awaits_model(members):
            return
        limit = state.plan.run.iterations or math.inf
        out = [m for m in roster.members.values() if m.granted]  # stragglers: nobody is busy now
        given = state.ledger.count + sum(m.granted for m in out)
        if given >= limit:
            self.stop(state.all_made(limit, out))
        if not state.stopping and all(m.last for m in members):
            if roster.away():
                return  # somebody stays, and must get the run's model first
            self.stop(Why.ALL_LEAVE(count=state.ledger.count))
        if state.stopping and roster.within(MemberState.PAUSED) and not self._final_overdue():
            return
        if state.stopping:
            if state.book.hopeless:
                self._close()
                return
            self._begin_generation(members)
            self._order("global", members, roster.queues.values(), final=True)
            return
        course.pace.asked(state.now, state.ledger.count)
        before, why_before = course.schedule.period, course.why
        if course.take_up(given, len(members), state.progress(state.now) if state.ends else None, _rate_of(members)):
            state.book.fresh = True
            algorithm, count = course.algorithm.name, state.ledger.count
            state.happened(PhaseBegan(course.number + 1, algorithm, count))
            state.note(Why.PHASE(number=course.number + 1, algorithm=algorithm, count=count))
        if course.schedule.identical and not (members := self._grants.let_go(members)):
            self.stop(Why.HOLDERS_LEAVE(count=state.ledger.count))
            self._start_global()
            return
        period = course.schedule.period
        if (period, course.why) != (before, why_before):
            state.happened(PeriodChosen(period, course.why.code, str(course.why)))
        if period != before and not self._said_period / 2 < period < self._said_period * 2:
            self._said_period = period
            state.note(Why.PERIOD(period=period, reason=course.why))
        left = min(limit, course.end) - given
        if left < len(members) and course.schedule.lockstep:
            self.stop(Why.REST_TOO_SMALL(count=state.ledger.count, limit=limit))
            self._start_global()
            return
        if left < len(members):
            state.ledger.begin_round([], left, roster.queues.values(), math.inf)  # they are granted without one
            if self._serve_held():
                return
            # No member has the run's model (a checkpoint may): as many members as there are iterations take part.
            members.sort(key=lambda m: (not m.synced, m.place))
            members = sorted(members[: int(left)], key=by_place)
        self._begin_generation(members)
        period, local_period = course.schedule.period, course.schedule.local_period
        local_rounds = len(roster.queues) > 1 and local_period < period
        queues = roster.queues.values()
        tokens = min(period * len(members), left)
        state.ledger.begin_round(members, tokens, queues, local_period - 1 if local_rounds else math.inf)
        self._order("global", members, queues)

    def _final_overdue(self) -> bool:
        """Whether the last round has waited for ``patience_s``."""
        state = self._state
        self._final_due_at = self._final_due_at if self._final_due_at is not None else state.now
        return state.now >= self._final_due_at + (state.plan.run.patience_s or math.inf)

    def _begin_generation(self, members: list[Member]) -> None:
        """Make ``members`` the generation, unless they already are."""
        state, roster = self._state, self._state.roster
        before, reason = roster.generation, roster.broken
        if before is not None and not reason and before.members == tuple(m.worker for m in members):
            return
        if before is None and state.ledger.count:
            others = named(m for m in members if not m.synced)
            takers = f"; taking over their model: {others}" if others else ""
            holders = named(m for m in members if m.synced)
            state.note(Why.RESUMED(count=state.ledger.count, holders=holders, takers=takers))
        transport = transport_of(state.plan.transport, [m.join for m in members])
        generation = roster.begin_generation(members, transport, state.ways.missed({m.join.node for m in members}))
        if before is not None and not any(m.synced for m in members):
            state.note(Why.NO_HOLDER())
        state.happened(GenerationBegan(generation, reason.code, str(reason)))
        workers, nodes = number_of(len(members), "worker"), number_of(len(roster.queues), "node")
        words = {"transport": generation.transport, "why": f" ({reason})" if reason else "", "reason": reason}
        state.note(Why.GENERATION(number=generation.number, workers=workers, nodes=nodes, **words))
        state.book.fresh = True

    def _order(self, scope: str, members: list[Member], queues: Iterable[NodeQueue], *, final: bool = False) -> None:
        """Order a round of ``members``, all of them held, and answer them."""
        state, book, course = self._state, self._state.book, self._state.course
        generation, now = state.roster.generation, state.now
        assert generation is not None
        if state.started_at is None:
            state.started_at = now
            book.begin(now)
        due = scope == "global" and book.checkpoint_due(state.plan.run, now)
        copies = course.schedule.identical and book.fresh
        rule, lot = course.schedule.election, f"{state.run} {book.next_id}"
        leader, leaders, source, new = roles(members, queues, len(generation.nodes), copies=copies, rule=rule, lot=lot)
        order = Round(
            id=book.next_id,
            generation=generation,
            scope=scope,
            leader=leader.rank,
            leaders=leaders,
            exchanges=book.ordered["global"],
            new=new,
            source=source.rank,
            final=final,
            algorithm=course.to_json() if scope == "global" else "",
            count=state.ledger.count,
            checkpoint=due or final,
            probe=book.fresh and self._doubts(members),
        )
        if scope == "global":
            course.pace.ordered(now, state.ledger.count, len(members), first=book.fresh)
        book.order(order, members, now)
        state.changes += 1
        leader.times_leader += 1
        entry = election(order, leader, members, now - state.started_at)
        book.elections.append(entry)
        state.happened(entry)
        # Rounds that exchange models get a line, frequent ones not each.
        if final or (
            not course.schedule.lockstep and (order.id <= FIRST_LINES or now - self._line_at >= LINES_EVERY_S)
        ):
            self._line_at = now
            state.note(line(entry, final=final, leads=state.leads))
        if scope == "local":
            reason = Why.LOCAL_ROUND(id=order.id, members=len(members), node=members[0].join.node)
        else:
            reason = Why.GLOBAL_ROUND(id=order.id, members=len(members))
            state.ledger.unheard = 0  # all members have reported what they made
            for member in state.roster.members.values():
                member.synced &= member.rank >= 0
        for member in members:
            self._grants.order(member, order, reason)

    def _doubts(self, members: Iterable[Member]) -> bool:
        """Whether some of ``members`` may be unable to reach each other, or have not tried yet."""
        state, generation = self._state, self._state.roster.generation
        assert generation is not None
        untried = generation.transport == "tcp" and state.ways.unknown(generation.nodes)
        return untried or state.book.failures > 0 or state.links.suspects((m.worker for m in members), state.now)

    # -- the run's model ---------------------------------------------------------------------------------------

    def _awaits_model(self, members: list[Member]) -> bool:
        """Whether a global round must wait for somebody who has the run's model, because none of ``members`` has it.

        They alone would start over and overwrite what the run has learned. An older model of this run is better than
        none, and so is a checkpoint. With nothing to continue from, the run ends.
        """
        state, count = self._state, self._state.ledger.count
        if any(m.synced for m in members):
            return False
        away = state.roster.away()
        overdue = bool(state.stopping) and self._final_overdue()
        if any(m.synced for m in away) and not overdue:
            return True
        if any(m.committed for m in members):
            return False
        if any(m.committed for m in away) and not overdue:
            return True
        if not count or self._go_back(members):
            return False
        if not state.lost_at:
            state.lost_at = state.now
            state.note(Why.MODEL_LOST(count=count))
        few = not state.suffices(len(state.roster.members)) and not state.stopping
        if few and state.now - state.lost_at <= state.plan.run.join_timeout_s:
            return True
        state.failed = Why.MODEL_LOST(count=count)
        self.stop(state.failed)
        self._close()
        return True

    def _go_back(self, members: list[Member]) -> bool:
        """Continue from the most advanced checkpoint of ``members``; return whether the run can continue.

        Without a checkpoint, a new run begins at 0, and so does one in progress if ``restart_from_scratch`` is set.
        """
        state, count = self._state, self._state.ledger.count
        origin = origin_of(m.join for m in members)
        resumed = origin.iterations
        if state.roster.generation is not None:
            if not resumed and not state.plan.run.restart_from_scratch:
                return False
            why = Why.GONE_BACK if resumed else Why.BEGUN_ANEW
            state.note(why(count=count, resumed=resumed, lost=count - resumed))
            state.course.rewind(resumed)
        state.ledger.go_back(resumed)
        state.lost_at = 0.0
        for member in members:
            member.synced = resumed > 0 and member.join.origin == origin
        return True

    # -- rounds that end ---------------------------------------------------------------------------------------

    def committed(self, member: Member, round_id: int, sent_nbytes: int | None = None) -> None:
        """Note that a member has completed a round; ``sent_nbytes``: in all its rounds, None if it did not say."""
        state = self._state
        opened = state.book.complete(member, round_id, state.now, sent_nbytes)
        if opened is None:
            return
        state.moved_at = state.now
        if opened.round.final:
            state.roster.move(member, MemberState.ENDED)
        if opened.waiting:
            return
        state.changes += 1
        took_s = None if opened.opened_at is None else state.now - opened.opened_at
        state.happened(RoundCompleted(round_id, took_s, opened.sent_nbytes))
        if opened.round.scope == "global":
            state.course.pace.completed(state.now)
        if opened.round.final:
            self._close()

    def found(self, member: Member, round_id: int, missed: Sequence[int]) -> None:
        """Note which nodes cannot dial which, as a member has found in a probed round."""
        state, opened = self._state, member.round
        if opened is None or opened.round.id != round_id or not opened.round.probe:
            return
        nodes = opened.round.generation.nodes
        state.changes += 1
        if pairs := state.ways.found(nodes, missed):
            words = ", ".join(f"node{a} and node{b}" for a, b in pairs[:MAX_NAMED])
            more = f" (and {len(pairs) - MAX_NAMED} more pairs)" if len(pairs) > MAX_NAMED else ""
            state.note(Why.RELAYED(pairs=words, more=more))

    def dropped(self, member: Member, round_id: int, error: str, broken: Sequence[int] = ()) -> None:
        """Note that a member could not complete a round; ``broken``: pairs of ranks that cannot reach each other."""
        opened = member.round
        if opened is None or opened.round.id != round_id:
            return
        if opened.round.probe and (pairs := pairs_of(broken, len(opened.round.generation.indices))):
            self._cut_off(opened, pairs)
        else:
            self._fail(opened, Why.ERROR(worker=member.worker, error=error))

    def left_round(self, member: Member, why: Why, **values: object) -> None:
        """Note that a member will not complete the round that it is in, if any."""
        if member.round is not None:
            self._fail(member.round, why(worker=member.worker, **values))

    def _cut_off(self, opened: OpenRound, pairs: Sequence[tuple[int, int]]) -> None:
        """Fail a round because members cannot reach each other, and continue without as few as possible."""
        state, everybody = self._state, self._state.roster.members
        names = opened.round.generation.members
        members = {rank: everybody[name] for rank, name in enumerate(names) if name in everybody}
        holders = {rank for rank, m in members.items() if m.synced}
        holders = holders or {rank for rank, m in members.items() if m.committed}
        kept = connected(len(names), pairs, holders)
        cut = [rank for rank in range(len(names)) if rank not in kept]
        reason = told(names, pairs)
        state.book.failures = 0  # so that this failure ends no run
        self._fail(opened, reason)
        state.book.failures = 0
        wait_s = state.links.cut((names[rank] for rank in cut), reason, state.now)
        who = whole_nodes(names, cut)
        state.note(Why.EVICTED_LINK(who=who, wait_s=wait_s, reason=reason, check=CHECK))

    def _fail(self, opened: OpenRound, reason: Reason) -> None:
        """End a round that somebody could not complete: members that have not completed it drop it and ask again."""
        state = self._state
        state.book.fail(opened, counts=not state.roster.broken)
        state.changes += 1
        state.happened(RoundFailed(opened.round.id, reason.code, str(reason)))
        state.note(Why.ROUND_FAILS(id=opened.round.id, reason=reason))
        state.ledger.withdraw()
        self.end_generation(reason)
        if state.book.hopeless:
            self.stop(Why.ROUNDS_FAIL(failures=state.book.failures, reason=reason))

    def end_generation(self, reason: Reason) -> None:
        """End the generation and tell its members, unless it is over already."""
        roster = self._state.roster
        self._state.course.pace.interrupted()
        for member in roster.end_generation(reason):
            assert roster.generation is not None
            self._state.answer(member, GenerationOver(roster.generation.number, reason))

    # -- rounds that wait for too long -------------------------------------------------------------------------

    def evict_stragglers(self) -> None:
        """Let the next round start without members that have kept all others waiting for ``patience_s``.

        A member in an open round is no straggler: that round completes or fails by its own deadlines. While only
        stragglers have the run's model, the others keep waiting: without it they would start over.
        """
        state, roster, patience_s = self._state, self._state.roster, self._state.plan.run.patience_s
        if not patience_s or state.now - state.moved_at < patience_s:
            return
        if state.book.open or not 0 < roster.held < roster.live:
            return
        stragglers = roster.within(MemberState.BUSY)
        held = roster.within(MemberState.HELD)
        if not state.stopping and any(m.synced for m in stragglers) and not any(m.synced for m in held):
            return
        are, them = ("is", "it") if len(stragglers) == 1 else ("are", "them")
        words = {"who": named(stragglers), "are": are, "them": them, "patience_s": patience_s}
        reason = Why.EVICTED(id=state.book.next_id, **words)
        state.note(reason)
        state.changes += 1
        self.end_generation(reason)
        state.ledger.set_aside(stragglers)
        for member in stragglers:
            roster.move(member, MemberState.STRAGGLER, reason)

    def fail_stuck(self) -> None:
        """Fail the open rounds if nothing has happened for longer than the deadlines of any exchange allow."""
        state, run = self._state, self._state.plan.run
        longest_s = run.patience_s + EXCHANGE_STEPS * run.exchange_timeout_s
        if not state.book.open or not run.patience_s or state.now - state.moved_at < longest_s:
            return
        state.moved_at = state.now
        for opened in list(state.book.open.values()):
            self._fail(opened, Why.STUCK(who=named(opened.waiting), longest_s=longest_s))


def _rate_of(members: Sequence[Member]) -> float | None:
    """Return the highest learning rate of ``members``; None unless all rates have fallen."""
    rates = [m.rate for m in members if m.rate is not None]
    return max(rates) if len(rates) == len(members) else None


def _model_of(members: Iterable[Member]) -> tuple[bool, bool]:
    """Return whether one of ``members`` has the run's model, and whether one has an older one; for comparisons."""
    return max(((m.synced, m.committed > 0) for m in members), default=(False, False))
