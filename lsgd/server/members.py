"""Who takes part: the coordinator's record of each worker, of each group, and of the current generation."""

import enum
import math
from dataclasses import dataclass, field

from lsgd.protocol.messages import Generation, Go, Join, Round, Stop

MAX_LEFT = 4096
"""How many workers that are gone are remembered."""


class Phase(enum.Enum):
    """Where a worker stands. HELD and BUSY together are *live*: rounds wait for those."""

    JOINED = "has joined and not asked yet"
    HELD = "its request has no answer yet"
    BUSY = "was answered, and is about its round and its iteration"
    LATE = "kept all others waiting, and was left out until its next request"
    CUT = "cannot be reached by others; its request has no answer until the link is tried again"
    PAUSED = "stepped aside until its next request"
    ENDED = "was told to stop, and has only to leave"


@dataclass(slots=True, eq=False)
class Member:
    """One incarnation of a worker, from its join to its leave.

    Args:
        join: its greeting.
        heard_at: when it last said anything, in seconds of the coordinator's clock.
        phase: where it stands; changed by :meth:`Roster.move` only.
        rank: in the current generation; -1 outside it.
        held_at: when its last request began to be held.
        granted: iterations granted to it and not yet reported done; of one that is LATE, and was not heard since the
            server was started again, as many as it may have made.
        synced: it has completed the last global round, so that it has the run's model.
        leaving: why its node is going away; empty as a rule.
        seq: number of its last request.
        answer: to that request; None while there is none.
        round: the round it was ordered into, until it completes it or the round fails.
        done: iterations it has reported.
        committed: the last round it has completed.
        loss: as it last reported it.
        met: number of the last generation of which it has completed a round, and so has the names.
        times_leader: rounds that it led.
        challenger: incarnation of another process that claims its name, and since when.
        silent: it was evicted because nothing was heard from it, so that its process may be alive all the same.
    """

    join: Join
    heard_at: float
    phase: Phase = Phase.JOINED
    rank: int = -1
    held_at: float = 0.0
    granted: int = 0
    synced: bool = False
    leaving: str = ""
    seq: int = 0
    answer: Go | Stop | None = None
    round: "OpenRound | None" = None
    done: int = 0
    committed: int = 0
    loss: float | None = None
    met: int = 0
    times_leader: int = 0
    challenger: tuple[int, float] = (0, 0.0)
    silent: bool = False

    @property
    def worker(self) -> str:
        """Its name."""
        return self.join.worker

    @property
    def place(self) -> tuple[int, int]:
        """Node and index: the order of ranks."""
        return (self.join.node, self.join.index)

    @property
    def held(self) -> bool:
        """Whether its request waits for an answer."""
        return self.phase is Phase.HELD

    @property
    def live(self) -> bool:
        """Whether rounds wait for it."""
        return self.phase is Phase.HELD or self.phase is Phase.BUSY

    @property
    def electable_loss(self) -> float:
        """Its loss, infinite where there is none or where it is not finite, so that it is never preferred."""
        return self.loss if self.loss is not None and math.isfinite(self.loss) else math.inf


@dataclass(slots=True, eq=False)
class Group:
    """The members of the generation on one node, and their queue of tokens.

    Args:
        node: index of the machine.
        index: the node's place among the generation's nodes.
        members: in rank order.
        tokens: iterations until the next local round; infinite where there are no local rounds.
        held: how many of the members are.
    """

    node: int
    index: int
    members: list[Member] = field(default_factory=list)
    tokens: float = 0.0
    held: int = 0


@dataclass(slots=True, eq=False)
class OpenRound:
    """A round whose answers have left, until all its members have completed it or one has failed."""

    round: Round
    waiting: set[Member]


class Roster:
    """The members of the run and of its current generation, with the counts that every decision needs.

    Attributes:
        members: by name.
        generation: the current one, or the last.
        groups: of the generation, by node.
        live: how many members are HELD or BUSY.
        held: how many are HELD.
        paused: how many are PAUSED.
        absent: how many of the generation's members are not live, those that are gone included.
        left: the last incarnation of those that are gone, by name; of the last :data:`MAX_LEFT`.
        made: iterations of the incarnations that are gone, by name; of the same ones.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.generation: Generation | None = None
        self.groups: dict[int, Group] = {}
        self.live = 0
        self.held = 0
        self.paused = 0
        self.absent = 0
        self.left: dict[str, Member] = {}
        self.made: dict[str, int] = {}

    def resume(self) -> None:
        """Make groups and counts fit the members and the generation, which were set from outside."""
        for rank, name in enumerate(self.generation.members if self.generation else ()):
            member = self.members.get(name)
            if member is None or member.rank != rank:  # gone: its place stays until the next generation
                member = self.left[name]
            node = member.join.node
            self.groups.setdefault(node, Group(node, len(self.groups))).members.append(member)
        self.live = sum(m.live for m in self.members.values())
        self.held = sum(m.held for m in self.members.values())
        self.paused = sum(m.phase is Phase.PAUSED for m in self.members.values())
        if self.generation is not None:
            here = sum(m.live and m.rank >= 0 for m in self.members.values())
            self.absent = len(self.generation.members) - here

    def add(self, member: Member) -> None:
        """Take in a worker that has joined."""
        self.members[member.worker] = member

    def remove(self, member: Member) -> None:
        """Let go of a member; its place in the generation stays, absent, until the next one."""
        self.move(member, Phase.ENDED)
        del self.members[member.worker]
        self.left.pop(member.worker, None)
        self.left[member.worker] = member
        self.made[member.worker] = self.made.get(member.worker, 0) + member.done
        if len(self.left) > MAX_LEFT:
            oldest = next(iter(self.left))
            del self.left[oldest], self.made[oldest]

    def restore(self, member: Member) -> None:
        """Take a member back that was removed, outside the generation."""
        del self.left[member.worker]
        self.made[member.worker] -= member.done
        member.rank, member.phase = -1, Phase.JOINED
        self.add(member)

    def holders(self) -> list[Member]:
        """Return the members that have the run's model and have not been told to stop."""
        return [m for m in self.members.values() if m.synced and m.phase is not Phase.ENDED]

    def move(self, member: Member, phase: Phase) -> None:
        """Change a member's phase, the only way to do so."""
        was_live, was_held = member.live, member.held
        self.paused += (phase is Phase.PAUSED) - (member.phase is Phase.PAUSED)
        member.phase = phase
        live, held = member.live - was_live, member.held - was_held
        self.live += live
        self.held += held
        if group := self.group_of(member):
            group.held += held
            self.absent -= live

    def group_of(self, member: Member) -> Group | None:
        """Return the member's group in the current generation, None outside it."""
        return self.groups[member.join.node] if member.rank >= 0 else None

    def begin_generation(self, members: list[Member]) -> Generation:
        """Make ``members``, all of them held and in rank order, the generation."""
        for member in self.members.values():
            member.rank = -1
        self.groups = {}
        self.absent = 0
        for rank, member in enumerate(members):
            member.rank = rank
            node = member.join.node
            group = self.groups.setdefault(node, Group(node, len(self.groups)))
            group.members.append(member)
            group.held += 1
        gpus = [m.join.gpu for m in members]
        self.generation = Generation.of(
            self.generation.number + 1 if self.generation else 1,
            [m.place for m in members],
            "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo",
        )
        return self.generation


def by_place(member: Member) -> tuple[int, int]:
    """Sort key: the order of ranks."""
    return member.place


def elect(members: list[Member]) -> Member:
    """Return the member with the lowest loss; of equal ones, and where nobody has a loss, the first in rank order."""
    return min(members, key=lambda m: (m.electable_loss, m.place))
