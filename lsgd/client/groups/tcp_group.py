"""A Group over the connections of a mesh."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lsgd.client.groups.base import Members, Traffic, WorkerGroup
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.staging import Copier, Staged, copier_of
from lsgd.client.groups.stream import Operation, TensorStream
from lsgd.collectives.composed import PIECE_NBYTES
from lsgd.collectives.group import Transfer

WHOLE_NBYTES = 64 << 10
"""Up to this size, an all-reduce sends each member's whole tensor to all others: one latency instead of two."""

RELAYED_NBYTES, RELAYED_PIECES = 64 << 10, 8
"""A broadcast of at least this size per member is passed on from member to member, in this many pieces per member or
more. So the last member gets it an eighth later than the second at most."""


class _Started(Transfer):
    """Messages under way. Their memory is in use until ``release``: they may be sent again from it."""

    def __init__(self, wait: Callable[[], None], release: Callable[[], None]) -> None:
        super().__init__(wait)
        self.release = release


class TcpGroup(WorkerGroup):
    """A Group (:class:`lsgd.collectives.group.Group`) on a :class:`~lsgd.client.groups.mesh.Mesh`.

    Subgroups use the same connections. Tensors on a GPU pass through pinned host memory
    (:mod:`lsgd.client.groups.staging`).

    Args:
        timeout_s: how long a verb waits for a member that moves no byte.
        copiers: returns what copies between a device and host memory; None if the device is the host.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        mesh: Mesh,
        members: Members,
        timeout_s: float,
        traffic: Traffic | None = None,
        copiers: Callable[[torch.device], Copier | None] = copier_of,
    ) -> None:
        super().__init__(members, timeout_s, traffic)
        self.transport = mesh.transport
        self._mesh = mesh
        self._copiers = copiers
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]

    def _group_of(self, members: Members) -> "TcpGroup":
        return TcpGroup(self._mesh, members, self._timeout_s, self._traffic, self._copiers)

    def progress(self) -> str:
        """Return how far the slowest transfer is, if it takes long; safe from any thread."""
        return self._mesh.progress()

    def cut(self) -> None:
        """Make everything that waits in this group or its subgroups fail at once; safe from any thread."""
        self._mesh.cut()

    def close(self) -> None:
        """Close the connections, also of subgroups, so that peers waiting for this member fail at once."""
        self._mesh.close()

    # -- the verbs ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members, in the order of their ranks.

        A small tensor goes to all members whole. For each piece of a larger one, every member sums its own chunk; the
        transfer's ``wait`` sends the sum to the others.
        """
        if self.size == 1:
            return Transfer(lambda: None)
        whole = tensor.nbytes * (self.size - 1) <= WHOLE_NBYTES
        staged = self._staged(tensor)
        staged.fill()
        begun = []
        for index in range(len(staged.pieces)):
            piece = staged.piece(index)
            chunks = [piece] * self.size if whole else piece.tensor_split(self.size)
            begun.append((chunks, self._begin_sum(chunks)))

        def wait() -> None:
            ended = []
            for chunks, summed in begun:
                summed.wait()
                sends = {} if whole else dict.fromkeys(self._others, chunks[self.rank])
                ended.append(self._start("all_reduce", sends, {rank: chunks[rank] for rank in sends}))
            _land(ended, [staged])

        return Transfer(wait)

    def _begin_sum(self, chunks: Sequence[Tensor]) -> Transfer:
        """Begin to send each other member its chunk, and to replace this member's chunk by its sum over all members."""
        own = chunks[self.rank]
        parts = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        sends, receives = ({rank: some[rank] for rank in self._others} for some in (chunks, parts))
        first = self._start("all_reduce", sends, receives)

        def wait() -> None:
            first.wait()
            first.release()
            total = parts[0]
            for part in parts[1:]:
                total += part
            if total is not own:
                own.copy_(total)

        return Transfer(wait)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``.

        A large tensor goes from each member to the next, piece by piece (:func:`relayed_numels`), so it leaves each
        node once.
        """
        if self.size == 1:
            return
        what, taking = f"broadcast from {self._members.names[source]}", self.rank != source
        if self.size == 2 or tensor.nbytes < self.size * RELAYED_NBYTES:
            sends = {} if taking else dict.fromkeys(self._others, tensor)
            self._begin(what, sends, {source: tensor} if taking else {}).wait()
        else:
            numels = relayed_numels(tensor.numel(), tensor.itemsize, self.size)
            self._pass_on(what, self._staged(tensor, numels), source)

    def _pass_on(self, what: str, staged: Staged, source: int) -> None:
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        received = []
        if self.rank == source:
            staged.fill()
        else:
            received = [self._start(what, {}, {before: piece}) for piece in staged.pieces]
        sent = []
        for index in range(len(staged.pieces)):
            if received:
                received[index].wait()
            if after != source:
                sent.append(self._start(what, {after: staged.piece(index)}, {}))
            if received:
                staged.drain(index)
        for one in sent:
            one.wait()
        for one in [*received, *sent]:
            one.release()
        staged.finish()

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        peers = ", ".join(self._members.names[rank] for rank in sorted({*sends, *receives}))
        return self._begin(f"exchange with {peers}", sends, receives)

    def _begin(self, what: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        """Begin to send and receive tensors, piece by piece."""
        staged = {id(tensor): self._staged(tensor) for tensor in [*sends.values(), *receives.values()]}
        leaving = {rank: staged[id(tensor)] for rank, tensor in sends.items()}
        arriving = {rank: staged[id(tensor)] for rank, tensor in receives.items()}
        for one in {*leaving.values()}:
            one.fill()
        count = max((len(one.pieces) for one in staged.values()), default=0)
        under_way = [self._start(what, _pieces(leaving, index), _pieces(arriving, index)) for index in range(count)]

        return Transfer(lambda: _land(under_way, arriving.values()))

    def _staged(self, tensor: Tensor, numels: Sequence[int] = ()) -> Staged:
        return Staged(tensor, self._copiers(tensor.device), numels)

    def _start(self, what: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> _Started:
        """Begin to send and receive tensors in host memory; empty ones do not travel."""
        started_at, operation = time.monotonic(), Operation()
        self._traffic.add(_nbytes(sends), _nbytes(receives))
        with self._failing(what, started_at):
            puts = [*self._puts(self._mesh.from_, receives), *self._puts(self._mesh.to, sends)]
            operation.start(puts, f"{self._members.name} {what.partition(' ')[0]}")

        def wait() -> None:
            with self._failing(what, started_at):
                operation.wait(self._timeout_s, partial(self._mesh.tell, what))

        return _Started(wait, operation.release)

    def _puts(
        self, stream_of: Callable[[int], TensorStream], tensors: Mapping[int, Tensor]
    ) -> list[tuple[TensorStream, memoryview]]:
        ranks = self._members.ranks
        return [(stream_of(ranks[rank]), _bytes_of(tensor)) for rank, tensor in tensors.items() if tensor.numel()]


def relayed_numels(numel: int, itemsize: int, size: int) -> list[int]:
    """Return in how many elements at a time three or more members pass a tensor on: the same on all of them.

    A member passes a piece on when it is there, and those after it hear nothing meanwhile. So no piece is longer than
    others are (:data:`~lsgd.collectives.composed.PIECE_NBYTES`). And the first ones become longer step by step: the
    last member waits for a piece, while the others carry it, only as long as what it is longer by takes them all.

    Args:
        numel: number of elements in the tensor.
        itemsize: bytes of each.
        size: number of members.
    """
    nbytes = min(max(numel * itemsize // (RELAYED_PIECES * size), RELAYED_NBYTES), PIECE_NBYTES)
    longest, step = nbytes // itemsize, max(PIECE_NBYTES // (size - 2), RELAYED_NBYTES) // itemsize
    numels, left = list[int](), numel
    while left:
        numels.append(min(left, longest, step * (len(numels) + 1)))
        left -= numels[-1]
    return numels


def _land(under_way: Sequence[_Started], arriving: Collection[Staged]) -> None:
    """Wait for transfers, each of one piece, and copy what arrives to its tensors."""
    for index, transfer in enumerate(under_way):
        transfer.wait()
        for one in arriving:
            one.drain(index)
    for transfer in under_way:
        transfer.release()
    for one in arriving:
        one.finish()


def _pieces(tensors: Mapping[int, Staged], index: int) -> Mapping[int, Tensor]:
    """Return the piece with this index of each tensor that has one."""
    return {rank: staged.piece(index) for rank, staged in tensors.items() if index < len(staged.pieces)}


def _nbytes(tensors: Mapping[int, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
