"""The coordinator: it alone decides who may iterate, when a round starts, and who takes part.

No socket, no clock, no thread: a message and the time go in, answers and notes come out. The rules:

1.  A worker asks for every iteration. A Go takes one token from the run and one from the worker's node for each
    iteration, both or neither; a request that finds none is held. A request ahead is granted or forgotten. It gets at
    most a quarter of an equal share of what is left, and a member with more than its next iteration must give the
    rest back when others are held.
2.  A node's round starts when its members are all held, its queue is empty and the run's queue covers them.
3.  When all live members are held and no node's round can start, the global round starts, whatever is left.
4.  A round refills its queues (to period x members, to local_period x its members), then takes from them. The last
    iterations, fewer than there are members, are granted without a round.
5.  The count is the sum of the iterations that members report done, and that a model of the run has or will have: what
    a member has made since its last global round is lost when one is made without it, unless all know a common model
    and it comes back. The run makes those again. An unused grant goes back.
6.  Membership changes at global rounds only, with a new generation. Once a member is gone, paused or failed, its
    generation starts no more local rounds, so that a global one comes.
7.  A round is provisional until all its members have completed it. One that fails ends its generation and withdraws
    the tokens; members that had not completed it drop it, say so, and ask again with the same number.
8.  The same (worker, incarnation, seq) gets the same answer again, until the worker says that it has dropped the
    round in that answer. An incarnation that has left is ignored from then on.
9.  A member that keeps all others waiting for too long is evicted from the next round, which starts without it. It
    keeps its grant; its next request brings it back. So it is with one that is silent, until its lease ends.
10. The run protects what it has learned: the last members with its model are evicted only after they have been
    silent for ``server_timeout_s``, and may come back with it even then. If nobody has it any more, the run continues
    from checkpoints; without one it ends, unless the plan has ``restart_from_scratch``.
11. If members cannot reach each other, the run cuts off as few as possible, so that all others can: those are no
    longer live. Some time later a global round holds them again, and probes the connections first.
12. A request for a last round gets no iteration, and its worker leaves after the next global round. If all members
    ask so, that round makes the consensus; where models are identical by definition, nobody waits for the others.
13. A worker whose script's own loop is over waits for the end of the run, once a global round has what it learned.
    The others continue without it. When all have finished, or left, the run stops; a worker that failed in the middle
    of its loop has time to be started again.
14. Workers that make a call together (``mean``, ``barrier``) get one answer, the same for all, when everybody has come
    who still trains. Until then they take part in rounds, without iterations, unless they say that they have other
    weights than they train; the next round waits for all of them.
    A newcomer's call is answered alone if the others have it behind them, and one of them waits in another.
15. A newcomer that has completed a round but lacks parts of the run's model stays a newcomer, and gets no iterations.
16. A stop withdraws the tokens; when all live members are held, they get the round that makes the consensus. Any
    later request is answered with the end, and so is every request if there can be no consensus.
17. No two workers learn the same in their first steps; a newcomer's have other data than those of the others had.
18. Data that lsgd divides is the same on all workers, and dealt alike. Whoever comes last with other data is refused;
    before the first exchange of what workers have learned, the run fails.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from lsgd.errors import ConfigError
from lsgd.plan.run import LENGTH_SETTINGS, RunSettings
from lsgd.protocol.events import SettingsChanged
from lsgd.protocol.messages import (
    Completed,
    Data,
    Dealt,
    Evicted,
    Failed,
    GenerationOver,
    Go,
    Heartbeat,
    Join,
    Leave,
    Meet,
    Moved,
    NodeHello,
    NodeLeave,
    Pause,
    Paused,
    Probed,
    Request,
    StopRun,
    Upward,
)
from lsgd.protocol.wants import Call, More
from lsgd.server import admission, answers, endings, evictions, scheduler, succession
from lsgd.server.life import LifeState
from lsgd.server.reasons import NO_REASON, Reason, Why
from lsgd.server.roster import Member, MemberState
from lsgd.server.state import Decision, RunState
from lsgd.server.succession import Outcome
from lsgd.settings import changed, fields

LINGER_S = 10.0
"""How long the run waits for leaves after its end."""


class Coordinator:
    """Decides for one run; handle, tick, closed, meet, stop and change are the only ways in.

    What arrives goes one way: here its facts enter the state, in admission and endings what follows from them for
    others; then pure rules (next_step) say what is next, and the scheduler carries it out.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state

    def handle(self, message: Upward | NodeHello | NodeLeave | StopRun, now: float) -> Decision:
        """Take in one message and return what to do; ``now``: seconds of any clock that never goes back."""
        self._set_time(now)
        match message:
            case Join():
                admission.join(self.state, message)
            case StopRun(reason):
                self.stop(reason)
            case NodeHello():
                admission.announce(self.state, message)
            case NodeLeave(node, _, reason):
                admission.node_leaves(self.state, node, Why.NODE_ENDS(notice=reason))
            case _ if (member := self._sender(message)) is not None:
                member.heard_at = now
                if member.state is MemberState.SILENT:
                    evictions.hear_again(self.state, member)
                self._from_member(member, message)
            case Request(worker) | Pause(worker):
                unknown = Why.UNKNOWN(worker=worker, run=self.state.run)
                self.state.answer_to(message, Evicted(unknown, self.state.run))
        scheduler.advance(self.state)
        return self.state.decided()

    def tick(self, now: float) -> Decision:
        """Act on time alone: leases, deadlines, the run's length. Call it a few times a second."""
        self._set_time(now)
        state, run = self.state, self.state.plan.run
        evictions.evict_lost_node(state)
        evictions.evict_silent(state)
        evictions.leave_out_silent(state)
        if run.seconds and state.progress.started_at is not None and now - state.progress.started_at >= run.seconds:
            endings.stop(state, Why.TIME_OVER(seconds=run.seconds))
        evictions.evict_stragglers(state)
        endings.fail_stuck(state)
        endings.end_stalled(state)
        admission.end_waiting(state)
        if state.life.state is LifeState.CLOSED and now > state.life.since + LINGER_S:
            state.life.move(LifeState.OVER, now)
        return self._decide()

    def closed(self, node: int, now: float) -> Decision:
        """Note that a node's connection has closed: its processes are dead, or they make another one."""
        self._set_time(now)
        self.state.roster.closed_at[node] = now
        return self._decide()

    def stop(self, order: str) -> None:
        """End the run on request; takes effect with the next message or tick."""
        endings.stop(self.state, Why.ORDERED(order=order or "an operator's order"))

    def change(self, changes: Mapping[str, str]) -> None:
        """Change settings, all or none: the run's length at once, the algorithm's from the next global round.

        Raises:
            ConfigError: there is no such setting, it cannot be changed in a run, or a value is wrong.
        """
        state = self.state
        length = {name: text for name, text in changes.items() if name in LENGTH_SETTINGS}
        others = {name: text for name, text in changes.items() if name not in LENGTH_SETTINGS}
        if fixed := next((name for name in others if name in fields(RunSettings)), ""):
            raise ConfigError(f"{fixed} cannot be changed during a run; stop it, and resume it with another {fixed}")
        run = changed(state.plan.run, length)
        state.phases.change(others)
        state.plan = replace(state.plan, run=run)
        state.ledger.shorten(run.iterations or math.inf, state.roster.members.values())
        state.happened(SettingsChanged(dict(changes)))
        for name, text in changes.items():
            state.note(Why.CHANGED(name=name, text=text))

    def meet(self, other: Meet, now: float) -> Decision:
        """Compare this part of the run with another one that it meets: one of the two gives up."""
        self._set_time(now)
        state, later = self.state, other.terms and other.terms[-1] > self.state.tenure.term
        count = state.learned(other.nodes if later else ())
        words = {"node": other.place.node, "theirs": other.count, "count": state.ledger.count}
        if other.run != state.run and other.count > 0 and state.roster.generation is None:
            reason = Why.JOINS_RUN(run=other.run, **words)
            state.note(reason)
            state.tenure.gives_way = Moved(state.run, other.place, reason, other.run)
        elif other.run == state.run and other.terms and not state.closed:
            mine, theirs = state.tenure.term, other.terms[-1]
            match succession.meet(mine, count, theirs, other.count, other.beaten):
                case Outcome.GIVE_UP:
                    reason = Why.GIVES_UP(**words)
                    state.note(reason)
                    state.tenure.gives_way = Moved(state.run, other.place, reason, state.run)
                case Outcome.GO_ON:
                    state.tenure.beats(theirs)
                    state.note(Why.BEATS(term=state.tenure.term.number, **words))
        return self._decide()

    def _set_time(self, now: float) -> None:
        state = self.state
        away_s = now - state.now
        if away_s > state.silence_s / 2:  # this process itself was frozen: the members were not silent
            for member in state.roster.members.values():
                member.heard_at += away_s
                member.held_at += away_s
                member.spent = None  # whether it is still here is not known
            state.progress.moved_at += away_s
            state.tenure.began_at = now
        state.now = now

    def _decide(self) -> Decision:
        scheduler.advance(self.state)
        return self.state.decided()

    def _sender(self, message: Upward) -> Member | None:
        """Return the member that sent a message; an evicted worker may become a member again."""
        state = self.state
        member = state.roster.members.get(message.worker)
        if member is not None and member.join.incarnation == message.incarnation:
            return member
        return None if state.closed else evictions.take_back(state, message.worker, message.incarnation)

    def _from_member(self, member: Member, message: Upward) -> None:
        if self.state.tenure.took_over and isinstance(message, Request):
            self.state.book.skip_to(max(message.committed, message.dropped))
            # It has learned what this server has never counted: it takes over another's model, if one has an own.
            if message.committed > self.state.book.known:
                endings.falls_behind(self.state, member)
            if member.round is not None and message.committed > member.round.round.id:  # it has passed that round
                endings.left_round(self.state, member, Why.PASSED_OVER)
        match message:
            case Request(wants=More()):
                self._request_ahead(member, message)
            case Request():
                self._request(member, message)
            case Heartbeat():
                self._heartbeat(member, message)
            case Probed(_, _, round_id, missed):
                endings.found(self.state, member, round_id, missed)
            case Completed(_, _, round_id, sent_nbytes, lacking, transfer_s):
                endings.committed(self.state, member, round_id, sent_nbytes, transfer_s, lacking=lacking)
            case Failed(_, _, round_id, error, broken):
                evictions.dropped(self.state, member, round_id, error, broken)
            case Pause():
                self._pause(member, message)
            case Leave(_, _, done, failed, reason, committed):
                endings.settle(self.state, member, done, committed)
                admission.remove(self.state, member, Why.FAILED(error=reason) if failed else Why.LEFT(farewell=reason))
            case Data():
                self._check_data(member, self.state.data.learned(member, message))
            case Dealt():
                self._check_data(member, self.state.data.dealt(member, message))

    def _heartbeat(self, member: Member, beat: Heartbeat) -> None:
        """Note that a member is alive; an open round moves as long as what it says of a transfer changes."""
        before = member.spent.transfer if member.spent else ""
        if member.round is not None and beat.transfer not in ("", before):
            self.state.progress.moved_at = self.state.now
        member.spent = beat
        self._tell_again(member)

    def _tell_again(self, member: Member) -> None:
        """Tell a member that its generation is over: when this server took over, it could not reach anybody yet."""
        roster = self.state.roster
        if self.state.tenure.took_over and roster.broken and roster.generation is not None and member.rank >= 0:
            self.state.answer(member, GenerationOver(roster.generation.number, roster.broken))

    def _request(self, member: Member, request: Request) -> None:
        state, call = self.state, request.wants
        if isinstance(call, Call) and (met := state.calls.again(member.worker, member.join.incarnation, call)):
            state.answer(member, met)
            return
        if request.seq < max(member.seq, 1):
            return
        if request.seq == member.seq and not (self._was_left_out(member) or self._takes_back(member, request.dropped)):
            # A server that was started again may not know all that it has done. The answer's own grant stays.
            keep = member.answer.iterations if isinstance(member.answer, Go) else 0
            endings.use(state, member, request.done, keep)
            answers.repeat(state, member)
            return
        endings.settle(state, member, request.done, request.committed, Why.PASSED_OVER, lacking=request.lacking)
        state.progress.moved_at = state.now
        if member.state is MemberState.PAUSED or member.state is MemberState.STRAGGLER:
            state.ledger.released = True
        cut = state.links.bars(member.worker, state.now)
        barred = state.links.words(member.worker, state.now) if cut else NO_REASON
        state.roster.asks(member, request, state.now, barred)
        scheduler.serve(state, member)

    def _was_left_out(self, member: Member) -> bool:
        """Whether a request that is still held was left out of rounds, because its worker was silent."""
        return member.answer is None and member.state is MemberState.STRAGGLER

    def _takes_back(self, member: Member, dropped: int) -> bool:
        """Whether a member that asks again has dropped the round in its answer, and so needs another one.

        Only the member knows: it may have completed a round that failed for others, and then used its grant.
        """
        answer = member.answer
        if answer is None or answer.round is None or answer.round.id != dropped:
            return False
        endings.left_round(self.state, member, Why.DROPPED)
        self.state.ledger.revoke(member)
        return True

    def _request_ahead(self, member: Member, request: Request) -> None:
        """Grant more to a member that still has iterations left, or forget that it asked."""
        endings.use(self.state, member, request.done)
        endings.committed(self.state, member, request.committed)
        most = self.state.plan.run.lookahead + 1 - member.granted
        current = member.state is MemberState.BUSY and member.round is None and not member.leaving
        if current and request.seq > member.seq and most > 0 and scheduler.give(self.state, member, request.seq, most):
            self.state.progress.moved_at = self.state.now

    def _pause(self, member: Member, pause: Pause) -> None:
        steps_aside = member.live or member.state is MemberState.STRAGGLER or member.state is MemberState.CUT
        if steps_aside and pause.seq >= member.seq:
            if pause.seq > member.seq:  # this server was restarted after it had answered that request
                member.asked, member.answer = replace(member.asked, seq=pause.seq), None
            endings.settle(self.state, member, pause.done, pause.committed, Why.PAUSED)
            self.state.roster.move(member, MemberState.PAUSED, Why.PAUSES(worker=member.worker))
        if member.call and pause.seq >= member.seq:  # it was interrupted there
            self.state.roster.goes_on(member)
        self.state.answer(member, Paused(pause.seq))

    def _check_data(self, member: Member, wrong: Reason) -> None:
        """Refuse a member whose data is wrong; all, if they run one script and have learned nothing from each other."""
        if wrong and self.state.book.ordered["global"] <= 1:
            endings.fail(self.state, wrong)
        elif wrong:
            admission.refuse(self.state, member, wrong)
