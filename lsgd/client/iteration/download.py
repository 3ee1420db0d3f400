"""What a worker has of the run's model, and how it gets the rest: newcomers take it from a member, the source."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lsgd.algorithms.base import Algorithm, begun_with, clones, copy_all
from lsgd.client.checkpoint.file import Packed, from_bytes, to_bytes
from lsgd.client.groups.base import WorkerGroup
from lsgd.client.iteration.following import Following
from lsgd.client.iteration.handover import Handover, Inventory
from lsgd.client.iteration.replica import Replica
from lsgd.errors import LsgdError
from lsgd.protocol.messages import Round


class Has(enum.IntEnum):
    """What of the run's model a process has, as the servers count it for its worker."""

    NOTHING = 0
    """No round of the run has been completed with it: it is this worker's own, or another's that it has just taken."""
    PARTS = 1
    """It downloads beside the training of the others."""
    OLDER = 2
    """It has missed rounds, has the common model now, and comes back with what it has learned since."""
    WHOLE = 3
    """It has completed a round with it."""


class Download:
    """Gives a worker the run's model, or gives newcomers its own.

    Attributes:
        has: what of the run's model this process has.
    """

    def __init__(self, replica: Replica) -> None:
        self.has = Has.NOTHING
        self._replica = replica
        self._change: list[Tensor] = []  # with which it comes back
        self._kept: tuple[Algorithm, list[Tensor]] | None = None  # what it has had before the parts, and with which
        self._handover: Handover | None = None
        self._following: Following | None = None
        self._late: frozenset[int] = frozenset()  # newcomers that take part although they lack parts of the model

    def begin(self, group: WorkerGroup, order: Round, *, fresh: bool) -> bool:
        """Take up the round's algorithm, and give newcomers the source's model; return whether it begins anew.

        With a ``fresh`` group it always does.

        Raises:
            ExchangeError: it failed.
        """
        if fresh:
            self._following, self._late = None, frozenset()
        followed = self._following is not None and self._following.meet()  # what is sent beside the training has come
        anew = self._replica.current.take_up(order.algorithm) or fresh or not self._late.issuperset(order.new)
        followed = followed or order.final or not self._replica.algorithm.can_be_followed
        if anew or (self._following is not None and followed):
            with self._replica.copies.following():
                self._hand_over(group, order)
        if anew:
            self._replica.algorithm.reset(self._replica.flat.buffers, group, order)
        return anew

    def proceed(self) -> None:
        """After a round, send newcomers what they lack."""
        if self.has is not Has.PARTS:
            self.has = Has.WHOLE
        if self._following is not None:
            self._following.proceed()

    def has_own(self, rank: int, order: Round) -> bool:
        """Whether the model has something of this worker's own, and is no other's that it has taken in this round."""
        return rank not in order.new or self.has is Has.OLDER

    def progress(self, group: WorkerGroup | None) -> str:
        """Return how far a transfer of a group is that takes long; empty: none does. Safe from any thread."""
        handover, following = self._handover, self._following
        if handover is not None:
            return handover.progress()
        own = "" if group is None else group.progress()
        if group is None or following is None or (own and not following.beside):
            return own
        return following.progress()

    def _hand_over(self, group: WorkerGroup, order: Round) -> None:
        """Give newcomers the source's model and all members the shared state; newcomers may get the rest later."""
        replica, pause_s = self._replica, self._replica.run.join_pause_s
        taking = group.rank in order.new and group.rank != order.source
        if order.new:
            self._check_copies(group, order)
        if self.has is Has.PARTS and not taking:
            self._restore()
        if taking and self.has >= Has.OLDER:
            self._change = self._learned()
        states, beside = self._states(group, order), self._beside(group, order)
        # At the start of a run all wait, so that all train from the start.
        follows = bool(order.new) and order.exchanges > 0 and not (order.final or states)
        follows = follows and replica.algorithm.can_be_followed
        handover = self._handover = Handover(group, order)
        try:
            own = Inventory(*replica.newcomers_parts(states, any_=bool(order.new)))
            keep = self._keep if taking and follows else None
            left = handover.run(own, pause_s / 2 if follows else math.inf, keep)
        finally:
            self._handover = None
        self._following = Following(handover, own, left, pause_s) if left else None
        self._late = frozenset(order.new) if follows else frozenset()  # of an island, others may still lack parts
        if taking:
            replica.extras.take_shared(beside)
            if left:
                self.has = Has.PARTS
            else:
                self._take_over(states)

    def _keep(self) -> None:
        """Keep a copy of what this worker has, until it has the run's model; one that exists stays."""
        if self._kept is None:
            self._kept = self._replica.algorithm, clones(self._replica.own())

    def _restore(self) -> None:
        """Go back to what it has had, since those who have the model are gone, unless the algorithm is another one."""
        if self._kept is not None and self._kept[0] is self._replica.algorithm:
            copy_all(self._replica.own(), self._kept[1])
        self._kept, self._change, self.has = None, [], Has.NOTHING

    def _learned(self) -> list[Tensor]:
        """Return what it has learned since it took over the model that all share; empty if the algorithm has none."""
        common = zip(self._replica.flat.buffers, self._replica.algorithm.common_model(), strict=False)
        return [torch.sub(x.to(c.dtype, copy=True), begun_with(c, x.dtype)) for x, c in common]

    def _take_over(self, states: Sequence[Tensor]) -> None:
        """Begin with the common model, if there is one, and what this worker comes back with; take over the states."""
        self._kept = None
        changes, self._change = self._change, []
        self.has = Has.OLDER if changes else Has.NOTHING
        common = self._replica.algorithm.common_model()
        for index, (x, c) in enumerate(zip(self._replica.flat.buffers, common, strict=False)):
            x.copy_(changes[index].add_(begun_with(c, x.dtype)) if changes else c)
        self._replica.take_states(states)

    def _check_copies(self, group: WorkerGroup, order: Round) -> None:
        """Raise a LsgdError if this worker's optimizers keep other copies of the weights than the source's."""
        own = torch.tensor([len(self._replica.copies.places())], device=group.device)
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
        replica, takers = self._replica, {order.source, *order.new}
        if not order.new or not (replica.run.sync_optimizer or replica.algorithm.settings.schedule().identical):
            return []
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return [_as_long_as(order.source, replica.optimizer_bytes() if group.rank in takers else nothing, group)]

    def _beside(self, group: WorkerGroup, order: Round) -> Packed:
        """Return what newcomers take from the source beside the model: states of schedulers, rates, and so on."""
        if not order.new:
            return Packed({}, "{}")
        sent = []
        for data in to_bytes(self._replica.extras.shared()):
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
