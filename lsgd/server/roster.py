"""Who takes part: the record of each worker and its states, of each node, and of the current generation."""

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from lsgd.election import usual_loss
from lsgd.means import finite
from lsgd.protocol.events import Happening, WorkerChanged, WorkerJoined
from lsgd.protocol.messages import Generation, Go, Heartbeat, Join, Request, Round, Stop
from lsgd.protocol.wants import STEP, Call, End, Step, Want
from lsgd.protocol.wants import Round as LastRound
from lsgd.server.changes import Changes
from lsgd.server.ledger import Account
from lsgd.server.reasons import NO_REASON, Reason, Why


class MemberState(enum.Enum):
    """The state of a worker. Rounds wait for *live* workers; :attr:`next` has the states that can follow.

    Reports and events name it :attr:`shown`; a worker that has left the run is ``left``.
    """

    JOINED = ("welcome, or waiting to be", False, "away")
    HELD = ("its request has no answer yet", True, "held")
    BUSY = ("about its round and its iteration", True, "live")
    STRAGGLER = (
        "evicted from rounds: it kept all others waiting, or was silent and is back; its grant is still out",
        False,
        "straggler",
    )
    SILENT = (
        "left out of rounds: nothing is heard of it; its grant is still out, and its lease goes on",
        False,
        "away",
    )
    CUT = ("evicted from rounds: others cannot reach it; its request waits", False, "cut")
    PAUSED = ("stepped aside until its next request", False, "away")
    FINISHED = ("its script's own loop is over; its request waits for the end of the run", False, "away")
    ENDED = ("was told to stop, and has only to leave", False, "away")

    def __init__(self, means: str, live: bool, shown: str) -> None:
        self.means, self.live, self.shown = means, live, shown
        self.next: tuple[MemberState, ...] = ()


_AT_ONCE = "the same, while others cannot reach it"

TRANSITIONS = tuple(
    (MemberState[before], MemberState[after], upon)
    for before, after, upon in (
        ("JOINED", "HELD", "first request"),
        ("JOINED", "CUT", _AT_ONCE),
        ("HELD", "BUSY", "Go, Stop with a round, or the answer to a call"),
        ("HELD", "ENDED", "Stop"),
        ("HELD", "PAUSED", "Pause, or a call where models are identical"),
        ("HELD", "CUT", "a later request, while others cannot reach it"),
        ("HELD", "FINISHED", "it says that its own loop is over"),
        ("HELD", "SILENT", "nothing is heard of it, and others have the run's model"),
        ("BUSY", "HELD", "next request, or the same one with its round dropped"),
        ("BUSY", "CUT", _AT_ONCE),
        ("BUSY", "PAUSED", "Pause"),
        ("BUSY", "STRAGGLER", "all others held for `patience_s`"),
        ("BUSY", "SILENT", "nothing is heard of it, and others have the run's model"),
        ("BUSY", "ENDED", "last round completed"),
        ("STRAGGLER", "HELD", "next request, or the same one"),
        ("STRAGGLER", "CUT", _AT_ONCE),
        ("STRAGGLER", "PAUSED", "Pause"),
        ("SILENT", "STRAGGLER", "it is heard again"),
        ("CUT", "HELD", "global round after its time is over"),
        ("CUT", "PAUSED", "Pause, or the answer to a call"),
        ("CUT", "ENDED", "its node leaves, or the run ends"),
        ("PAUSED", "HELD", "request"),
        ("PAUSED", "CUT", _AT_ONCE),
        ("PAUSED", "BUSY", "the answer to a call"),
        ("PAUSED", "ENDED", "its node leaves"),
        ("FINISHED", "HELD", "the run stops, or nobody else has the run's model"),
        ("FINISHED", "ENDED", "its node leaves"),
        ("ENDED", "HELD", "a new request, which gets Stop, or joins a last round that is made again"),
        ("ENDED", "CUT", _AT_ONCE),
        ("ENDED", "PAUSED", "Pause"),
        ("ENDED", "STRAGGLER", "gone for its silence, heard again, and nobody else has the run's model"),
    )
)
"""Which state can follow which, and upon what. A member can leave from any state."""

for _before, _after, _ in TRANSITIONS:
    _before.next += (_after,)


class Has(enum.IntEnum):
    """What of the run's model a worker has; a run continues from an ``OLDER`` one or better."""

    NOTHING = 0
    PARTS = 1
    """It has completed a global round, and lacks parts that it still downloads: it stays a newcomer."""
    OLDER = 2
    """A later round has been made without it, or has failed for others."""
    WHOLE = 3
    """It has completed the last global round, or is where the run's checkpoint is."""


AWAY = (MemberState.JOINED, MemberState.STRAGGLER, MemberState.SILENT, MemberState.CUT, MemberState.PAUSED)
"""The states of members that are outside rounds now, but may take part later."""

MAX_LEFT = 4096
"""How many departed workers are remembered."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker's last request that was not ahead.

    Args:
        seq: its number, or that of a later request ahead that was granted.
        loss: that it reported.
        steps: length of its script's own loop; 0: it has none.
    """

    seq: int = 0
    wants: Want = STEP
    loss: float | None = None
    steps: int = 0


@dataclass(slots=True, eq=False)
class Record:
    """What a worker's rounds so far say of it.

    Args:
        committed: id of the last round it has completed.
        usual: loss at the rounds so far, see :func:`lsgd.election.usual_loss`.
        met: number of the last generation in which it has completed a round, and so knows the members.
        sent_nbytes: total when it completed its last round.
    """

    committed: int = 0
    usual: float | None = None
    met: int = 0
    times_leader: int = 0
    sent_nbytes: int = 0

    def reports(self, loss: float | None) -> None:
        """Take a loss into its usual one, if it is finite."""
        if (finite_loss := finite(loss)) is not None:
            self.usual = usual_loss(self.usual, finite_loss)

    def sends(self, total: int) -> int:
        """Note how much it has sent in all its rounds; return how much since the last one."""
        before, self.sent_nbytes = self.sent_nbytes, total
        return max(0, total - before)


@dataclass(slots=True, eq=False)
class Entry:
    """How a worker came into the run.

    Args:
        late: whether the run had begun.
        step: place in its script's own loop when it was welcomed; -1 before that.
    """

    late: bool = False
    step: int = -1


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of a worker, from its join to its leave.

    Args:
        heard_at: time of its last message, in seconds of the coordinator's clock.
        state: changed by :meth:`Roster.move` only.
        rank: in the current generation; -1 outside it.
        held_at: time of its last held request.
        has: what of the run's model it has; :meth:`learns` and :meth:`falls_behind` change it.
        leaving: reason why it must leave, although the run continues.
        asked: its last request; :meth:`Roster.asks` and :meth:`Roster.goes_on` change what it wants.
        answer: to that request; None while there is none.
        round: until it completes the round or the round fails.
        spent: last heartbeat, with its totals; None before the first.
    """

    join: Join
    heard_at: float
    state: MemberState = MemberState.JOINED
    rank: int = -1
    held_at: float = 0.0
    has: Has = Has.NOTHING
    leaving: Reason = NO_REASON
    asked: Asked = Asked()
    left: Reason = NO_REASON
    answer: Go | Stop | None = None
    round: "OpenRound | None" = None
    spent: Heartbeat | None = None
    account: Account = field(default_factory=Account)
    record: Record = field(default_factory=Record)
    entry: Entry = field(default_factory=Entry)

    @property
    def worker(self) -> str:
        """Its name."""
        return self.join.worker

    @property
    def place(self) -> tuple[int, int]:
        """Node and index: the order of ranks."""
        return (self.join.node, self.join.index)

    @property
    def seq(self) -> int:
        """The number of its last request."""
        return self.asked.seq

    @property
    def done(self) -> int:
        """Iterations that it has reported."""
        return self.account.done

    @property
    def granted(self) -> int:
        """Iterations granted and not yet reported."""
        return self.account.granted

    @property
    def unshared(self) -> int:
        """Iterations that only its own model has, as far as is known."""
        return self.done - self.account.shared

    @property
    def iterates(self) -> bool:
        """Whether it asks for iterations."""
        return isinstance(self.asked.wants, Step)

    @property
    def call(self) -> Call | None:
        """The call in which it waits for all others."""
        return self.asked.wants if isinstance(self.asked.wants, Call) else None

    @property
    def has_finished(self) -> bool:
        """Whether it says that its script's own loop is over, and waits for the end of the run."""
        return isinstance(self.asked.wants, End)

    @property
    def step(self) -> int:
        """Its place in its script's own loop."""
        return max(0, self.entry.step) + self.done

    @property
    def steps_left(self) -> int:
        """Iterations that its script's own loop has yet to make; 0 if it has none."""
        over = isinstance(self.asked.wants, LastRound | End)
        return 0 if over else max(0, self.asked.steps - self.step)

    @property
    def held(self) -> bool:
        """Whether its request waits for an answer."""
        return self.state is MemberState.HELD

    @property
    def live(self) -> bool:
        """Whether rounds wait for it."""
        return self.state.live

    @property
    def was_silent(self) -> bool:
        """Whether it was evicted for its silence; its process may still be alive."""
        return self.left.code == Why.SILENT.code

    @property
    def synced(self) -> bool:
        """Whether it has the run's model."""
        return self.has is Has.WHOLE

    @property
    def model(self) -> str:
        """What its model is, in words."""
        return "the run's model" if self.synced else "an older model of the run"

    def learns(self, *, lacking: bool = False) -> None:
        """Note that it has completed a global round, or is where the run's checkpoint is."""
        self.has = Has.PARTS if lacking else Has.WHOLE

    def falls_behind(self) -> None:
        """Note that the run goes on without what it has."""
        if self.synced:
            self.has = Has.OLDER if self.record.committed else Has.NOTHING

    @property
    def electable_loss(self) -> float:
        """Its loss; infinite if there is none or it is non-finite, so that it is never preferred."""
        loss = finite(self.asked.loss)
        return math.inf if loss is None else loss


@dataclass(slots=True, eq=False)
class NodeQueue:
    """The members of the generation on one node, and their queue of tokens.

    Args:
        index: place among the generation's nodes.
        members: in rank order.
        tokens: iterations until the next local round; infinite if there are no local rounds.
        held: number of members that are held.
    """

    node: int
    index: int
    members: list[Member] = field(default_factory=list)
    tokens: float = 0.0
    held: int = 0


@dataclass(slots=True, eq=False)
class OpenRound:
    """A round that has been ordered, until all its members have completed it or it fails.

    Args:
        waiting: members that have not completed it.
        done: iterations, as of its order, of those whose models enter it.
        opened_at: time of its order; None if an earlier server did so.
        sent_nbytes: bytes from the members that have completed it, each since its round before; None: one did not say.
        transfer_s: how long the transfer of an earlier round took them, the longest; 0: none was beside training.
    """

    round: Round
    waiting: set[Member]
    done: dict[Member, int]
    opened_at: float | None = None
    sent_nbytes: int | None = 0
    transfer_s: float = 0.0

    def add_sent(self, member: Member, total: int | None) -> None:
        """Count what a member has sent; ``total``: in all its rounds, None if it did not say."""
        if total is None or self.sent_nbytes is None:
            self.sent_nbytes = None
        else:
            self.sent_nbytes += member.record.sends(total)


class Group(NamedTuple):
    """Members in rank order, and the best model of the run that one of them has (:func:`model_of`)."""

    members: Sequence[Member]
    model: Has


class Roster:
    """The members of the run and of its current generation, with the counts that every decision needs.

    The counts always match the members; the members of a queue have ranks and the queue's node; while a generation
    lasts, only its members have the run's model.

    Args:
        left: last incarnation of each departed worker, at most :data:`MAX_LEFT`.
        made: iterations of departed incarnations, by name; as many workers as in ``left``.
        replaced: iterations since their last global round of those that cannot come back, because others have their
            names, by name.
        generation: the current one, or the last.
        broken: reason why the generation is over; none while it lasts.

    Attributes:
        changes: counts those of members and generations, but not that a member is held or goes on.
        queues: those of the generation's nodes, by node.
        live: number of members that are HELD or BUSY.
        held: number of members that are HELD.
        absent: number of the generation's members that are not live, departed ones included.
        closed_at: when the last connection of a node has closed, or another local server of it was first heard.
        spared: members that have the run's model, while all of them are silent and the run waits for them.
        happened: events that the coordinator has yet to publish.
    """

    def __init__(
        self,
        members: Iterable[Member] = (),
        left: Iterable[Member] = (),
        made: Mapping[str, int] | None = None,
        generation: Generation | None = None,
        broken: Reason = NO_REASON,
        replaced: Mapping[str, int] | None = None,
    ) -> None:
        self.changes = Changes()
        self.members = {m.worker: m for m in members}
        self.left = {m.worker: m for m in left}
        self.made, self.replaced = dict(made or {}), Counter(replaced or {})
        self.generation, self.broken = generation, broken
        self.spared: set[Member] = set()
        self.happened: list[Happening] = []
        self.queues: dict[int, NodeQueue] = {}
        self.closed_at: dict[int, float] = {}
        self._ended = {(m.worker, m.join.incarnation) for m in self.left.values()}
        for rank, name in enumerate(generation.members if generation else ()):
            member = self.members.get(name)
            if member is None or member.rank != rank:  # gone, or back again: its place stays until the next generation
                member = self.left.get(name) or self.members[name]
            self._to_queue(member)
        states = [m.state for m in self.members.values()]
        self.live = sum(state.live for state in states)
        self.held = states.count(MemberState.HELD)
        inside = sum(m.live and m.rank >= 0 for m in self.members.values())
        self.absent = len(generation.members) - inside if generation else 0

    def _to_queue(self, member: Member) -> NodeQueue:
        queue = self.queues.setdefault(member.join.node, NodeQueue(member.join.node, len(self.queues)))
        queue.members.append(member)
        return queue

    @property
    def gone(self) -> int:
        """How many iterations since their last global round those have made that are no members any more."""
        return self.replaced.total() + sum(m.unshared for m in self.left.values())

    def find(self, worker: str, incarnation: int) -> Member | None:
        """Return the member with this name and incarnation."""
        member = self.members.get(worker)
        return member if member is not None and member.join.incarnation == incarnation else None

    def has_ended(self, worker: str, incarnation: int) -> bool:
        """Whether this incarnation has left and cannot come back."""
        return (worker, incarnation) in self._ended

    def within(self, *states: MemberState) -> list[Member]:
        """Return the members in one of these states."""
        return [m for m in self.members.values() if m.state in states]

    def away(self) -> list[Member]:
        """Return the members that are outside rounds now, but may take part later."""
        return self.within(*AWAY)

    def holders(self) -> list[Member]:
        """Return the members that have the run's model and have not ended."""
        return [m for m in self.members.values() if m.synced and m.state is not MemberState.ENDED]

    def groups(self) -> dict[MemberState, Group]:
        """Return all members by their state."""
        found: dict[MemberState, list[Member]] = {state: [] for state in MemberState}
        for member in sorted(self.members.values(), key=by_place):
            found[member.state].append(member)
        return {state: Group(members, model_of(members)) for state, members in found.items()}

    def move(self, member: Member, state: MemberState, reason: Reason = NO_REASON) -> None:
        """Change a member's state.

        Raises:
            RuntimeError: the new state cannot follow the present one.
        """
        before = member.state
        if state is before:
            return
        if state not in before.next:
            raise RuntimeError(f"{member.worker} is {before.name} and cannot become {state.name}")
        self._set(member, state)
        if not (state.live and before.live):  # not each iteration
            self.changes.count += 1
            self.happened.append(WorkerChanged(member.worker, state.shown, reason.code, str(reason)))

    def _set(self, member: Member, state: MemberState) -> None:
        before, member.state = member.state, state
        live = state.live - before.live
        held = (state is MemberState.HELD) - (before is MemberState.HELD)
        self.live += live
        self.held += held
        if member.rank >= 0:
            self.queues[member.join.node].held += held
            self.absent -= live

    def asks(self, member: Member, request: Request, now: float, barred: Reason = NO_REASON) -> None:
        """Hold a member's new request; ``barred``: why it is CUT instead, if it is."""
        if not (member.iterates and isinstance(request.wants, Step)):
            self.changes.count += 1
        member.asked = Asked(request.seq, request.wants, request.loss, request.steps)
        member.answer, member.held_at = None, now
        self.move(member, MemberState.CUT if barred else MemberState.HELD, barred)

    def enter(self, opened: OpenRound) -> None:
        """Let held members be about a round that has been ordered."""
        for member in opened.waiting:
            member.round = opened
            member.record.reports(member.asked.loss)
            self.move(member, MemberState.BUSY)

    def goes_on(self, member: Member) -> None:
        """Note that a member waits in no call any more: it has an answer, or was interrupted."""
        self.changes.count += 1
        member.asked = replace(member.asked, wants=STEP)

    def dismiss(self, member: Member, reason: Reason) -> None:
        """Note that a member must leave, although the run continues."""
        self.changes.count += 1
        member.leaving = reason

    def welcome(self, member: Member, step: int) -> None:
        """Note where a member's own loop begins, once it is welcome."""
        self.changes.count += 1
        member.entry.step = step

    def add(self, member: Member) -> None:
        """Add a worker that has joined."""
        self.changes.count += 1
        member.entry.late = self.generation is not None
        join = member.join
        if before := self.left.get(member.worker):
            self._cannot_come_back(before)
        self.members[member.worker] = member
        self.happened.append(WorkerJoined(join.worker, join.node, join.address, join.gpu))

    def _cannot_come_back(self, member: Member) -> None:
        if member.unshared:
            self.replaced[member.worker] += member.unshared
            member.account.share(member.done)

    def remove(self, member: Member, reason: Reason) -> None:
        """Remove a member; its rank stays taken, as an absent one, until the next generation."""
        self._set(member, MemberState.ENDED)
        self.changes.count += 1
        self.happened.append(WorkerChanged(member.worker, "left", reason.code, str(reason)))
        member.left = reason
        del self.members[member.worker]
        self.left.pop(member.worker, None)
        self.left[member.worker] = member
        self.made[member.worker] = self.made.get(member.worker, 0) + member.done
        self._ended.add((member.worker, member.join.incarnation))
        if len(self.left) > MAX_LEFT:
            oldest = next(iter(self.left))
            self._cannot_come_back(self.left.pop(oldest))
            del self.made[oldest]

    def readmit(self, member: Member, reason: Reason) -> None:
        """Let a member that was evicted for its silence be one again, as a STRAGGLER with its grant."""
        del self.left[member.worker]
        self.made[member.worker] -= member.done
        self._ended.discard((member.worker, member.join.incarnation))
        member.rank, member.left = -1, NO_REASON
        self.members[member.worker] = member
        self.move(member, MemberState.STRAGGLER, reason)

    def begin_generation(
        self,
        members: Sequence[Member],
        transport: str,
        missed: tuple[int, ...] = (),
        nccl_nodes: tuple[int, ...] = (),
        least: int = 1,
    ) -> Generation:
        """Make ``members``, all held and in rank order, the generation; the other arguments are its fields.

        ``least``: the lowest number that it may have.
        """
        self.changes.count += 1
        for member in self.members.values():
            member.rank = -1
        self.queues, self.absent, self.broken = {}, 0, NO_REASON
        for rank, member in enumerate(members):
            member.rank = rank
            self._to_queue(member).held += 1
        number = max(self.generation.number + 1 if self.generation else 1, least)
        keep = (MemberState.PAUSED, MemberState.FINISHED, MemberState.STRAGGLER, MemberState.SILENT)
        others = [m.place for m in self.within(*keep)]
        self.generation = Generation.of(number, [m.place for m in members], transport, missed, nccl_nodes, others)
        return self.generation

    def end_generation(self, reason: Reason) -> list[Member]:
        """End the generation, unless it is over already; return the members to notify."""
        if self.generation is None or self.broken:
            return []
        self.changes.count += 1
        self.broken = reason
        return [m for m in self.members.values() if m.rank >= 0 and m.state is not MemberState.ENDED]


by_place = attrgetter("place")
"""Sort key: the order of ranks."""


def model_of(members: Iterable[Member]) -> Has:
    """Return the best model from which a run can continue that one of ``members`` has."""
    return max((m.has for m in members if m.has is not Has.PARTS), default=Has.NOTHING)


def transfer_of(members: Iterable[Member], most: int = 120) -> str:
    """Return how far the transfer of one of the members is that says so, with a colon before it, or an empty text."""
    for member in sorted(members, key=by_place):
        if member.spent and member.spent.transfer:
            return f": {member.worker} has moved {member.spent.transfer[:most]}"
    return ""


def named(members: Iterable[Member], most: int = 4) -> str:
    """Return the names of the first ``most`` members in rank order, and how many more there are."""
    ordered = sorted(members, key=by_place)
    names = ", ".join(m.worker for m in ordered[:most])
    return names + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
