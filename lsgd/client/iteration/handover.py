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

Where newcomers can follow the shared state while they lack parts of it (:mod:`lsgd.client.iteration.following`), step 3
ends after a while, and the rest travels beside the training.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from lsgd.client.groups.base import WorkerGroup
from lsgd.client.groups.mesh import SHOWN_AFTER_S, TELL_EVERY_S
from lsgd.client.groups.stream import StreamProgress
from lsgd.client.iteration.chunks import chunks_of, digests_of
from lsgd.client.iteration.post import PACKS_FROM_S, Post
from lsgd.collectives.background import Background
from lsgd.digests import CHUNK_NBYTES, DIGEST_NBYTES, root_of
from lsgd.errors import ExchangeError
from lsgd.protocol.messages import Round

logger = logging.getLogger("lsgd")

SHORT_S, LONG_S = 1.0, 4.0
"""Members meet about as often while chunks travel, in seconds."""


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
        changing: tensors of the model that newcomers take and that change in every step.
        still: those that never change.
        shared: tensors that all take, and that change in rounds only.
    """

    def __init__(self, changing: Sequence[Tensor], still: Sequence[Tensor], shared: Sequence[Tensor]) -> None:
        self._tensors = [*changing, *still, *shared]
        self._rows = [x.detach().contiguous() for x in self._tensors]
        self.first_still = len(chunks_of(self._rows[: len(changing)]))
        self.first_shared = len(chunks_of(self._rows[: len(changing) + len(still)]))
        self.chunks = chunks_of(self._rows)
        self.digests = digests_of(self.chunks)

    @property
    def device(self) -> torch.device:
        """The tensors'."""
        return self.chunks[0].data.device if self.chunks else torch.device("cpu")

    def roots(self) -> bytes:
        """Return the digest of the model and that of the shared state."""
        return root_of(self.digests[: self.first_shared]) + root_of(self.digests[self.first_shared :])

    def nbytes(self, numbers: Iterable[int]) -> int:
        """Return the size of some chunks, by their numbers."""
        return sum(len(self.chunks[number].data) for number in numbers)

    def itemsize(self, number: int) -> int:
        """Return the size of a number in a chunk, in bytes."""
        return self.chunks[number].dtype.itemsize

    def look_again(self, numbers: Sequence[int]) -> None:
        """Compute the digests of some chunks anew."""
        for number, digest in zip(numbers, digests_of([self.chunks[number] for number in numbers]), strict=True):
            self.digests[number] = digest

    @torch.no_grad()
    def change(self, changes: Mapping[int, Tensor]) -> None:
        """Give chunks other bytes."""
        for number, data in changes.items():
            self.chunks[number].data.copy_(data)
        changed = {self.chunks[number].data.untyped_storage().data_ptr() for number in changes}
        for tensor, row in zip(self._tensors, self._rows, strict=True):
            if tensor.data_ptr() != row.data_ptr() and row.untyped_storage().data_ptr() in changed:
                tensor.detach().copy_(row)


@dataclass(frozen=True)
class Table:
    """What all know of the source's chunks.

    Args:
        digests: of each chunk, by its number.
        has: for each digest, whether each rank has these bytes.
    """

    digests: Sequence[bytes]
    has: Mapping[bytes, list[bool]]

    def note(self, slot: Sequence[Hop]) -> None:
        """Note that the hops of a slot are done."""
        for hop in slot:
            for number in hop.parcel:
                self.has[self.digests[number]][hop.receiver] = True

    def lacking(self, rank: int) -> list[int]:
        """Return the numbers of the chunks that a rank lacks."""
        return [number for number, digest in enumerate(self.digests) if not self.has[digest][rank]]


class Handover:
    """One hand-over, and how far it is; ``order`` names the source and the newcomers.

    Attributes:
        post: carries its chunks.
        nbytes_per_s: how fast they have moved; 0: none has.
    """

    def __init__(self, group: WorkerGroup, order: Round) -> None:
        self.post = Post(group, order.generation.members)
        self.source, self.new = order.source, frozenset(order.new) - {order.source}
        self.nbytes_per_s = 0.0
        self._me, self._ranks, self._homes = group.rank, range(group.size), order.generation.homes
        self._moved_nbytes = self._all_nbytes = 0
        self._began_at = self._moved_at = self._told_at = time.monotonic()

    def progress(self) -> str:
        """Return how far it is, once it has taken a while; safe from any thread."""
        now = self._progress()
        return str(now) if now.left_nbytes and now.seconds > SHOWN_AFTER_S else ""

    def run(
        self, own: Inventory, within_s: float = math.inf, meanwhile: Callable[[], None] | None = None
    ) -> Mapping[int, Sequence[int]]:
        """Give the source's tensors to all who lack them.

        With a limit, newcomers may still lack chunks afterwards, but none that change in every step.

        Args:
            own: what this member has.
            within_s: the limit.
            meanwhile: called in a thread, and done before anything changes.

        Returns:
            the numbers of those chunks, by rank.

        Raises:
            ExchangeError: it failed. Without a limit nothing has changed, and with one only in newcomers.
        """
        background = Background()
        if meanwhile is not None:
            background.start(meanwhile, own.device)
        try:
            changes, left = ({}, {}) if len(self._ranks) == 1 or self._agree(own) else self._take(own, within_s)
        finally:
            background.finish()
        own.change(changes)
        return left

    def _take(self, own: Inventory, within_s: float) -> tuple[dict[int, Tensor], dict[int, Sequence[int]]]:
        """Move chunks; return the bytes that replace this member's, by number, and what newcomers still lack."""
        held = {digest: chunk.data for digest, chunk in zip(own.digests, own.chunks, strict=True)}
        table = self._table(own, held)
        self._move(own, table, held, within_s)
        mine = range(0 if self._me in self.new else own.first_shared, len(table.digests))
        lacking = [number for number in mine if own.digests[number] != table.digests[number]]
        here = {*own.digests}  # whose memory may change
        found = {number: digest for number in lacking if (digest := table.digests[number]) in held}
        changes = {n: held[digest].clone() if digest in here else held[digest] for n, digest in found.items()}
        left: dict[int, Sequence[int]] = {n: numbers for n in sorted(self.new) if (numbers := table.lacking(n))}
        if not left:
            own.look_again([*{*range(len(table.digests))} - {*lacking}])
            for number in lacking:
                own.digests[number] = table.digests[number]
            if not self._agree(own):
                raise ExchangeError(
                    f"members hold other bytes than {self.post.names[self.source]} after taking over from it: one of "
                    f"them has announced others than it has"
                )
        return changes, left

    def _agree(self, own: Inventory) -> bool:
        """Return whether all have the source's shared state, and newcomers its model."""
        roots = self.post.gather(own.roots())
        model, shared = roots[self.source][:DIGEST_NBYTES], roots[self.source][DIGEST_NBYTES:]
        same_model = all(roots[rank][:DIGEST_NBYTES] == model for rank in self.new)
        return same_model and all(root[DIGEST_NBYTES:] == shared for root in roots)

    def _table(self, own: Inventory, held: Mapping[bytes, Tensor]) -> Table:
        """Return the source's digests, and who has what."""
        data = self.post.broadcast(b"".join(own.digests), self.source)
        digests = [data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)]
        names = [*dict.fromkeys(digests)]
        said = self.post.gather(bytes(name in held for name in names))
        return Table(digests, {name: [bool(each[place]) for each in said] for place, name in enumerate(names)})

    def _move(self, own: Inventory, table: Table, held: dict[bytes, Tensor], within_s: float) -> None:
        """Move chunks to those who need and lack them, and keep this member's by digest; not all within a limit."""
        ways = self._ways(own, table)
        slots = slots_of(parcels_of(ways, {number: own.nbytes([number]) for number in ways}), ways)
        self._all_nbytes = sum(own.nbytes(hop.parcel) for hop in chain.from_iterable(slots))
        self._began_at, spent_s, done, count = time.monotonic(), 0.0, 0, 1
        least = 1 + max((place for place, slot in enumerate(slots) if self._must(slot, own)), default=0)
        while done < len(slots):
            began_at = time.monotonic()
            for slot in slots[done : done + count]:
                self._carry(slot, own, table, held)
            slowest_s = self._meet(time.monotonic() - began_at)
            per_slot_s, done, spent_s = slowest_s / min(count, len(slots) - done), done + count, spent_s + slowest_s
            self.post.packs, self.nbytes_per_s = per_slot_s > PACKS_FROM_S, self._moved_nbytes / spent_s
            count = 2 * count if slowest_s < SHORT_S else max(1, count // 2) if slowest_s > LONG_S else count
            if done >= least and spent_s + count * per_slot_s > within_s:
                count = int((within_s - spent_s) / per_slot_s)
                if count < 1:
                    return

    def _must(self, slot: Sequence[Hop], own: Inventory) -> bool:
        """Whether a slot has what must not come later: what changes in every step, or is for another than newcomers."""
        return any(hop.receiver not in self.new or hop.parcel[0] < own.first_still for hop in slot)

    def _ways(self, own: Inventory, table: Table) -> dict[int, tuple[Way, ...]]:
        """Return the ways of each chunk, by its number; equal bytes have one number."""
        shared, numbers = {*table.digests[own.first_shared :]}, dict[bytes, int]()
        for number, digest in enumerate(table.digests):
            numbers.setdefault(digest, number)
        return {
            number: ways_of(
                table.has[digest],
                [digest in shared or rank in self.new for rank in self._ranks],
                self._homes,
                number,
            )
            for digest, number in numbers.items()
        }

    def _carry(self, slot: Sequence[Hop], own: Inventory, table: Table, held: dict[bytes, Tensor]) -> None:
        """Send and receive this member's parcels of a slot, and keep the chunks that have the announced digests."""
        leaving = {
            hop.receiver: [(held[table.digests[number]], own.itemsize(number)) for number in hop.parcel]
            for hop in slot
            if hop.sender == self._me
        }
        coming = {hop.sender: hop.parcel for hop in slot if hop.receiver == self._me}
        received = self.post.exchange(leaving, {rank: [own.chunks[n] for n in ns] for rank, ns in coming.items()})
        for sender, parcel in coming.items():
            for number, piece in zip(parcel, received[sender], strict=True):
                if own.chunks[number].digest(piece) != table.digests[number]:
                    raise ExchangeError(f"{self.post.names[sender]} has sent other bytes of the model than announced")
                held[table.digests[number]] = piece
        table.note(slot)
        self._moved_nbytes += sum(own.nbytes(hop.parcel) for hop in slot)
        self._moved_at = time.monotonic()

    def _meet(self, seconds: float) -> float:
        """Wait for all members; return how long the slowest took since the last time."""
        slowest = max(struct.unpack("<d", each)[0] for each in self.post.gather(struct.pack("<d", seconds)))
        if time.monotonic() - self._told_at > TELL_EVERY_S:
            self._told_at = time.monotonic()
            logger.info("all wait for the model of newcomers: %s", self._progress())
        return float(max(slowest, 1e-6))

    def _progress(self) -> StreamProgress:
        peer = self.source if self._me != self.source else min(self.new, default=self.source)
        # Until the last move: the servers take a text that changes for movement.
        seconds, left_nbytes = max(self._moved_at - self._began_at, 1e-6), self._all_nbytes - self._moved_nbytes
        return StreamProgress(self.post.names[peer], seconds, self._moved_nbytes, left_nbytes)
