"""Messages between two members of a torch process group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lsgd.collectives.group import Transfer


def begin_exchange(
    group: dist.ProcessGroup,
    sends: Mapping[int, Tensor],
    receives: Mapping[int, Tensor],
    batch: torch.device | None = None,
) -> Transfer:
    """Begin to exchange tensors by rank, with every receive posted before the first send. Empty ones do not travel.

    ``batch`` is NCCL's GPU; None for other backends. NCCL runs messages one after the other, so two members would wait
    for each other's first one, unless NCCL gets all of them in one batch.
    """
    sends, receives = ({rank: x for rank, x in some.items() if x.numel()} for some in (sends, receives))
    if not sends and not receives:
        return Transfer(lambda: None)
    if batch is not None:
        group._start_coalescing(batch)
    works = [group.recv([x], rank, 0) for rank, x in receives.items()]
    works += [group.send([x], rank, 0) for rank, x in sends.items()]
    if batch is not None:
        works = [group._end_coalescing(batch)]

    def wait() -> None:
        for work in works:
            work.wait()

    return Transfer(wait)
