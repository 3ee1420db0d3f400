"""A round in progress, and how a worker enters it: the generation's group, the algorithm, the model for newcomers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from lsgd.algorithms.base import Commit
from lsgd.client.checkpoint.checkpoints import Snapshot
from lsgd.client.checkpoint.file import Packed, from_bytes, to_bytes
from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Traffic, WorkerGroup
from lsgd.client.groups.form import form
from lsgd.client.groups.mirror import mirrored
from lsgd.client.groups.reach import probe
from lsgd.client.iteration.following import Following
from lsgd.client.iteration.handover import Handover, Inventory
from lsgd.client.iteration.replica import Replica
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
    group: WorkerGroup | None = None
    fresh: bool = False
    finite_model: Tensor | None = None
    buffers: Commit = field(default_factory=Commit)
    finite: bool = True
    skipped: bool = False
    lacking: bool = False
    missing: list[set[int]] = field(default_factory=list)
    launched: int = 0

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


@dataclass(eq=False)
class RoundEntry:
    """Enters rounds, and keeps the process groups of the current generation.

    Attributes:
        generation: current group's; None: there is no group.
        lacking: whether this process lacks parts of the run's model.
        missed: pairs of nodes of which the first cannot dial the second, for the next report to the servers.
    """

    membership: Membership
    replica: Replica
    traffic: Traffic = field(default_factory=Traffic)
    generation: Generation | None = None
    lacking: bool = False
    missed: tuple[int, ...] | None = None
    _trains: bool = False  # from the run's model on, with which it has completed a round
    _group: WorkerGroup | None = None
    _handover: Handover | None = None
    _following: Following | None = None
    _late: frozenset[int] = frozenset()  # newcomers that take part although they lack parts of the model

    def __post_init__(self) -> None:
        self.membership.channel.when_over = self._cut

    def whole(self, order: Round) -> Round:
        """Return an order with its members' names, which the servers omit if this worker knows them."""
        generation = self.generation
        if generation is None or order.generation.indices or order.generation.number != generation.number:
            return order
        return replace(order, generation=generation)

    def begin(self, group: WorkerGroup, order: Round, *, fresh: bool) -> bool:
        """Take up the round's algorithm, and give newcomers the source's model; return whether it begins anew.

        With a ``fresh`` group it always does.

        Raises:
            ExchangeError: it failed; call :meth:`leave`.
        """
        followed = self._following is not None and self._following.meet()  # what is sent beside the training has come
        anew = self.replica.take_up(order.algorithm) or fresh or not self._late.issuperset(order.new)
        followed = followed or order.final or not self.replica.algorithm.can_be_followed
        if anew or (self._following is not None and followed):
            with self.replica.copies.following():
                self._hand_over(group, order)
        if anew:
            self.replica.algorithm.reset(self.replica.flat.buffers, group, order)
        return anew

    def proceed(self) -> None:
        """After a round, send newcomers what they lack."""
        self._trains = not self.lacking
        if self._following is not None:
            self._following.proceed()

    def transfer(self) -> str:
        """Return how far a transfer is that takes long; an empty text: none does. Safe from any thread."""
        group, handover, following = self._group, self._handover, self._following
        if handover is not None:
            return handover.progress()
        own = "" if group is None else group.progress()
        if following is None or (own and not following.beside):
            return own
        return following.progress()

    def leave(self, *, cut: bool = False) -> None:
        """Drop the process groups, so that members waiting for this worker fail at once; ``cut``: also an exchange."""
        if self._group is not None:
            if cut:
                self._group.cut()
            self._group.close()
        self._group = self.generation = self._following = None
        self._late = frozenset()

    def _cut(self, number: int) -> None:
        """Abort the exchanges of a generation that is over, as all up to this number are."""
        group, generation = self._group, self.generation
        if group is not None and generation is not None and generation.number <= number:
            group.cut()

    def group_of(self, order: Round) -> tuple[WorkerGroup, bool]:
        """Return the group of the order's generation, and whether it is new.

        Raises:
            ExchangeError: it failed; call :meth:`leave`.
        """
        generation, island = order.generation, self.membership.island
        if self._group is not None and self.generation == generation and island.size > 1:
            return self._group, False  # its processes hear one by one that it is over, and vote after the exchange
        self._check_lasts(generation)
        if not generation.indices:
            raise ExchangeError(f"this worker no longer knows the members of generation {generation.number}")
        if self._group is not None and self.generation == generation:
            return self._group, False
        self.leave()
        known = generation
        if order.probe and island.is_head:  # the others have the same links
            self.missed = probe(generation, self.membership)
            known = replace(generation, missed=self.missed)
        group = self._group = mirrored(known, self.membership, lambda: form(known, self.membership, self.traffic))
        self.generation = generation
        self._check_lasts(generation)  # a cut until now found no group
        logger.info(
            "generation %d: rank %d of %d, over %s on %s",
            *(generation.number, group.rank, group.size, group.transport, self.membership.address),
        )
        return group, True

    def _check_lasts(self, generation: Generation) -> None:
        if reason := self.membership.channel.generation_over(generation.number):
            raise ExchangeError(f"generation {generation.number} is over: {reason}")

    def _hand_over(self, group: WorkerGroup, order: Round) -> None:
        """Give newcomers the source's model and all members the shared state; newcomers may get the rest later."""
        replica, pause_s = self.replica, self.replica.run.join_pause_s
        taking = group.rank in order.new and group.rank != order.source
        if order.new:
            self._check_copies(group, order)
        if self.lacking and not taking:
            replica.restore()  # the others are gone, and this worker has its own model only
        if taking and self._trains:
            replica.keep_change()
        states, beside = self._states(group, order), self._beside(group, order)
        # At the start of a run all wait, so that all train from the start.
        follows = bool(order.new) and order.exchanges > 0 and not (order.final or states)
        follows = follows and replica.algorithm.can_be_followed
        keep = replica.keep if taking and follows else None
        handover = self._handover = Handover(group, order)
        try:
            own = Inventory(*replica.newcomers_parts(states, any_=bool(order.new)))
            left = handover.run(own, pause_s / 2 if follows else math.inf, keep)
        finally:
            self._handover = None
        self._following = Following(handover, own, left, pause_s) if left else None
        self._late = frozenset(order.new) if follows else frozenset()  # of an island, others may still lack parts
        self.lacking = taking and bool(left)
        if taking:
            replica.take_shared(beside)
        if taking and not left:
            replica.take_over(states)

    def _check_copies(self, group: WorkerGroup, order: Round) -> None:
        """Raise a LsgdError if this worker's optimizers keep other copies of the weights than the source's."""
        own = torch.tensor([len(self.replica.copies.places())], device=group.device)
        sources = own.clone()
        group.broadcast(sources, order.source)
        if int(own) != int(sources):
            raise LsgdError(
                f"this worker's optimizers keep copies of {int(own)} parameters beside the model, and those of "
                f"{order.generation.members[order.source]} of {int(sources)}, as schedule-free and Lookahead do: join "
                f"with the same optimizers on all workers"
            )

    def _states(self, group: WorkerGroup, order: Round) -> list[Tensor]:
        """Return the optimizers' states as bytes, as many as the source has; empty if newcomers do not take them."""
        replica, takers = self.replica, {order.source, *order.new}
        if not order.new or not (replica.run.sync_optimizer or replica.algorithm.settings.schedule().identical):
            return []
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return [_as_long_as(order.source, replica.optimizer_bytes() if group.rank in takers else nothing, group)]

    def _beside(self, group: WorkerGroup, order: Round) -> Packed:
        """Return what newcomers take from the source beside the model: states of schedulers, rates, and so on."""
        if not order.new:
            return Packed({}, "{}")
        sent = []
        for data in to_bytes(self.replica.shared()):
            row = torch.frombuffer(bytearray(data if isinstance(data, bytes) else data.encode()), dtype=torch.uint8)
            sent.append(_as_long_as(order.source, row, group))
            group.broadcast(sent[-1], order.source)
        tensors, rest = (row.numpy().tobytes() for row in sent)
        return from_bytes(tensors, rest.decode())


def _as_long_as(source: int, data: Tensor, group: WorkerGroup) -> Tensor:
    """Return bytes in a row as long as that of the source."""
    length = torch.tensor([len(data)], device=group.device)
    group.broadcast(length, source)
    row = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    row[: len(data)] = data[: len(row)]
    return row
