"""How members tell each other what they have, and how chunks of tensors travel between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lsgd.client.groups.base import WorkerGroup
from lsgd.client.iteration.chunks import Chunk
from lsgd.client.iteration.packing import most_nbytes, pack, unpack
from lsgd.errors import ExchangeError, ProtocolError

PACKS_FROM_S = 0.15
"""Chunks travel in a code if a MiB takes longer than this: at 50 Mbit/s, coding takes as long as it saves."""


@dataclass(eq=False)
class Post:
    """Carries chunks between the members of a group.

    Args:
        names: the members', by rank.
        packs: whether chunks travel in a code; the same on all members.
    """

    group: WorkerGroup
    names: Sequence[str]
    packs: bool = False

    def tensor(self, data: bytes) -> Tensor:
        """Return bytes as a tensor for the group."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.group.device)

    def gather(self, data: bytes) -> list[bytes]:
        """Return what all members say, each as many bytes."""
        own = self.tensor(data)
        found = [torch.empty_like(own) for _ in range(self.group.size)]
        self.group.all_gather(found, own).wait()
        return [x.cpu().numpy().tobytes() for x in found]

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Return what the member ``source`` says; all pass as many bytes."""
        tensor = self.tensor(data)
        self.group.broadcast(tensor, source)
        return tensor.cpu().numpy().tobytes()

    def tell(self, ranks: Iterable[int], word: bytes) -> None:
        """Send a word of one byte to some members."""
        self.group.exchange({rank: self.tensor(word) for rank in ranks}, {})

    def hear(self, ranks: Iterable[int]) -> bytes:
        """Return the words of one byte that some members send, in their order."""
        words = {rank: self.tensor(b"?") for rank in ranks}
        self.group.exchange({}, words)
        return b"".join(word.cpu().numpy().tobytes() for word in words.values())

    def exchange(
        self, leaving: Mapping[int, Sequence[tuple[Tensor, int]]], coming: Mapping[int, Sequence[Chunk]]
    ) -> dict[int, list[Tensor]]:
        """Send and receive chunks by rank.

        Args:
            leaving: bytes to send, with the size of the numbers in them.
            coming: chunks like those to receive.

        Returns:
            for each rank in ``coming``, its bytes in host memory.

        Raises:
            ExchangeError: it failed, or what has arrived is no code of such chunks.
        """
        if not (leaving or coming):
            return {}
        sends = {rank: self._packed(chunks) for rank, chunks in leaving.items()}
        sizes = {rank: [(len(chunk.data), chunk.dtype.itemsize) for chunk in chunks] for rank, chunks in coming.items()}
        lengths = self._lengths(sends, sizes)
        device = self.group.device
        received = {rank: torch.empty(n, dtype=torch.uint8, device=device) for rank, n in lengths.items()}
        self.group.exchange(sends, received)
        return {rank: self._unpacked(received[rank], each) for rank, each in sizes.items()}

    def _lengths(self, sends: Mapping[int, Tensor], sizes: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, int]:
        """Return how many bytes come from each rank, for chunks of these sizes."""
        if not self.packs:
            return {rank: sum(nbytes for nbytes, _ in each) for rank, each in sizes.items()}
        device = self.group.device
        own = {rank: torch.tensor([len(data)], device=device) for rank, data in sends.items()}
        lengths = {rank: torch.empty(1, dtype=torch.int64, device=device) for rank in sizes}
        self.group.exchange(own, lengths)
        for rank, length in lengths.items():
            if not 0 <= int(length) <= (most := most_nbytes(sizes[rank])):
                raise ExchangeError(f"{self.names[rank]} announces {int(length)} bytes for chunks of {most} at most")
        return {rank: int(length) for rank, length in lengths.items()}

    def _packed(self, chunks: Sequence[tuple[Tensor, int]]) -> Tensor:
        if not self.packs:
            return torch.cat([data.to(self.group.device) for data, _ in chunks])
        return self.tensor(b"".join(pack(data.cpu(), itemsize) for data, itemsize in chunks))

    def _unpacked(self, data: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        if not self.packs:
            return list(torch.split(data.cpu(), [nbytes for nbytes, _ in sizes]))
        try:
            return list(unpack(data.cpu().numpy().tobytes(), sizes))
        except ProtocolError as error:
            raise ExchangeError(f"the model for newcomers: {error}") from None
