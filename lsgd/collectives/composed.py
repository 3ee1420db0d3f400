"""A Group composed of two: one inside each node, such as NCCL's, and one of all members, for what leaves a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Protocol

from lsgd.collectives.group import Group, Transfer
from lsgd.collectives.topology import first_ranks, node_index, node_ranks
from lsgd.lazy import Tensor

PIECE_NBYTES = 4 << 20
"""A tensor travels in pieces of about this size: they are in different stages, or copied and sent, at the same time."""


class Composed(Group):
    """Sends tensors inside a node by one group, and between nodes by another.

    Operations of all members have three stages: first inside each node, then between the nodes' first members, then
    inside again. So what all need enters a node once, and the bits are the same on all members. Messages between two
    members go directly, by the group that reaches both.

    ``node`` is the group inside, ``across`` and other subgroups are those of the group of all.

    Args:
        inside: the members of this member's node.
        between: all members.
    """

    def __init__(self, inside: Group, between: Group) -> None:
        self.rank, self.size, self.node_sizes = between.rank, between.size, between.node_sizes
        self._inside = inside
        self._between = between
        self._homes = [*chain.from_iterable(map(repeat, range(len(self.node_sizes)), self.node_sizes))]
        self._own = node_ranks(self.rank, self.node_sizes)
        self._under_way: list[_Stages] = []

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> Group:
        return self._inside if one_node else self._between._subgroup(kind, ranks, one_node=False)

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members: of each node, then of the nodes."""
        return self._begin(_Sum(self, tensor))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        """Begin to write each member's ``tensor`` to ``outputs[rank]``; it enters each other node once."""
        return self._begin(_Collection(self, outputs, tensor))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``: on its node first, and on the others from their first members."""
        home, across = self._homes[source], self.across
        here = source in self._own
        for piece in pieces_of(tensor):
            if here:
                self._inside.broadcast(piece, source - self._own.start)
            if across is not None:
                across.broadcast(piece, home)
            if not here:
                self._inside.broadcast(piece, 0)

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        return self._begin(_Messages(self._inside, self._between, self._own, sends, receives))

    def _begin(self, stages: _Stages) -> Transfer:
        """Add to what is under way, after all of that has left the node; members that begin the same do the same."""
        self._cross_all()
        stages.enter()
        self._under_way.append(stages)

        def wait() -> None:
            self._cross_all()
            self._under_way.remove(stages)
            stages.land()

        return Transfer(wait)

    def _cross_all(self) -> None:
        for stages in self._under_way:
            stages.cross()


class _Stages(Protocol):
    """An operation under way. Nothing is in flight inside the node while another one lands."""

    def enter(self) -> None:
        """Begin inside the node."""

    def cross(self) -> None:
        """Wait for that, and begin between nodes; a second call does nothing."""

    def land(self) -> None:
        """Wait for that, and pass on inside the node what came from others."""


class _Messages:
    """Messages between two members each; those between nodes begin at once."""

    def __init__(
        self, inside: Group, between: Group, own: range, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        self._inside, self._between = inside, between
        self._near = [{rank - own.start: x for rank, x in some.items() if rank in own} for some in (sends, receives)]
        self._far = [{rank: x for rank, x in some.items() if rank not in own} for some in (sends, receives)]
        self._entered: Transfer | None = None
        self._crossing: Transfer | None = None

    def enter(self) -> None:
        # The first call builds a group, so all members make it, with or without a peer inside.
        self._entered = self._inside._begin_exchange(*self._near)
        self._crossing = self._between._begin_exchange(*self._far)

    def cross(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.wait()

    def land(self) -> None:
        assert self._crossing is not None
        self._crossing.wait()


class _Sum:
    def __init__(self, group: Composed, tensor: Tensor) -> None:
        self._node, self._across = group.node, group.across
        self._pieces = pieces_of(tensor)
        self._entered: list[Transfer] = []
        self._crossing: list[Transfer] = []

    def enter(self) -> None:
        self._entered = [self._node.all_reduce(piece) for piece in self._pieces]

    def cross(self) -> None:
        entered, self._entered = self._entered, []
        for transfer, piece in zip(entered, self._pieces, strict=False):
            transfer.wait()
            if self._across is not None:
                self._crossing.append(self._across.all_reduce(piece))

    def land(self) -> None:
        for index, piece in enumerate(self._pieces):
            if self._across is not None:
                self._crossing[index].wait()
            self._node.broadcast(piece, 0)


class _Collection:
    def __init__(self, group: Composed, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self._node, self._across = group.node, group.across
        self._outputs, self._tensor = outputs, tensor
        self._sizes, self._firsts = group.node_sizes, first_ranks(group.node_sizes)
        self._me = node_index(group.rank, group.node_sizes)
        self._entered: Transfer | None = None
        self._crossing: list[Transfer] = []

    def enter(self) -> None:
        self._entered = self._node.all_gather(self._of(self._me), self._tensor)

    def cross(self) -> None:
        entered, self._entered = self._entered, None
        if entered is None:
            return
        entered.wait()
        if self._across is not None:
            self._crossing = [self._exchange(self._across, index) for index in range(max(self._sizes))]

    def _exchange(self, across: Group, index: int) -> Transfer:
        """Begin to exchange what the members with this index on their nodes have."""
        there = {node: first + index for node, first in enumerate(self._firsts) if index < self._sizes[node]}
        own = there.pop(self._me, None)
        sends = {node: self._outputs[own] for node in range(len(self._sizes)) if own is not None and node != self._me}
        return across._begin_exchange(sends, {node: self._outputs[rank] for node, rank in there.items()})

    def land(self) -> None:
        for transfer in self._crossing:
            transfer.wait()
        for node in range(len(self._sizes)):
            for output in self._of(node) if node != self._me else ():
                self._node.broadcast(output, 0)

    def _of(self, node: int) -> Sequence[Tensor]:
        return self._outputs[self._firsts[node] :][: self._sizes[node]]


def pieces_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return a contiguous tensor in pieces; their number depends only on its size."""
    return tensor.view(-1).tensor_split(max(1, tensor.nbytes // PIECE_NBYTES))
