"""Messages between two members of a torch process group, in pieces: what Gloo needs to fill a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_NBYTES = 64 << 10
MAX_PIECES = 16
"""A message between two workers travels in up to 16 pieces of at least 64 KiB, all receives posted first: Gloo then
comes within 5 % of the link's throughput, against 30 to 100 % over it for one large message (measured)."""

RELAYED_PIECES = 8
"""A message that all members pass on to each other has up to so many pieces for each, if that is more than 16: the
last member then has it an eighth later than the second."""


class Exchange:
    """Point-to-point messages under way: pieces of a few tensors, every receive posted before the first send.

    Args:
        group: over which they go.
        sends: by the rank that they go to.
        receives: by the rank that they come from.
        together: the GPU of NCCL, which runs one message after the other, so that two members would wait for each
            other's first one, unless they are given to it in one go; None: not NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        together: torch.device | None = None,
    ) -> None:
        self._works: list[dist.Work] = []
        if not sends and not receives:
            return
        if together is not None:
            group._start_coalescing(together)
        for rank, tensor in receives.items():
            self._works += [group.recv([piece], rank, tag) for tag, piece in enumerate(_pieces(tensor))]
        for rank, tensor in sends.items():
            self._works += [group.send([piece], rank, tag) for tag, piece in enumerate(_pieces(tensor))]
        if together is not None:
            self._works = [group._end_coalescing(together)]

    def wait(self) -> None:
        """Wait until all are sent and received."""
        for work in self._works:
            work.wait()


class Relay:
    """A message on its way from ``source`` to all in the order of ranks; each sends a piece on as soon as it is there.

    Members of a node have consecutive ranks, so that it enters and leaves each node once.
    """

    def __init__(self, group: dist.ProcessGroup, tensor: Tensor, source: int, rank: int, size: int) -> None:
        self._group = group
        self._pieces = _pieces(tensor, max(MAX_PIECES, RELAYED_PIECES * size))
        self._next = (rank + 1) % size
        self._last = self._next == source
        previous = (rank - 1) % size
        self._received = [
            group.recv([piece], previous, tag) for tag, piece in enumerate(self._pieces) if rank != source
        ]

    def wait(self) -> None:
        """Wait until it has arrived and is passed on."""
        sent = []
        for tag, piece in enumerate(self._pieces):
            if self._received:
                self._received[tag].wait()
            if not self._last:
                sent.append(self._group.send([piece], self._next, tag))
        for work in sent:
            work.wait()


def _pieces(tensor: Tensor, most: int = MAX_PIECES) -> Sequence[Tensor]:
    count = max(1, min(most, tensor.nbytes // PIECE_NBYTES))
    return tensor.view(-1).chunk(count) if tensor.numel() else []
