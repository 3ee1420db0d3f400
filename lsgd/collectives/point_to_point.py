"""Messages between two members of a torch process group, cut into pieces so that Gloo fills the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_NBYTES = 64 << 10
MAX_PIECES = 16
"""A message between two workers travels in up to 16 pieces of at least 64 KiB, with all receives posted first.
Then Gloo takes at most 5 % longer than the link's bandwidth allows; with one large message 30 to 100 % (measured)."""

RELAYED_PIECES = 8
"""A message that members pass along has up to this many pieces per member, if that is more than 16. So the last member
gets it an eighth later than the second."""


class Exchange:
    """Point-to-point messages in flight: a few tensors in pieces, with every receive posted before the first send.

    Args:
        group: the process group.
        sends: tensors by the rank that they go to.
        receives: tensors by the rank that they come from.
        together: NCCL's GPU; None for other backends. NCCL runs messages one after the other, so two members would wait
            for each other's first one, unless NCCL gets all of them in one batch.
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
        """Wait until all messages are sent and received."""
        for work in self._works:
            work.wait()


class Relay:
    """A message that travels from ``source`` to all in rank order; each member forwards a piece once it has it.

    Members of a node have consecutive ranks, so the message enters and leaves each node once.
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
        """Wait until the message has arrived and is forwarded."""
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
