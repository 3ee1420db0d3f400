"""The rounds of a run: who leads, what is open, completed and failed, and when checkpoints are due."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lsgd.election import standing
from lsgd.means import mean_of_finite
from lsgd.plan.run import RunSettings
from lsgd.protocol.events import RoundOrdered
from lsgd.protocol.messages import Go, Round, Stop
from lsgd.server.changes import Changes
from lsgd.server.reasons import NO_REASON, Reason, Why
from lsgd.server.roster import Has, Member, NodeQueue, OpenRound

if TYPE_CHECKING:
    from lsgd.server.state import RunState

MAX_FAILED_ROUNDS = 10
"""Failed rounds, without a completed global one between them, that end the run."""

MOST_SKIPPED = 1 << 32
"""Most ids of rounds that are skipped at once, whatever a worker says."""

MAX_ELECTIONS = 4096
"""How many of the last rounds the history keeps."""

FIRST_CHECKPOINT_S = 60.0
"""After this time the first checkpoint by time is due, if not earlier."""

FIRST_LINES, LINES_EVERY_S = 20, 1.0
"""The first rounds each get a line in the log; later ones at most one line per interval."""

PARTICIPATION_ROUNDS = 100
"""Over how many of the last completed global rounds participation is the mean."""

MAX_LOSSES = 64
"""How many workers' losses, in rank order, the history keeps for a round; it always keeps the leader's."""


class CheckpointTimes:
    """When the last round with a checkpoint was, and when the next one is due; after a restart, only the round counts.

    It begins when the first round is ordered.
    """

    def __init__(self) -> None:
        self._rounds = 0  # global ones before the last one that was completed with a checkpoint
        self._at = -math.inf
        self._wait_s = FIRST_CHECKPOINT_S

    def start(self, now: float) -> None:
        """Note that the first round is ordered."""
        self._at = now

    def is_due(self, run: RunSettings, exchanges: int, now: float) -> bool:
        """Whether a global round writes a checkpoint that is ordered now, after so many ``exchanges``."""
        every, every_s = run.checkpoint_every, run.checkpoint_every_s
        by_rounds = every > 0 and exchanges - self._rounds >= every
        return by_rounds or (every_s > 0 and now - self._at >= min(every_s, self._wait_s))

    def saved(self, exchanges: int, now: float) -> None:
        """Note that all members have completed a round with a checkpoint."""
        self._rounds, self._at, self._wait_s = exchanges, now, math.inf


class RoundBook:
    """The rounds of a run.

    An open round has at least one member that has not completed it. Each member in a round is among those, and its
    answer is the one that ordered the round. While the final round is open, no other is.

    Args:
        ordered: number of rounds so far, by scope.
        failures: number of failed rounds since the last completed global one.
        final: whether the round that makes the consensus has been ordered.
        skipped: number of ids that are used for no round.
        known: id of the last round that the server knew when it took over.
        averages: whether the next global round begins a phase anew, so that models which differ are averaged first.

    Attributes:
        changes: counts the rounds that are ordered, completed or failed.
        open: rounds that some members have not completed, by id.
        fresh: whether no round of the generation has been ordered yet.
        elections: the last rounds.
        checkpoints: when they are due.
        unlisted: number of rounds without a line in the log.
    """

    def __init__(
        self,
        ordered: dict[str, int] | None = None,
        failures: int = 0,
        final: bool = False,
        opened: Iterable[OpenRound] = (),
        skipped: int = 0,
        known: int = 0,
        *,
        averages: bool = False,
    ) -> None:
        self.changes = Changes()
        self.ordered = dict(ordered or {"local": 0, "global": 0})
        self.failures, self.final = failures, final
        self.skipped, self.known, self.averages = skipped, known, averages
        self.open = {each.round.id: each for each in opened}
        self.fresh = False
        self.elections: deque[RoundOrdered] = deque(maxlen=MAX_ELECTIONS)
        self._shares: deque[float] = deque(maxlen=PARTICIPATION_ROUNDS)
        self.unlisted = 0
        self._line_at = -math.inf
        self.checkpoints = CheckpointTimes()

    @property
    def next_id(self) -> int:
        """Id of the next round."""
        return self.ordered["local"] + self.ordered["global"] + self.skipped + 1

    def skip_to(self, round_id: int) -> None:
        """Use no id up to that of a round which another server has ordered, and this one knows nothing of."""
        if (more := min(round_id, self.next_id + MOST_SKIPPED) + 1 - self.next_id) > 0:
            self.skipped += more
            self.changes.count += 1

    @property
    def hopeless(self) -> bool:
        """Whether too many rounds have failed in a row."""
        return self.failures >= MAX_FAILED_ROUNDS

    @property
    def participation(self) -> float | None:
        """Mean share of the workers in the run that were members of the last completed global rounds; None: unknown."""
        return statistics.fmean(self._shares) if self._shares else None

    def took_part(self, members: int, workers: int) -> None:
        """Note that a global round of ``members`` is completed while so many ``workers`` are in the run."""
        self._shares.append(min(1.0, members / max(1, workers)))

    def line_of(self, entry: RoundOrdered, now: float, *, final: bool, lockstep: bool) -> Reason:
        """Return the log line of a round that is ordered now, if it gets one; in ``lockstep`` only the final one does.

        The first round without a line has one that says so.
        """
        due = entry.round <= FIRST_LINES or now - self._line_at >= LINES_EVERY_S
        if final or (due and not lockstep):
            self._line_at = now
            return line(entry, final=final)
        self.unlisted += not lockstep
        return Why.FEWER_LINES() if self.unlisted == 1 and not lockstep else NO_REASON

    def order(self, order: Round, members: Sequence[Member], now: float) -> OpenRound:
        """Open a round of ``members``."""
        assert order.scope == "local" or not self.open
        self.changes.count += 1
        # What a newcomer has learned, if it keeps it, comes in a later round.
        done = {m: m.done for m in members if order.final or m.rank not in order.new}
        opened = OpenRound(order, set(members), done, now)
        self.open[order.id] = opened
        self.ordered[order.scope] += 1
        self.final |= order.final
        self.fresh = False
        return opened

    def complete(
        self, member: Member, round_id: int, now: float, sent_nbytes: int | None = None, *, lacking: bool = False
    ) -> OpenRound | None:
        """Note that a member has completed a round, and return the round if the member was in it.

        ``sent_nbytes``: what it has sent in all rounds since it joined, None if it did not say; ``lacking``: it lacks
        parts of the run's model, and so stays a newcomer.
        """
        if round_id > member.record.committed:  # also one that has failed for others: it has a model, if no common one
            member.record.committed = round_id
            if member.has is Has.NOTHING:
                member.has = Has.PARTS if lacking else Has.OLDER
        opened = member.round
        if opened is None or opened.round.id != round_id:
            return None
        member.round, member.record.met = None, opened.round.generation.number
        if opened.round.scope == "global":
            member.learns(lacking=lacking)
        opened.waiting.remove(member)
        opened.add_sent(member, sent_nbytes)
        if not opened.waiting:
            self.changes.count += 1
            del self.open[round_id]
            if opened.round.scope == "global":
                self.failures, self.averages = 0, False
                for one, done in opened.done.items():
                    one.account.share(done)
            if opened.round.checkpoint:
                self.checkpoints.saved(opened.round.exchanges, now)
        return opened

    def fail(self, opened: OpenRound, *, counts: bool) -> None:
        """Close a failed round; ``counts``: it is the first of its generation to fail."""
        self.changes.count += 1
        del self.open[opened.round.id]
        for member in opened.waiting:
            member.round = None
        self.final &= not opened.round.final
        self.failures += counts


def abridged(answer: Go | Stop, member: Member) -> Go | Stop:
    """Return an answer without the generation's members if the worker knows them."""
    order = answer.round
    if order is None or order.generation.number != member.record.met:
        return answer
    generation = replace(order.generation, nodes=(), node_sizes=(), indices=(), missed=(), nccl_nodes=(), others=())
    return replace(answer, round=replace(order, generation=generation))


class Roles(NamedTuple):
    """Who leads a round, who leads on each node (ranks, -1: nobody), who sends state, and who receives it (ranks)."""

    leader: Member
    leaders: tuple[int, ...]
    source: Member
    new: tuple[int, ...]


def new_round(
    state: RunState, scope: str, members: Sequence[Member], who: Roles, *, final: bool = False, probe: bool = False
) -> Round:
    """Return a round of ``members``, all in rank order; ``who``: their roles."""
    book, generation = state.book, state.roster.generation
    assert generation is not None
    is_global, exchanges = scope == "global", book.ordered["global"]
    averages = book.averages and is_global and not final
    return Round(
        id=book.next_id,
        generation=generation,
        scope=scope,
        leader=who.leader.rank,
        leaders=who.leaders,
        exchanges=exchanges,
        new=who.new,
        source=who.source.rank,
        final=final,
        algorithm=state.phases.text if is_global else "",
        count=state.ledger.count,
        checkpoint=final or (is_global and book.checkpoints.is_due(state.plan.run, exchanges, state.now)),
        probe=probe,
        averaged=tuple(m.rank for m in members if m.synced) if averages else (),
    )


def roles(
    members: Sequence[Member],
    queues: Iterable[NodeQueue],
    nodes: int,
    *,
    copies: bool,
    rule: str = "loss",
    lot: str = "",
) -> Roles:
    """Choose from what the ``members`` of a round have reported, all in rank order.

    ``queues``: of their nodes; other nodes have no leader in this round. ``copies``: all members take the source's
    model, not only newcomers. ``lot`` names the run and the round, for an election by lot.
    """
    synced = [m for m in members if m.synced]
    # The state of the most advanced round counts; ties go to the lowest loss.
    source = min(synced or members, key=lambda m: (m.has is Has.PARTS, -m.record.committed, m.electable_loss, m.place))
    new = [m.rank for m in members if m is not source and (copies or not m.synced)]
    leaders = [-1] * nodes
    for queue in queues:
        candidates = [m for m in queue.members if m.synced] or queue.members
        leaders[queue.index] = elect(candidates, rule, lot).rank
    # A newcomer has no model worth following, unless all start from it.
    return Roles(elect(synced or [source], rule, lot), tuple(leaders), source, tuple(new))


def elect(members: list[Member], rule: str, lot: str) -> Member:
    """Return the member that a rule of :mod:`lsgd.election` prefers; ties go to the first in rank order.

    ``lot`` names the run and the round.
    """
    return min(members, key=lambda m: (standing(rule, m.electable_loss, m.record.usual, f"{lot} {m.worker}"), m.place))


def election(
    order: Round, leader: Member | None, members: Sequence[Member], seconds: float, means: Mapping[str, float]
) -> RoundOrdered:
    """Return the history's entry for a new round; ``leader``: None if nobody takes over what one has."""
    losses = {m.worker: m.asked.loss for m in [*members[:MAX_LOSSES], *([leader] if leader else [])]}
    node = members[0].join.node if order.scope == "local" else -1
    who = leader.worker if leader else ""
    return RoundOrdered(order.id, order.scope, node, who, order.count, seconds, losses, dict(means))


def line(entry: RoundOrdered, *, final: bool) -> Reason:
    """Return the log line of a round, with its leader's training loss, or the mean of all if nobody leads."""
    where = f" of node{entry.node}" if entry.scope == "local" else " makes the consensus" if final else ""
    reported = [entry.losses[entry.worker]] if entry.worker else entry.losses.values()
    mean = mean_of_finite(reported)
    if mean is None:
        loss = "no loss yet" if all(loss is None for loss in reported) else "no finite loss"
    else:
        loss = f"{'' if entry.worker else 'mean training '}loss {mean:.4g}"
    who = f"leader {entry.worker} ({loss})" if entry.worker else loss
    return Why.ROUND(scope=entry.scope, id=entry.round, where=where, who=who, count=entry.count)
