"""The coordinator: it alone decides who may iterate, when a round starts, and who takes part.

No socket, no clock, no thread: a message and the time go in, answers and notes come out. The rules:

1.  Every iteration is asked for. A Go takes one token of the run and one of the worker's group for each, both or
    neither; a request that finds none is held. One that is made ahead is granted or forgotten; it gets at most a
    quarter of an equal share of what is left, and who has more than the next iteration is asked for it when
    others are held.
2.  A group's round starts when its members are all held, its queue is empty and the run's queue covers them.
3.  When all live members are held and no group's round can start, the global round starts, whatever is left.
4.  A round refills the queues it stands for (to period x members, to local_period x group), then takes. The last
    iterations, fewer than there are members, are granted without a round.
5.  The count is the sum of the iterations that members report done. A grant that was not used goes back.
6.  Membership changes at global rounds only, with a new generation. A generation one of whose members is gone,
    paused or failed starts no more local rounds, so that a global one comes.
7.  A round is provisional until all its members have completed it. One that fails ends its generation and withdraws
    the tokens; those who had not completed it drop it, say so, and ask again with the same number.
8.  The same (worker, incarnation, seq) gets the same answer again, until the worker says that it has dropped the
    round of that answer. An incarnation that has left is never heard again.
9.  Whoever keeps all others waiting for too long is left out: the next round starts without it. Its grant stays
    out, so that what it makes of it counts; it comes back with its next request.
10. What the run has learnt is not given up: the last members that have its model are evicted only when nothing was
    heard from them for ``server_timeout_s``, and come back with it even then. Where nobody has it any more the run
    goes on from checkpoints; without one it ends, unless the plan has ``restart_from_scratch``.
11. Where members cannot reach each other, as few as possible are cut off, so that the rest can: they are no longer
    live, and held again in a global round some time later, which is probed first.
12. A stop withdraws the tokens; when all live members are held, they get the round that makes the consensus. Who
    comes later, or finds no consensus to be made, is told to leave.
"""

from lsgd.plan.plan import Plan
from lsgd.protocol.messages import (
    Data,
    Done,
    Join,
    Leave,
    LeftOut,
    NodeLeave,
    Over,
    Pause,
    Paused,
    Refused,
    Request,
    StopRun,
    Upward,
    Waiting,
    Welcome,
)
from lsgd.server import wording
from lsgd.server.admission import different_versions, objection
from lsgd.server.members import Member, Phase, by_place
from lsgd.server.scheduler import Decision, Scheduler

__all__ = ["Coordinator", "Decision"]

EXCHANGE_STEPS = 10
"""A round has so many steps at most, each with the deadline of ``exchange_timeout_s``, that are waited for."""

LINGER_S = 10.0
"""How long the run waits for leaves after its end."""


class Coordinator(Scheduler):
    """State of one run; :meth:`handle`, :meth:`tick` and :meth:`stop` are its only ways in.

    Args:
        plan: the settings.
        run: identity of the run.
    """

    def __init__(self, plan: Plan, run: str) -> None:
        super().__init__(plan)
        self.run = run
        self._plan_json = plan.to_json()
        self._welcoming = False  # enough have joined, once
        self._few_since = 0.0  # the workers wait for others to join
        self._spares = False  # all that have the run's model are silent, and not evicted yet
        self._ended: set[tuple[str, int]] = set()
        self.digests: dict[str, Member] = {}

    def resume(self, now: float) -> None:
        """Go on at ``now`` with members and rounds that were set from outside (server/memento.py)."""
        self.roster.resume()
        # Nobody else's silence, and nobody has waited yet.
        self._now = self._few_since = self._moved_at = now
        self._welcoming = self.generation is not None or len(self.members) >= self.plan.run.workers
        self._ended |= {(m.worker, m.join.incarnation) for m in self.roster.left.values()}
        if self.closed:
            self._closed_at = now

    # -- ways in -----------------------------------------------------------------------------------------------

    def handle(self, message: Upward | NodeLeave | StopRun, now: float) -> Decision:
        """Take in one message and return what to do.

        Args:
            message: from a worker, a local server or an operator.
            now: seconds of any clock that never goes back.
        """
        self._set_time(now)
        match message:
            case Join():
                self._join(message)
            case StopRun(reason):
                self.stop(reason)
            case NodeLeave(node, _, reason):
                self._node_leave(node, reason)
            case _ if (member := self._known(message) or self._returned(message)) is not None:
                member.heard_at = now
                self._from_member(member, message)
            case Request(worker, incarnation) | Pause(worker, incarnation):
                self._answer_to(worker, incarnation, LeftOut(wording.unknown(worker, self.run), self.run))
        return self._decide()

    def tick(self, now: float) -> Decision:
        """Act on time alone: leases, deadlines, the run's length. Call it a few times a second."""
        self._set_time(now)
        run = self.plan.run
        self._evict_silent()
        if run.seconds and self.started_at is not None and now - self.started_at >= run.seconds:
            self.stop(f"the time of {run.seconds:g} s is over")
        if run.patience_s and now - self._moved_at >= run.patience_s:
            self._leave_out_late()
        self._fail_stuck_rounds()
        if self.generation is None and self.members and now - self._few_since > run.join_timeout_s:
            self._end_waiting_for_first_round()
        if now > self._closed_at + LINGER_S:
            self.over = True
        return self._decide()

    def _set_time(self, now: float) -> None:
        away_s = now - self._now
        if away_s > self.plan.run.lease_s / 2:  # this process itself was frozen: nobody else's silence
            for member in self.members.values():
                member.heard_at += away_s
            self._moved_at += away_s
        self._now = now

    def _decide(self) -> Decision:
        self._advance()
        out, self._out = self._out, Decision()
        return out

    def knows(self, worker: str, incarnation: int) -> bool:
        """Whether this process of a worker is in the run."""
        member = self.members.get(worker)
        return member is not None and member.join.incarnation == incarnation

    # -- joining and leaving -----------------------------------------------------------------------------------

    def _join(self, join: Join) -> None:
        old = self.members.get(join.worker)
        if old is not None and old.join.incarnation == join.incarnation:
            old.heard_at = self._now
            if self.closed and not self._welcoming:
                self._answer(old, Over(self.stopping))
                self._remove(old, "the run is over")
            else:
                self._welcome([old])
        elif self.stopping and not self.failed:
            self._answer_to(join.worker, join.incarnation, Over(self.stopping))
            self._out.notes.append(f"{join.worker} comes too late: the run is ending")
        elif reason := self._objection(join, old):
            self._answer_to(join.worker, join.incarnation, Refused(reason))
            self._out.notes.append(f"{join.worker} is refused, {reason}")
        elif old is not None and self._now - old.heard_at < self.plan.run.lease_s / 2:
            reason = wording.name_contested(join.worker, self._now - old.heard_at)
            self._answer_to(join.worker, join.incarnation, Waiting(0, reason))
        else:
            if old is not None:
                self._remove(old, "another process has taken its place")
            self._admit(join)

    def _objection(self, join: Join, old: Member | None) -> str:
        """Return why a worker cannot join, or an empty text; ``old`` is the member of its name."""
        if self.failed:
            return self.failed
        if (join.worker, join.incarnation) in self._ended:
            return wording.came_back(join.worker)
        if old is not None:
            if old.challenger[0] != join.incarnation:
                old.challenger = (join.incarnation, self._now)
            if old.heard_at > old.challenger[1]:
                return wording.name_taken(join.worker, self._now - old.heard_at)
        return objection(join, next((m.join for m in self.members.values() if m is not old), None))

    def _admit(self, join: Join) -> None:
        if not self.members:
            self._few_since = self._now
        member = Member(join, self._now)
        self.roster.add(member)
        self.changes += 1
        self._out.notes.append(f"{join.worker} joins from {join.address}; {self._joined()}")
        if not self._welcoming and len(self.members) >= self.plan.run.workers:
            self._welcoming = True
            self._few_since = self._now  # from now on it is their first requests that are waited for
            self._welcome(list(self.members.values()))
        else:
            self._welcome([member])

    def _welcome(self, members: list[Member]) -> None:
        if not self._welcoming:
            for member in members:
                self._answer(member, Waiting(0, self._joined()))
            return
        everybody = sorted(self.members.values(), key=by_place)
        ranks = {member: rank for rank, member in enumerate(everybody)}
        size = max(len(everybody), self.plan.run.workers if self.generation is None else 0)
        for member in members:
            _, warned = different_versions(next(iter(self.members.values())).join, member.join)
            warnings = (warned,) if warned else ()
            self._answer(member, Welcome(self.run, self._plan_json, ranks[member], size, warnings))

    def _end_waiting_for_first_round(self) -> None:
        """Go on without those who joined and never asked; with too few workers, refuse everybody."""
        waited_s = self.plan.run.join_timeout_s
        if len(self.members) >= self.plan.run.workers:
            for member in [m for m in self.members.values() if m.phase is Phase.JOINED]:
                self._remove(member, f"it did not ask for its first iteration for {waited_s:g} s")
            return
        reason = wording.given_up(waited_s, self._joined())
        for member in list(self.members.values()):
            self._refuse(member, reason)
        self._welcoming = False

    def _refuse(self, member: Member, reason: str) -> None:
        self._answer(member, Refused(reason))
        self._remove(member, f"refused, {reason}")

    def _from_member(self, member: Member, message: Upward) -> None:
        match message:
            case Request():
                self._request(member, message)
            case Done(_, _, round_id, ok, error, broken):
                if ok:
                    self._committed(member, round_id)
                else:
                    self._dropped(member, round_id, error, broken)
            case Pause(_, _, seq, done, committed):
                # A later one than the last known was answered before a restart.
                if seq >= member.seq and (member.live or member.phase in (Phase.LATE, Phase.CUT)):
                    if seq > member.seq:
                        member.seq, member.answer = seq, None
                    self.changes += 1
                    self._report(member, done)
                    self._committed(member, committed)
                    self._left_round(member, "it paused instead")
                    self.roster.move(member, Phase.PAUSED)
                self._answer(member, Paused(seq))
            case Leave(_, _, done, failed, reason, committed):
                self._report(member, done)
                self._committed(member, committed)
                self._remove(member, f"failed: {reason}" if failed else reason)
            case Data(_, _, digest):
                self._check_data(member, digest)

    def _check_data(self, member: Member, digest: str) -> None:
        self.changes += digest not in self.digests
        other = self.digests.setdefault(digest, member)
        if other is not member:
            self._refuse(member, wording.same_batches(member.worker, other.worker))

    def _node_leave(self, node: int, reason: str) -> None:
        self.changes += 1
        for member in [m for m in self.members.values() if m.join.node == node]:
            member.leaving = reason
            if member.held or member.phase is Phase.CUT:
                self._dismiss(member)
            elif member.phase is Phase.PAUSED:
                self.roster.move(member, Phase.ENDED)
            self._recall([member])

    def _leave_out_late(self) -> None:
        """Let the next round start without those for which all others have waited for too long.

        Whoever is in an open round is not late: that round completes or fails by its own deadlines. And while only
        late ones have the run's model the others wait on: they would begin anew, and what was learnt were lost.
        """
        if self.open or not 0 < self.roster.held < self.roster.live:
            return
        late = [m for m in self.members.values() if m.phase is Phase.BUSY]
        if not self.stopping and any(m.synced for m in late) and not any(m.synced for m in self._held()):
            return
        round_id = self.rounds["local"] + self.rounds["global"] + 1
        reason = wording.left_out(late, round_id, self.plan.run.patience_s)
        self._out.notes.append(reason)
        self.changes += 1
        self._end_generation(reason)
        for member in late:
            member.granted = max(1, member.granted)
            self.roster.move(member, Phase.LATE)
        late[0].granted += self.unheard
        self.unheard = 0

    def _fail_stuck_rounds(self) -> None:
        """Fail the open rounds if nobody has moved for longer than any exchange can take by its own deadlines."""
        run = self.plan.run
        longest_s = run.patience_s + EXCHANGE_STEPS * run.exchange_timeout_s
        if not self.open or not run.patience_s or self._now - self._moved_at < longest_s:
            return
        self._moved_at = self._now
        for opened in list(self.open.values()):
            self._fail(opened, f"{wording.named(opened.waiting)} did not complete it within {longest_s:g} s")

    def _evict_silent(self) -> None:
        """Evict those whose lease is over; but not yet the last ones that have the run's model.

        If all of them are silent, it is rather this server whose link is down, or a local server that is frozen.
        """
        run = self.plan.run
        holders = self.roster.holders() if self.count else []
        quiet_s = self._now - max((m.heard_at for m in holders), default=self._now)
        spared = run.lease_s < quiet_s <= max(run.lease_s, run.server_timeout_s)
        if spared and not self._spares:
            self._out.notes.append(wording.all_silent(holders, quiet_s, run.server_timeout_s))
        if (
            self._spares and quiet_s <= run.lease_s
        ):  # one is heard again: the others' messages are on their way
            for member in holders:
                member.heard_at = max(member.heard_at, self._now - quiet_s)
        self._spares = spared
        for member in [m for m in self.members.values() if self._now - m.heard_at > run.lease_s]:
            if spared and member in holders:
                continue
            granted = member.granted
            self._remove(member, f"nothing was heard from it for {self._now - member.heard_at:.0f} s")
            member.silent, member.granted = True, granted

    def _returned(self, message: Upward) -> Member | None:
        """Take a worker back that was evicted for its silence, if nobody else has the run's model."""
        member = self.roster.left.get(message.worker)
        if member is None or member.join.incarnation != message.incarnation or message.worker in self.members:
            return None
        if not (member.silent and member.synced) or self.closed or self.roster.holders():
            return None
        self._ended.discard((member.worker, member.join.incarnation))
        self.roster.restore(member)
        self.roster.move(member, Phase.LATE)
        member.silent = False
        self.changes += 1
        self._out.notes.append(f"{member.worker} is back, and has the run's model")
        return member

    def _remove(self, member: Member, reason: str) -> None:
        """End a member's incarnation: its grant goes back, its round has failed, its generation is over."""
        self._report(member, member.done)
        in_generation = member.rank >= 0 and member.phase is not Phase.ENDED
        self.roster.remove(member)
        self.changes += 1
        self._ended.add((member.worker, member.join.incarnation))
        self.digests = {digest: m for digest, m in self.digests.items() if m is not member}
        self._few_since = self._now
        self._out.notes.append(f"{member.worker} leaves: {reason} ({member.done} iterations)")
        self._left_round(member, f"it left the run: {reason}")
        if in_generation:
            self._end_generation(f"{member.worker} left: {reason}")

    def _known(self, message: Upward) -> Member | None:
        return self.members[message.worker] if self.knows(message.worker, message.incarnation) else None
