"""A Group over the connections of a mesh."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lsgd.client.groups.base import Members, Traffic, WorkerGroup, from_host, to_host
from lsgd.client.groups.tcp.line import Line
from lsgd.client.groups.tcp.mesh import Mesh
from lsgd.client.groups.tcp.work import Work
from lsgd.collectives.group import Transfer
from lsgd.collectives.point_to_point import PIECE_NBYTES, RELAYED_PIECES
from lsgd.errors import ExchangeError

WHOLE_NBYTES = 64 << 10
"""An all-reduce sends each member's whole tensor to all others, if that is no more: one latency instead of two."""

_NOTHING = Transfer(lambda: None)


class TcpGroup(WorkerGroup):
    """A Group (:class:`lsgd.collectives.group.Group`) on a :class:`~lsgd.client.groups.tcp.mesh.Mesh`.

    Subgroups use the same connections. Tensors on a GPU go by way of pinned host memory.

    Args:
        mesh: the lines between the members of the generation.
        members: its members.
        timeout_s: deadline of each verb.
        traffic: counts what this member sends and receives.
    """

    device = torch.device("cpu")

    def __init__(self, mesh: Mesh, members: Members, timeout_s: float, traffic: Traffic | None = None) -> None:
        super().__init__(members, timeout_s, traffic)
        self.transport = mesh.transport
        self._mesh = mesh
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]

    def _group_of(self, members: Members) -> "TcpGroup":
        return TcpGroup(self._mesh, members, self._timeout_s, self._traffic)

    def cut(self) -> None:
        """Make whatever waits in this group or its subgroups fail at once; may be called by another thread."""
        self._mesh.cut()

    def close(self) -> None:
        """Close the connections, those of its subgroups too, so that peers which wait for this member fail at once."""
        self._mesh.close()

    # -- the verbs ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members, which is made in the order of their ranks.

        A small one goes to all members whole. Of a larger one each member sums up its own chunk; the transfer's wait
        sends that to the others.
        """
        if self.size == 1:
            return _NOTHING
        host = to_host(tensor)
        flat = host.view(-1)
        whole = host.nbytes * (self.size - 1) <= WHOLE_NBYTES
        bounds = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        chunks = [flat if whole else flat[start:end] for start, end in pairwise(bounds)]
        own = chunks[self.rank]
        parts = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        first = self._start(
            "all_reduce", {rank: chunks[rank] for rank in self._others}, {rank: parts[rank] for rank in self._others}
        )

        def wait() -> None:
            first.wait()
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            own.copy_(total)
            if not whole:
                sends, receives = dict.fromkeys(self._others, own), {rank: chunks[rank] for rank in self._others}
                self._start("all_reduce", sends, receives).wait()
            from_host(host, tensor)

        return Transfer(wait)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``.

        A large one goes from each member to the next, piece by piece, and so leaves each node once.
        """
        if self.size == 1:
            return
        what, taking = f"broadcast from {self._names[source]}", self.rank != source
        host = to_host(tensor, copy=not taking)
        if self.size == 2 or host.nbytes < self.size * PIECE_NBYTES:
            sends = {} if taking else dict.fromkeys(self._others, host)
            self._start(what, sends, {source: host} if taking else {}).wait()
        else:
            self._pass_on(what, host, source)
        if taking:
            from_host(host, tensor)

    def _pass_on(self, what: str, tensor: Tensor, source: int) -> None:
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        pieces = tensor.view(-1).chunk(min(RELAYED_PIECES * self.size, tensor.nbytes // PIECE_NBYTES))
        received = [self._start(what, {}, {before: piece}) for piece in pieces if self.rank != source]
        sent = []
        for number, piece in enumerate(pieces):
            if received:
                received[number].wait()
            if after != source:
                sent.append(self._start(what, {after: piece}, {}))
        for one in sent:
            one.wait()

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        peers = ", ".join(self._names[rank] for rank in sorted({*sends, *receives}))
        outgoing = {rank: to_host(tensor) for rank, tensor in sends.items()}
        incoming = {rank: to_host(tensor, copy=False) for rank, tensor in receives.items()}
        under_way = self._start(f"exchange with {peers}", outgoing, incoming)

        def wait() -> None:
            under_way.wait()
            for rank, tensor in receives.items():
                from_host(incoming[rank], tensor)

        return Transfer(wait)

    def _start(self, what: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        """Begin to send and receive tensors in host memory; empty ones do not travel."""
        if self.size == 1:
            return _NOTHING
        started_at, work = time.monotonic(), Work()
        self._traffic.add(_nbytes(sends), _nbytes(receives))
        with self._failing(what, started_at):
            puts = [*self._puts(self._mesh.from_, receives), *self._puts(self._mesh.to, sends)]
            work.start(puts, f"{self._name} {what.partition(' ')[0]}")

        def wait() -> None:
            with self._failing(what, started_at):
                work.wait(started_at + self._timeout_s)

        return Transfer(wait)

    def _puts(self, line: Callable[[int], Line], tensors: Mapping[int, Tensor]) -> list[tuple[Line, memoryview]]:
        return [(line(self._ranks[rank]), _bytes_of(tensor)) for rank, tensor in tensors.items() if tensor.numel()]

    @contextmanager
    def _failing(self, what: str, started_at: float) -> Iterator[None]:
        """Have a failure end the group, as an ExchangeError."""
        try:
            yield
        except OSError as error:
            self._mesh.cut()
            waited_s = time.monotonic() - started_at
            raise ExchangeError(f"{what}: waited {waited_s:.1f} s, then gave up: {error}") from error


def _nbytes(tensors: Mapping[int, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
