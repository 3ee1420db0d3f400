"""Messages between two members of a torch process group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Messages in flight by rank, with every receive posted before the first send. Empty tensors do not travel.

    ``batch`` is NCCL's GPU; None for other backends. NCCL runs messages one after the other, so two members would wait
    for each other's first one, unless NCCL gets all of them in one batch.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        batch: torch.device | None = None,
    ) -> None:
        self._works: list[dist.Work] = []
        sends, receives = ({rank: x for rank, x in some.items() if x.numel()} for some in (sends, receives))
        if not sends and not receives:
            return
        if batch is not None:
            group._start_coalescing(batch)
        for rank, tensor in receives.items():
            self._works.append(group.recv([tensor], rank, 0))
        for rank, tensor in sends.items():
            self._works.append(group.send([tensor], rank, 0))
        if batch is not None:
            self._works = [group._end_coalescing(batch)]

    def wait(self) -> None:
        """Wait until all messages are sent and received."""
        for work in self._works:
            work.wait()
