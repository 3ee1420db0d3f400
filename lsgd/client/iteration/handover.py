"""The model for newcomers and the shared state for all: nobody sends what the other has.

When a generation begins, the source's tensors are to be on all members: the shared state on each, the model on
newcomers. All cut them into chunks (:mod:`lsgd.client.iteration.chunks`) and compare digests:

1. Members gather a digest of their model and one of their shared state. If all are equal, nothing else travels.
2. The source broadcasts its chunks' digests, and members gather which of these chunks they have, wherever they are.
3. All compute the same routes. A chunk comes from a member that has it, on the own node if there is one, and is passed
   on from node to node, so that it leaves each node once. Meanwhile all meet every few seconds, so that those who wait
   know that something moves.
4. Each chunk that arrives must have the digest that was announced, and at the end all gather a digest of the result.
   Only then does anything change.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from lsgd.client.groups.base import WorkerGroup
from lsgd.client.groups.mesh import SHOWN_AFTER_S, TELL_EVERY_S
from lsgd.client.groups.stream import StreamProgress
from lsgd.client.iteration.chunks import CHUNK_NBYTES, DIGEST_NBYTES, chunks_of, digest_of, digests_of, root_of
from lsgd.client.iteration.packing import pack, unpack
from lsgd.errors import ExchangeError, ProtocolError
from lsgd.protocol.messages import Round

logger = logging.getLogger("lsgd")

SHORT_S, LONG_S = 1.0, 4.0
"""Members meet about as often while chunks travel, in seconds."""

PACKS_FROM_S = 0.15
"""Chunks travel in a code if a slot of up to a MiB takes longer than this: at 50 Mbit/s, coding takes what it saves."""

MARGIN_NBYTES = 4096
"""Most bytes by which the code of chunks may exceed twice their size."""


@dataclass(frozen=True)
class Hop:
    """A parcel's way from one rank to another: some chunks, by their numbers."""

    sender: int
    receiver: int
    parcel: tuple[int, ...]


Way = tuple[int, ...]
"""Ranks that pass a chunk on, each to the next; the first has it."""


def ways_of(has: Sequence[bool], needs: Sequence[bool], homes: Sequence[int], turn: int) -> tuple[Way, ...]:
    """Return how a chunk gets to all ranks that need and lack it.

    Args:
        has: whether each rank has the chunk; one does.
        needs: whether each rank needs it.
        homes: each rank's node, in increasing order.
        turn: number that chooses among several ranks that have it, so that all of them send.
    """
    holders = [rank for rank, here in enumerate(has) if here]
    lacking = [rank for rank, need in enumerate(needs) if need and not has[rank]]
    found, far = [], []
    for node in dict.fromkeys(homes[rank] for rank in lacking):
        near = [rank for rank in holders if homes[rank] == node]
        takers = [rank for rank in lacking if homes[rank] == node]
        if near:
            found.append((near[turn % len(near)], *takers))
        else:
            far += takers
    if far:
        first = holders[turn % len(holders)]
        found.append((first, *sorted(far, key=lambda rank: (rank < first, rank))))
    return tuple(found)


def parcels_of(ways: Mapping[int, tuple[Way, ...]], sizes: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return the chunks that travel, by their numbers: neighbors with the same ways together, if they are small."""
    parcels: list[tuple[int, ...]] = []
    for number in (number for number, each in ways.items() if each):
        last = parcels[-1] if parcels else ()
        if last and ways[last[0]] == ways[number] and sum(sizes[n] for n in (*last, number)) <= CHUNK_NBYTES:
            parcels[-1] = (*last, number)
        else:
            parcels.append((number,))
    return parcels


def slots_of(parcels: Iterable[tuple[int, ...]], ways: Mapping[int, tuple[Way, ...]]) -> list[list[Hop]]:
    """Return hops at the same time, one list after the other: in each, a rank sends at most one parcel."""
    slots: list[list[Hop]] = []
    free: dict[int, int] = {}  # the first slot in which a rank sends nothing
    for parcel in parcels:
        for way in ways[parcel[0]]:
            after = 0
            for sender, receiver in pairwise(way):
                slot = max(after, free.get(sender, 0))
                free[sender] = after = slot + 1
                slots += [[] for _ in range(slot + 1 - len(slots))]
                slots[slot].append(Hop(sender, receiver, parcel))
    return slots


class Inventory:
    """What this member has: its model, then the shared state.

    Args:
        model: tensors that newcomers take; empty if there are none.
        shared: tensors that all take.
    """

    def __init__(self, model: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        self._tensors = [*model, *shared]
        self._rows = [x.detach().contiguous() for x in self._tensors]
        self.first_shared = len(chunks_of(self._rows[: len(model)]))
        self.chunks = chunks_of(self._rows)
        self.digests = digests_of(self.chunks)

    def roots(self) -> bytes:
        """Return the digest of the model and that of the shared state."""
        return root_of(self.digests[: self.first_shared]) + root_of(self.digests[self.first_shared :])

    def nbytes(self, numbers: Iterable[int]) -> int:
        """Return the size of some chunks, by their numbers."""
        return sum(len(self.chunks[number].data) for number in numbers)

    def itemsize(self, number: int) -> int:
        """Return the size of a number in a chunk, in bytes."""
        return self.chunks[number].dtype.itemsize

    def differing(self, digests: Sequence[bytes], first: int) -> list[int]:
        """Return the numbers, from ``first`` on, of the chunks that differ from those of other digests."""
        return [number for number in range(first, len(digests)) if self.digests[number] != digests[number]]

    def look_again(self, numbers: Sequence[int]) -> None:
        """Compute the digests of some chunks anew."""
        for number, digest in zip(numbers, digests_of([self.chunks[number] for number in numbers]), strict=True):
            self.digests[number] = digest

    @torch.no_grad()
    def change(self, changes: Mapping[int, Tensor]) -> None:
        """Give chunks other bytes."""
        for number, data in changes.items():
            self.chunks[number].data.copy_(data)
        for tensor, row in zip(self._tensors, self._rows, strict=True):
            if tensor.data_ptr() != row.data_ptr():
                tensor.detach().copy_(row)


class Handover:
    """One hand-over, and how far it is; ``order`` names the source and the newcomers."""

    def __init__(self, group: WorkerGroup, order: Round) -> None:
        self._group, self._source = group, order.source
        self._new = frozenset(order.new) - {order.source}
        self._names, self._homes = order.generation.members, order.generation.homes
        self._moved_nbytes = self._all_nbytes = 0
        self._packs = False
        self._began_at = self._told_at = time.monotonic()

    def progress(self) -> str:
        """Return how far it is, once it has taken a while; safe from any thread."""
        now = self._progress()
        return str(now) if now.left_nbytes and now.seconds > SHOWN_AFTER_S else ""

    def run(self, own: Inventory) -> None:
        """Give the source's tensors to all who lack them.

        Raises:
            ExchangeError: it failed, and nothing has changed.
        """
        if self._group.size == 1 or self._agree(own):
            return
        digests = self._source_digests(own)
        held = self._move(own, digests)
        lacking = own.differing(digests, 0 if self._group.rank in self._new else own.first_shared)
        changes = {number: held[digests[number]].clone() for number in lacking}
        own.look_again([*{*range(len(digests))} - {*lacking}])
        for number in lacking:
            own.digests[number] = digests[number]
        if not self._agree(own):
            raise ExchangeError(
                f"members hold other bytes than {self._names[self._source]} after taking over from it: one of them "
                f"has announced others than it has"
            )
        own.change(changes)

    def _agree(self, own: Inventory) -> bool:
        """Return whether all have the source's shared state, and newcomers its model."""
        roots = self._gather(own.roots())
        model, shared = roots[self._source][:DIGEST_NBYTES], roots[self._source][DIGEST_NBYTES:]
        same_model = all(roots[rank][:DIGEST_NBYTES] == model for rank in self._new)
        return same_model and all(root[DIGEST_NBYTES:] == shared for root in roots)

    def _gather(self, data: bytes) -> list[bytes]:
        """Return what all members say, each as many bytes."""
        own = self._tensor(data)
        found = [torch.empty_like(own) for _ in range(self._group.size)]
        self._group.all_gather(found, own).wait()
        return [x.cpu().numpy().tobytes() for x in found]

    def _tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._group.device)

    def _source_digests(self, own: Inventory) -> list[bytes]:
        """Return the digests of the source's chunks."""
        table = self._tensor(b"".join(own.digests))
        self._group.broadcast(table, self._source)
        data = table.cpu().numpy().tobytes()
        return [data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)]

    def _move(self, own: Inventory, digests: Sequence[bytes]) -> dict[bytes, Tensor]:
        """Move chunks to all who need and lack them; return all bytes that this member has then, by digest."""
        held = {digest: chunk.data for digest, chunk in zip(own.digests, own.chunks, strict=True)}
        ways = self._ways(own, digests, held)
        sizes = {number: own.nbytes([number]) for number in ways}
        slots = slots_of(parcels_of(ways, sizes), ways)
        self._all_nbytes = sum(own.nbytes(hop.parcel) for hop in chain.from_iterable(slots))
        self._began_at = time.monotonic()
        done, count = 0, 1
        while done < len(slots):
            began_at = time.monotonic()
            for slot in slots[done : done + count]:
                self._carry(slot, own, digests, held)
            done += count
            count = self._meet(time.monotonic() - began_at, count)
        return held

    def _ways(
        self, own: Inventory, digests: Sequence[bytes], held: Mapping[bytes, Tensor]
    ) -> dict[int, tuple[Way, ...]]:
        """Return the ways of each chunk, by its number; equal bytes have one number."""
        numbers: dict[bytes, int] = {}
        for number, digest in enumerate(digests):
            numbers.setdefault(digest, number)
        has = self._gather(bytes(digest in held for digest in numbers))
        shared, ranks = {*digests[own.first_shared :]}, range(self._group.size)
        needs = {digest: [digest in shared or rank in self._new for rank in ranks] for digest in numbers}
        return {
            number: ways_of([bool(each[place]) for each in has], needs[digest], self._homes, number)
            for place, (digest, number) in enumerate(numbers.items())
        }

    def _carry(self, slot: Sequence[Hop], own: Inventory, digests: Sequence[bytes], held: dict[bytes, Tensor]) -> None:
        """Send and receive this member's parcels of a slot, and keep the chunks that have the announced digests."""
        sends = {
            hop.receiver: self._packed([(held[digests[number]], own.itemsize(number)) for number in hop.parcel])
            for hop in slot
            if hop.sender == self._group.rank
        }
        coming = {hop.sender: hop.parcel for hop in slot if hop.receiver == self._group.rank}
        received = self._exchange(sends, {sender: own.nbytes(parcel) for sender, parcel in coming.items()})
        for sender, parcel in coming.items():
            sizes = [(own.nbytes([number]), own.itemsize(number)) for number in parcel]
            for number, piece in zip(parcel, self._unpacked(received[sender], sizes), strict=True):
                if digest_of(piece, own.chunks[number].dtype) != digests[number]:
                    raise ExchangeError(f"{self._names[sender]} has sent other bytes of the model than announced")
                held[digests[number]] = piece
        self._moved_nbytes += sum(own.nbytes(hop.parcel) for hop in slot)

    def _exchange(self, sends: Mapping[int, Tensor], sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Send parcels, and return those received; ``sizes`` are theirs where they are not packed."""
        device, lengths = self._group.device, {}
        if not (sends or sizes):
            return {}
        if self._packs:
            said = {rank: torch.tensor([len(data)], device=device) for rank, data in sends.items()}
            lengths = {rank: torch.empty(1, dtype=torch.int64, device=device) for rank in sizes}
            self._group.exchange(said, lengths)
        received = {}
        for rank, nbytes in sizes.items():
            length = int(lengths[rank]) if lengths else nbytes
            if not 0 <= length <= 2 * nbytes + MARGIN_NBYTES:
                raise ExchangeError(f"{self._names[rank]} announces {length} bytes for chunks of {nbytes}")
            received[rank] = torch.empty(length, dtype=torch.uint8, device=device)
        self._group.exchange({rank: data.to(device) for rank, data in sends.items()}, received)
        return received

    def _packed(self, chunks: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return the bytes of chunks as they travel."""
        if not self._packs:
            return torch.cat([data.to(self._group.device) for data, _ in chunks])
        return self._tensor(b"".join(pack(data.cpu(), itemsize) for data, itemsize in chunks))

    def _unpacked(self, data: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return chunks, in host memory, of the given sizes in bytes of the whole and of a number."""
        if not self._packs:
            return list(torch.split(data.cpu(), [nbytes for nbytes, _ in sizes]))
        try:
            return list(unpack(data.cpu().numpy().tobytes(), sizes))
        except ProtocolError as error:
            raise ExchangeError(f"the model for newcomers: {error}") from None

    def _meet(self, seconds: float, count: int) -> int:
        """Wait for all members; return how many slots to carry out until the next time, from how long these took."""
        slowest = max(struct.unpack("<d", each)[0] for each in self._gather(struct.pack("<d", seconds)))
        if time.monotonic() - self._told_at > TELL_EVERY_S:
            self._told_at = time.monotonic()
            logger.info("the model for newcomers: %s", self._progress())
        self._packs = slowest / count > PACKS_FROM_S
        return 2 * count if slowest < SHORT_S else max(1, count // 2) if slowest > LONG_S else count

    def _progress(self) -> StreamProgress:
        peer = self._source if self._group.rank != self._source else min(self._new, default=self._source)
        seconds, left_nbytes = time.monotonic() - self._began_at, self._all_nbytes - self._moved_nbytes
        return StreamProgress(self._names[peer], seconds, self._moved_nbytes, left_nbytes)
