"""A round in progress, what is known between rounds, and the process groups of a generation, in which rounds are.

:class:`ActiveRound` is the one in progress, in a state of :data:`TRANSITIONS`. Its :class:`Landing` says whether what
it exchanges lands in it or later. Between rounds a worker has its :class:`Seat` among the members, the numbers of its
:class:`LastRounds`, and the :class:`Groups` of the generation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from lsgd.algorithms.base import Commit
from lsgd.client.checkpoint.checkpoints import Snapshot
from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Traffic, WorkerGroup
from lsgd.client.groups.form import form
from lsgd.client.groups.mirror import mirrored
from lsgd.client.groups.reach import probe
from lsgd.client.iteration.replica import Look, Replica
from lsgd.errors import ExchangeError, LsgdError
from lsgd.protocol.messages import Generation, Round

logger = logging.getLogger("lsgd")


class State(Enum):
    """The state of a round, and what it means."""

    ORDERED = "the servers have ordered it"
    ENTERED = "its group is formed, its algorithm taken up, and newcomers have the model"
    WAITING = "it has begun, and the backward pass completes it"
    EXCHANGING = "gradients are exchanged"
    COMMITTED = "its result is in place, and the servers know"
    DROPPED = "nothing was exchanged, its group is gone, and the servers know"


TRANSITIONS: Mapping[State, tuple[State, ...]] = {
    State.ORDERED: (State.ENTERED, State.DROPPED),
    State.ENTERED: (State.WAITING, State.EXCHANGING, State.COMMITTED, State.DROPPED),
    State.WAITING: (State.EXCHANGING, State.COMMITTED, State.DROPPED),
    State.EXCHANGING: (State.COMMITTED, State.DROPPED),
    State.COMMITTED: (),
    State.DROPPED: (),
}
"""The states that may follow each state; docs/concepts/worker.md shows this table."""


@dataclass(eq=False)
class ActiveRound:
    """A round in progress on one worker.

    Attributes:
        snapshot: state to save when the round is committed.
        redo: whether it exchanges the gradients of a backward pass that has ended.
        looks: of an island's processes at the model, ahead of the round; empty: they have not looked.
        group: members, once it is formed.
        fresh: whether the group is new.
        finite_model: whether the model that entered it is finite in all processes; None: nobody has looked.
        buffers: commit of the exchange of the model's buffers.
        finite: whether the exchanged values are finite. If not, all members skip the step.
        skipped: whether that step has been skipped.
        lacking: whether this worker still lacks parts of the run's model, so that it cannot train.
        missing: for each bucket, the parameters without a gradient so far in this backward pass.
        launched: number of buckets whose exchange has begun, always in order.
    """

    order: Round
    snapshot: Snapshot | None = None
    state: State = State.ORDERED
    redo: bool = False
    looks: Sequence[Look] = ()
    group: WorkerGroup | None = None
    fresh: bool = False
    finite_model: Tensor | None = None
    buffers: Commit = field(default_factory=Commit)
    finite: bool = True
    skipped: bool = False
    lacking: bool = False
    missing: list[set[int]] = field(default_factory=list)
    launched: int = 0

    def looked_finite(self) -> bool | None:
        """Return whether the model is finite in all processes that have looked; None: nobody need know."""
        first, finite = self.looks[0], [look.finite for look in self.looks]
        return first.finite if first.prints or None in finite else all(finite)  # now all have the first one's model

    def enter(self, unknown: float, broken: float, lacking: float) -> None:
        """Note what the worker's processes have found in the model that enters.

        In how many nobody has looked, there is NaN, or parts of the run's model are lacking.
        """
        self.finite_model = None if unknown else torch.tensor(not broken, device="cpu")
        self.lacking = bool(lacking)

    @property
    def members(self) -> WorkerGroup:
        """The group; it is formed."""
        assert self.group is not None
        return self.group

    @property
    def model_is_broken(self) -> bool:
        """Whether the model that entered it is known not to be finite; may wait for the device."""
        return self.finite_model is not None and not self.finite_model

    def to(self, state: State) -> None:
        """Change to another state; raise a LsgdError if the table has no such transition."""
        if state not in TRANSITIONS[self.state]:
            raise LsgdError(
                f"round {self.order.id} is {self.state.name} ({self.state.value}): it cannot become {state.name}"
            )
        self.state = state

    @property
    def pending(self) -> bool:
        """Whether the backward pass has yet to complete it."""
        return self.state in (State.WAITING, State.EXCHANGING)


class Seat(NamedTuple):
    """A worker's seat among the members of a generation.

    Attributes:
        rank: of this worker.
        world_size: how many members there are.
        part: this worker's part of the data, and how many there are; those who only pause keep theirs.
    """

    rank: int
    world_size: int
    part: tuple[int, int]

    @classmethod
    def of(cls, worker: str, generation: Generation) -> Seat:
        """Return the seat of a member with this name."""
        rank = generation.members.index(worker)
        return cls(rank, len(generation.members), generation.part_of(rank))


@dataclass(eq=False)
class LastRounds:
    """The last rounds of a worker.

    Attributes:
        committed, dropped: numbers of the last committed and the last dropped one; 0: none.
        count: of the run's iterations, as of the last committed global one.
        done: this worker's iterations, as of that.
    """

    committed: int = 0
    dropped: int = 0
    count: int = 0
    done: int = 0

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of the last committed and the last dropped one."""
        return self.committed, self.dropped

    def commit(self, order: Round, done: int) -> None:
        """Note that a round is committed, after ``done`` iterations of this worker."""
        self.committed = order.id
        if order.scope == "global":
            self.count, self.done = order.count, done


class Landing:
    """What a round exchanges: it lands in the round, or in a later step if the algorithm has a delay."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._later: ActiveRound | None = None  # the last round, if what it exchanges lands later
        self._seconds = 0.0  # that the last one took, until the servers hear it

    def of(self, active: ActiveRound, commit: Commit | None) -> Commit:
        """Return what a round commits of its exchange; None: that lands later."""
        self._later = active if commit is None else None
        return Commit() if commit is None else self._timed(commit, active.order)

    def late(self, commit: Commit) -> Commit:
        """Return the commit of a transfer that has arrived, from an earlier round."""
        later, self._later = self._later, None
        known = later is not None and not later.order.new  # with newcomers there may be nothing to exchange
        return self._timed(commit, later.order) if later is not None and known else commit

    def take_s(self) -> float:
        """Return how many seconds the last one took, once; 0: there is none since."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, commit: Commit, order: Round) -> Commit:
        """Return a commit that also notes how long its transfer took."""

        def change(*sums: float) -> None:
            commit.change(*sums)
            if order.scope == "global":
                self._seconds = self._replica.algorithm.transfer_s

        return Commit(change, commit.judged)


@dataclass(eq=False)
class Groups:
    """Forms the process groups of generations, and keeps those of the current one.

    Attributes:
        generation: current group's; None: there is no group.
        current: that group.
        missed: pairs of nodes of which the first cannot dial the second, for the next report to the servers.
    """

    membership: Membership
    traffic: Traffic = field(default_factory=Traffic)
    generation: Generation | None = None
    missed: tuple[int, ...] | None = None
    current: WorkerGroup | None = None

    def __post_init__(self) -> None:
        self.membership.channel.endings.when_over = self._cut

    def whole(self, order: Round) -> Round:
        """Return an order with its members' names, which the servers omit if this worker knows them."""
        generation = self.generation
        if generation is None or order.generation.indices or order.generation.number != generation.number:
            return order
        return replace(order, generation=generation)

    def leave(self, *, cut: bool = False) -> None:
        """Drop the process groups, so that members waiting for this worker fail at once; ``cut``: also an exchange."""
        if self.current is not None:
            if cut:
                self.current.cut()
            self.current.close()
        self.current = self.generation = None

    def _cut(self, number: int) -> None:
        """Abort the exchanges of a generation that is over, as all up to this number are."""
        group, generation = self.current, self.generation
        if group is not None and generation is not None and generation.number <= number:
            group.cut()

    def group_of(self, order: Round) -> tuple[WorkerGroup, bool]:
        """Return the group of the order's generation, and whether it is new.

        Raises:
            ExchangeError: it failed; call :meth:`leave`.
        """
        generation, island = order.generation, self.membership.island
        if self.current is not None and self.generation == generation and island.size > 1:
            return self.current, False  # its processes hear one by one that it is over, and vote after the exchange
        self._check_lasts(generation)
        if not generation.indices:
            raise ExchangeError(f"this worker no longer knows the members of generation {generation.number}")
        if self.current is not None and self.generation == generation:
            return self.current, False
        self.leave()
        known = generation
        if order.probe and island.is_head:  # the others have the same links
            self.missed = probe(generation, self.membership)
            known = replace(generation, missed=self.missed)
        group = self.current = mirrored(known, self.membership, lambda: form(known, self.membership, self.traffic))
        self.generation = generation
        self._check_lasts(generation)  # a cut until now found no group
        logger.info(
            "generation %d: rank %d of %d, over %s on %s",
            *(generation.number, group.rank, group.size, group.transport, self.membership.address),
        )
        return group, True

    def _check_lasts(self, generation: Generation) -> None:
        if reason := self.membership.channel.endings.generation_over(generation.number):
            raise ExchangeError(f"generation {generation.number} is over: {reason}")
