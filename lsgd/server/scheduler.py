"""How iterations and rounds are given out: tokens, held requests, elections, failures, the end.

The numbered rules are at the top of :mod:`lsgd.server.coordinator`; those that this file keeps are 1 to 7 and 10 to 12.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from lsgd.plan.plan import Plan
from lsgd.protocol.messages import (
    Downward,
    Generation,
    GenerationOver,
    Go,
    Recall,
    Refused,
    Request,
    Round,
    Stop,
    Waiting,
)
from lsgd.server import wording
from lsgd.server.admission import origin_of
from lsgd.server.course import Course
from lsgd.server.history import MAX_ELECTIONS, Election, election, line
from lsgd.server.links import Links, connected, pairs_of, told, whole_nodes
from lsgd.server.members import Group, Member, OpenRound, Phase, Roster, by_place
from lsgd.server.rounds import compose
from lsgd.settings import changed

MAX_FAILED_ROUNDS = 10
"""So many failed rounds without a completed global one between them end the run."""

LENGTH_SETTINGS = ("iterations", "seconds")
"""Settings of the run that can be changed while it goes on."""

LOOKAHEAD_SHARE = 4
"""What is granted ahead is at most one part in so many of an equal share of the tokens that are left."""

WAIT_WORDS_S = 0.2
"""For how long the sentence that says what is waited for is kept."""


@dataclass
class Decision:
    """What to do now: answers by (worker, incarnation), in order, and lines for people."""

    answers: list[tuple[str, int, Downward]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Scheduler:
    """Grants iterations to the members of a run and orders their rounds.

    Who is a member is decided elsewhere (:class:`lsgd.server.coordinator.Coordinator`), which moves members in and
    out of :attr:`roster`; what a message or a member's end means for tokens and rounds is decided here.

    Args:
        plan: the settings.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.course = Course(plan.phases)
        self.roster = Roster()
        self.members = self.roster.members
        self.tokens = 0.0
        self.count = 0
        self.open: dict[int, OpenRound] = {}
        self.rounds = {"local": 0, "global": 0}
        self.elections: deque[Election] = deque(maxlen=MAX_ELECTIONS)
        self.broken = ""  # why the generation is over; empty while it lasts
        self.started_at: float | None = None  # of the first round
        self.stopping = ""  # why the run ends; empty while it goes on
        self.final = False  # the round that makes the consensus has been ordered
        self.closed = False  # whoever still asks is told to leave
        self.over = False
        self.unheard = (
            0  # iterations that may have been made and not heard of when the server was started again
        )
        self.links = Links(plan.run.exchange_timeout_s)
        self.changes = 0  # counts what a journal has to keep before the answers leave
        self._now = 0.0
        self._moved_at = 0.0  # when a member last asked, or completed a round
        self._lent: dict[Member, None] = {}  # in order, those that may have more than their next iteration
        self._fresh = False  # no round of the generation has been ordered yet
        self._released = False  # tokens or members came back: held requests may find something now
        self.failures = 0  # failed rounds since the last completed global one
        self._saved_at = 0  # global rounds before the last one that was completed with a checkpoint
        self._saved_at_s = -math.inf  # when that was; of a server that was started again nobody knows
        self._final_due_at: float | None = None
        self._lost_at = 0.0  # when nobody, and no checkpoint, was found to have the run's model; 0: never
        self.failed = ""  # why the run ends without what it has learnt; empty as a rule
        self._closed_at = math.inf
        self._wait: tuple[float, str] = (-math.inf, "")
        self._out = Decision()

    @property
    def generation(self) -> Generation | None:
        """The current generation, or the last one."""
        return self.roster.generation

    @property
    def in_vain(self) -> bool:
        """Whether the run has ended without a consensus, since its rounds kept failing."""
        return self.closed and self.failures >= MAX_FAILED_ROUNDS

    @property
    def groups(self) -> dict[int, Group]:
        """The generation's groups by node."""
        return self.roster.groups

    def stop(self, reason: str) -> None:
        """End the run: withdraw what is not granted; the consensus round follows when all live members are held.

        Takes effect with the next message or tick.
        """
        if not self.stopping:
            self.stopping = reason
            self.changes += 1
            self.tokens = 0.0
            self.links.relent(self._now)
            self._recall(self._lent)
            self._out.notes.append(f"stopping: {reason}")

    def change(self, name: str, text: str) -> None:
        """Change a numeric setting: the run's length at once, the algorithm's from the next global round on.

        Raises:
            ConfigError: there is no such setting, it cannot be changed in a run, or the value is wrong.
        """
        if name in LENGTH_SETTINGS:
            self.plan = replace(self.plan, run=changed(self.plan.run, name, text))
            granted = sum(m.granted for m in self.members.values())
            left = (self.plan.run.iterations or math.inf) - self.count - granted
            self.tokens = max(0.0, min(self.tokens, left))
        else:
            self.course.change(name, text)
        self.changes += 1
        self._out.notes.append(f"{name} is to be {text}")

    def progress(self, now: float) -> float:
        """Return the share of the run that is made, 0 to 1; 0 for one without an end."""
        run = self.plan.run
        elapsed_s = 0.0 if self.started_at is None else now - self.started_at
        by_count = self.count / run.iterations if run.iterations else 0.0
        by_time = elapsed_s / run.seconds if run.seconds else 0.0
        return min(1.0, max(by_count, by_time))

    def waits_for(self, now: float) -> str:
        """Return in words what the held requests wait for."""
        if now - self._wait[0] > WAIT_WORDS_S:
            self._wait = (now, self._describe_wait(now))
        return self._wait[1]

    def _describe_wait(self, now: float) -> str:
        if self.closed:
            return f"the run is over: {self.stopping}"
        if self.generation is None:
            return wording.start_waits(self.members.values(), self.plan.run.workers)
        if self._lost_at:
            return wording.model_lost(self.count)
        if self.final:
            return wording.consensus_waits(self.members.values())
        return (
            wording.round_waits(self.members.values(), sorted(self.open), now)
            or f"nobody waits; {self._joined()}"
        )

    # -- requests and tokens -----------------------------------------------------------------------------------

    def _request(self, member: Member, request: Request) -> None:
        if request.ahead:
            self._request_ahead(member, request)
            return
        if request.seq < max(member.seq, 1):
            return
        if request.seq == member.seq and not self._takes_back(member, request.dropped):
            # Beyond what was granted before that answer, it made them on its own, when nobody answered.
            self._use(
                member, request.done, keep=member.answer.iterations if isinstance(member.answer, Go) else 0
            )
            self._repeat(member)
            return
        self._report(member, request.done)
        self._committed(member, request.committed)
        self._left_round(member, "it passed the round over")
        member.seq, member.answer, member.loss = request.seq, None, request.loss
        member.held_at = self._moved_at = self._now
        if member.phase in (Phase.PAUSED, Phase.LATE):
            self._released = True
            self.changes += 1
        cut = self.links.bars(member.worker, self._now)
        self.roster.move(member, Phase.CUT if cut else Phase.HELD)
        if self.closed or member.leaving:
            self._dismiss(member)
        elif cut:
            self._repeat(member)
        elif not self._grant_held(member) and (group := self.roster.group_of(member)):
            if not self._start_local(group):
                self._recall(group.members if self.tokens >= 1 else self._lent)

    def _request_ahead(self, member: Member, request: Request) -> None:
        """Grant more to a member that still has iterations to make, or forget that it asked."""
        self._use(member, request.done)
        self._committed(member, request.committed)
        most = self.plan.run.lookahead + 1 - member.granted
        current = member.phase is Phase.BUSY and member.round is None and not member.leaving
        if current and request.seq > member.seq and most > 0 and self._may_grant(member):
            member.seq = request.seq
            self._grant(member, most)

    def _recall(self, members: Iterable[Member]) -> None:
        """Ask those of ``members`` for what they have been granted ahead that have more than their next iteration."""
        for member in [m for m in members if m in self._lent]:
            del self._lent[member]
            if member.granted > 2:
                self._answer(member, Recall())

    def _takes_back(self, member: Member, dropped: int) -> bool:
        """Whether a member that asks again has dropped the round of its answer, and so needs another answer.

        Only the member knows: it may have completed a round that failed for others, and then used its grant.
        """
        answer = member.answer
        if answer is None or answer.round is None or answer.round.id != dropped:
            return False
        self._left_round(member, "it could not complete it")
        member.granted = 0
        return True

    def _repeat(self, member: Member) -> None:
        """Answer the same request again."""
        answer = member.answer
        if answer is None:
            cut = member.phase is Phase.CUT
            reason = self.links.words(member.worker, self._now) if cut else self.waits_for(self._now)
            self._answer(member, Waiting(member.seq, reason))
            return
        if answer.round is not None and member.round is None and member.committed < answer.round.id:
            self._answer(member, GenerationOver(answer.round.generation.number, "its round failed"))
        self._answer(member, answer)

    def _may_grant(self, member: Member) -> bool:
        """Whether both queues have a token for a member."""
        if self.course.schedule.lockstep:  # every iteration is a round: a grant that came back is no token
            return False
        group = self.roster.group_of(member)
        return group is not None and member.synced and self.tokens >= 1 and group.tokens >= 1

    def _grant_held(self, member: Member) -> bool:
        """Answer a held request with an iteration and no round, if both queues have a token."""
        if not self._may_grant(member):
            return False
        self._grant(member)
        return True

    def _grant(self, member: Member, most: int = 1) -> None:
        """Answer a member's request with ``most`` iterations, or as many as are its part; one at least."""
        group = self.groups[member.join.node]
        iterations = 1
        if most > 1:
            share = min(self.tokens / self.roster.live, group.tokens / len(group.members)) / LOOKAHEAD_SHARE
            iterations = max(1, min(most, int(share)))
        self.tokens -= iterations
        group.tokens -= iterations
        self._go(member, None, "the run and the group have a token left", iterations)
        if member.granted > 2:
            self._lent[member] = None

    def _go(self, member: Member, round: Round | None, reason: str, iterations: int = 1) -> None:
        member.granted += iterations
        answer = Go(member.seq, round, self.progress(self._now), reason, iterations)
        self._reply(member, answer, Phase.BUSY)

    def _dismiss(self, member: Member) -> None:
        """Answer a held request with the end; where the run has failed, so that its worker fails too."""
        if self.failed:
            self.roster.move(member, Phase.ENDED)
            self._answer(member, Refused(self.failed))
            return
        failed = not member.leaving and (self.in_vain or member.phase is Phase.CUT)
        self._reply(member, Stop(member.seq, None, member.leaving or self.stopping, failed), Phase.ENDED)

    def _report(self, member: Member, done: int) -> None:
        """Count what a member has done; what it was granted and has not used goes back."""
        self._use(member, done)
        group = self.roster.group_of(member)
        # Outside a group it was left out, and the next global round counts what is left anew.
        if member.granted and group is not None and not self.stopping:
            self.tokens += member.granted
            group.tokens += member.granted
            self._released = True
        member.granted = 0

    def _use(self, member: Member, done: int, keep: int = 0) -> None:
        """Count what a member has done: of what it was granted but for the last ``keep``, else of the run's queue."""
        made = max(0, done - member.done)
        used = min(made, max(0, member.granted - keep))
        self.count += made
        member.done += made
        member.granted -= used
        self.tokens = max(0.0, self.tokens - (made - used))

    # -- rounds ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start the rounds that are due, and notice the end."""
        if self._released:
            self._released = False
            self._serve_held()
        if self.stopping and self.generation is None and not self.closed:
            self._close()
        if self.stopping and not self.members:
            self.over = True
        if not self.roster.live:
            self._let_back()
        live = self.roster.live
        if self.final or not live or self.roster.held < live:
            return
        if self.generation is not None or live >= self.plan.run.workers:
            self._start_global()

    def _serve_held(self) -> bool:
        """Grant held requests what is in the queues and start the local rounds that can; return whether any went."""
        granted = [self._grant_held(member) for member in self._held()]
        started = [self._start_local(group) for group in self.groups.values()]
        return any(granted) or any(started)

    def _start_local(self, group: Group) -> bool:
        size = len(group.members)
        if group.held < size or group.tokens >= 1 or self.tokens < size or self.broken or self.roster.absent:
            return False
        self.tokens -= size
        group.tokens = (self.course.schedule.local_period - 1) * size
        self._order("local", group.members, [group])
        return True

    def _let_back(self) -> None:
        """Hold the requests of those that were cut off and are to be tried again.

        At once of all, if they are alone, or have the run's model and those that are left have it not.
        """
        cut = [m for m in self.members.values() if m.phase is Phase.CUT]
        left = [m for m in self.members.values() if m.live or m.phase in (Phase.LATE, Phase.PAUSED)]
        if not left or _model_of(cut) > _model_of(left):
            self.links.relent(self._now)
        for member in cut:
            if not self.links.bars(member.worker, self._now):
                member.held_at = self._now
                self.changes += 1
                self.roster.move(member, Phase.HELD)

    def _start_global(self) -> None:
        self._let_back()
        limit = self.plan.run.iterations or math.inf
        members = sorted((m for m in self.members.values() if m.live), key=by_place)
        if self.generation is None:
            self._go_back(members)
        elif self._awaits_model(members):
            return
        late = [m for m in self.members.values() if m.granted]  # left out: nobody is busy now
        given = self.count + sum(m.granted for m in late)
        if given >= limit:
            self.stop(wording.all_made(self.count, limit, late, resumed=self.generation is None))
        if self._awaits_paused():
            return
        if self.stopping:
            self._start_final(members)
            return
        if self.course.take_up(given, len(members)):
            self._fresh = True
            self._out.notes.append(
                wording.phase(self.course.number + 1, self.course.algorithm.name, self.count)
            )
        schedule = self.course.schedule
        left = min(limit, self.course.end) - given
        if left < len(members) and schedule.lockstep:
            self.stop(
                f"{self.count} of {limit:.0f} iterations are made, too few are left for one of each worker"
            )
            self._start_global()
            return
        if left < len(members):
            if self._grant_rest(left):
                return
            # Nobody has the run's model, or a checkpoint has it: as many members as there are iterations go on from it.
            members.sort(key=lambda m: (not m.synced, m.place))
            members = sorted(members[: int(left)], key=by_place)
        self._begin_generation(members)
        size = len(members)
        self.tokens = min(schedule.period * size, left) - size
        local_rounds = len(self.groups) > 1 and schedule.local_period < schedule.period
        for group in self.groups.values():
            group.tokens = (schedule.local_period - 1) * len(group.members) if local_rounds else math.inf
        self._order("global", members, self.groups.values())

    def _awaits_paused(self) -> bool:
        """Whether the last round has to wait for a worker that paused."""
        return bool(self.stopping) and self.roster.paused > 0 and not self._final_overdue()

    def _final_overdue(self) -> bool:
        """Whether the last round has waited for ``patience_s``."""
        self._final_due_at = self._final_due_at if self._final_due_at is not None else self._now
        return self._now >= self._final_due_at + (self.plan.run.patience_s or math.inf)

    def _awaits_model(self, members: list[Member]) -> bool:
        """Whether a global round has to wait for somebody who has the run's model, since none of ``members`` has.

        They alone would begin anew, and what the run has learnt would be overwritten. An older model of this run is
        better than none, and so is a checkpoint. Where there is nothing to go on from, the run ends.
        """
        if any(m.synced for m in members):
            return False
        away = [m for m in self.members.values() if not m.live and m.phase is not Phase.ENDED]
        overdue = bool(self.stopping) and self._final_overdue()
        if any(m.synced for m in away) and not overdue:
            return True
        if any(m.committed for m in members):
            return False
        if any(m.committed for m in away) and not overdue:
            return True
        if not self.count or self._go_back(members):
            return False
        if not self._lost_at:
            self._lost_at = self._now
            self._out.notes.append(wording.model_lost(self.count))
        few = len(self.members) < self.plan.run.workers and not self.stopping
        if few and self._now - self._lost_at <= self.plan.run.join_timeout_s:
            return True
        self.failed = wording.model_lost(self.count)
        self.stop(self.failed)
        self._close()
        return True

    def _go_back(self, members: list[Member]) -> bool:
        """Go on from the checkpoint of the most iterations that any of ``members`` has; return whether there is one.

        Without one a new run begins at 0, and so does another whose plan says that it may.
        """
        origin = origin_of(m.join for m in members)
        count = origin.iterations
        if self.generation is not None:
            if not count and not self.plan.run.restart_from_scratch:
                return False
            self._out.notes.append(wording.gone_back(self.count, count))
            self.course.rewind(count)
        self.count = count
        self._lost_at = 0.0
        for member in members:
            member.synced = count > 0 and member.join.origin == origin
        return True

    def _grant_rest(self, left: float) -> bool:
        """Grant the last iterations, fewer than there are members, without a round."""
        self.tokens = left
        for group in self.groups.values():
            group.tokens = math.inf
        return self._serve_held()

    def _start_final(self, members: list[Member]) -> None:
        if self.failures >= MAX_FAILED_ROUNDS:
            self._close()
            return
        self.final = True
        self._begin_generation(members)
        self._order("global", members, self.groups.values())

    def _begin_generation(self, members: list[Member]) -> None:
        """Make ``members`` the generation, unless they are."""
        names = tuple(m.worker for m in members)
        if self.generation is not None and not self.broken and self.generation.members == names:
            return
        if self.generation is None and self.count:
            self._out.notes.append(wording.resumed(self.count, members))
        generation = self.roster.begin_generation(members)
        if generation.number > 1 and not any(m.synced for m in members):
            self._out.notes.append("nobody who has completed the last global round is left")
        self._out.notes.append(
            wording.generation(
                generation.number, len(names), len(self.groups), generation.backend, self.broken
            )
        )
        self.broken, self._fresh = "", True

    def _order(self, scope: str, members: list[Member], groups: Iterable[Group]) -> None:
        """Order a round of ``members``, all of them held, and answer them."""
        assert self.generation is not None
        assert scope == "local" or not self.open
        exchanges = self.rounds["global"]
        if self.started_at is None:
            self.started_at = self._saved_at_s = self._now
        due = scope == "global" and self._is_checkpoint_due(exchanges)
        round, leader = compose(
            self.generation,
            members,
            groups,
            id=self.rounds["local"] + self.rounds["global"] + 1,
            scope=scope,
            exchanges=exchanges,
            copies=self.course.schedule.identical and self._fresh,
            final=self.final,
            algorithm=self.course.to_json(),
            count=self.count,
            checkpoint=due or self.final,
            probe=self._fresh and self._doubts(members),
        )
        self._fresh = False
        self.changes += 1
        self.rounds[scope] += 1
        self.open[round.id] = opened = OpenRound(round, set(members))
        leader.times_leader += 1
        self._record(round, leader, members)
        if scope == "global":
            self.unheard = 0  # all others have said what they made
            for member in self.members.values():
                member.synced &= member.rank >= 0
        reason = wording.start_of(round, members[0].join, len(members))
        for member in members:
            member.round = opened
            if round.final:
                self._reply(member, Stop(member.seq, round, self.stopping), Phase.BUSY)
            else:
                self._go(member, round, reason)

    def _doubts(self, members: Iterable[Member]) -> bool:
        """Whether some of ``members`` may not reach each other."""
        return self.failures > 0 or self.links.suspects((m.worker for m in members), self._now)

    def _is_checkpoint_due(self, exchanges: int) -> bool:
        """Whether a global round after so many is one to write a checkpoint in."""
        every, every_s = self.plan.run.checkpoint_every, self.plan.run.checkpoint_every_s
        by_rounds = every > 0 and exchanges - self._saved_at >= every
        return by_rounds or (every_s > 0 and self._now - self._saved_at_s >= every_s)

    def _record(self, round: Round, leader: Member, members: list[Member]) -> None:
        assert self.started_at is not None
        entry = election(round, leader, members, self.count, self._now - self.started_at)
        self.elections.append(entry)
        if (
            round.final or not self.course.schedule.lockstep
        ):  # where every iteration is a round, no line for each
            self._out.notes.append(line(entry, final=round.final))

    def _committed(self, member: Member, round_id: int) -> None:
        """Note that a member has completed a round."""
        member.committed = max(member.committed, round_id)
        opened = member.round
        if opened is None or opened.round.id != round_id:
            return
        member.round, member.met = None, opened.round.generation.number
        opened.waiting.remove(member)
        self._moved_at = self._now
        member.synced |= opened.round.scope == "global"
        if opened.round.final:
            self.roster.move(member, Phase.ENDED)
        if opened.waiting:
            return
        del self.open[round_id]
        self.changes += 1
        if opened.round.scope == "global":
            self.failures = 0
        if opened.round.checkpoint:
            self._saved_at, self._saved_at_s = opened.round.exchanges, self._now
        if opened.round.final:
            self._close()

    def _dropped(self, member: Member, round_id: int, error: str, broken: Sequence[int] = ()) -> None:
        """Note that a member could not complete a round; ``broken``: pairs of ranks that cannot reach each other."""
        opened = member.round
        if opened is None or opened.round.id != round_id:
            return
        if opened.round.probe and (pairs := pairs_of(broken, len(opened.round.generation.indices))):
            self._cut_off(opened, pairs)
        else:
            self._fail(opened, f"{member.worker}: {error}")

    def _cut_off(self, opened: OpenRound, pairs: Sequence[tuple[int, int]]) -> None:
        """Fail a round some of whose members cannot reach each other, and go on without as few as possible."""
        names = opened.round.generation.members
        members = {rank: self.members[name] for rank, name in enumerate(names) if name in self.members}
        holders = {rank for rank, m in members.items() if m.synced}
        holders = holders or {rank for rank, m in members.items() if m.committed}
        kept = connected(len(names), pairs, holders)
        cut = [rank for rank in range(len(names)) if rank not in kept]
        reason = told(names, pairs)
        self.failures = 0  # the run goes on, with those that can
        self._fail(opened, reason)
        self.failures = 0
        wait_s = self.links.cut((names[rank] for rank in cut), reason, self._now)
        self._out.notes.append(wording.cut_off(whole_nodes(names, cut), reason, wait_s))

    def _left_round(self, member: Member, reason: str) -> None:
        """Note that a member will not complete the round that it is in, if it is in one."""
        if member.round is not None:
            self._fail(member.round, f"{member.worker}: {reason}")

    def _fail(self, opened: OpenRound, reason: str) -> None:
        """End a round that somebody could not complete: whoever has not completed it drops it and asks again."""
        del self.open[opened.round.id]
        self.changes += 1
        self._out.notes.append(f"round {opened.round.id} failed: {reason}")
        for member in opened.waiting:
            member.round = None
        self.tokens = 0.0
        self.final &= not opened.round.final
        if not self.broken:
            self.failures += 1
        self._end_generation(reason)
        if self.failures >= MAX_FAILED_ROUNDS:
            self.stop(f"{self.failures} rounds in a row failed, the last because {reason}")

    def _end_generation(self, reason: str) -> None:
        if self.generation is None or self.broken:
            return
        self.broken = reason
        for member in self.members.values():
            if member.rank >= 0 and member.phase is not Phase.ENDED:
                self._answer(member, GenerationOver(self.generation.number, reason))

    def _close(self) -> None:
        """Tell whoever asks to leave, from now on."""
        self.closed, self._closed_at = True, self._now
        self.changes += 1
        for member in [m for m in self.members.values() if m.held or m.phase is Phase.CUT]:
            self._dismiss(member)

    def _held(self) -> list[Member]:
        return [m for m in self.members.values() if m.held]

    # -- answers and words -------------------------------------------------------------------------------------

    def _reply(self, member: Member, answer: Go | Stop, phase: Phase) -> None:
        """Answer a held request; the same request gets the same answer from now on."""
        member.answer = answer
        self.roster.move(member, phase)
        self._answer(member, answer)

    def _answer(self, member: Member, message: Downward) -> None:
        self._answer_to(member.worker, member.join.incarnation, message)

    def _answer_to(self, worker: str, incarnation: int, message: Downward) -> None:
        self._out.answers.append((worker, incarnation, message))

    def _joined(self) -> str:
        return wording.joined(len(self.members), self.plan.run.workers, started=self.generation is not None)


def _model_of(members: Iterable[Member]) -> tuple[bool, bool]:
    """Return, to be compared, whether one of ``members`` has the run's model, and whether one has an older one."""
    return max(((m.synced, m.committed > 0) for m in members), default=(False, False))
