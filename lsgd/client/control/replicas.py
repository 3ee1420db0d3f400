"""Replicas: models in DistributedDataParallel (DDP), which keeps them equal in all processes of an island.

DDP averages the gradients inside the island, so all processes compute the same steps. The head exchanges with other
workers, and hands the others what it receives (:mod:`lsgd.client.groups.mirror`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP around a model, perhaps compiled; None if there is none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, whose parameters have the names that they have without it."""
    ddp = ddp_of(model)
    return model if ddp is None else ddp.module


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the sum of its bits as integers, which is exact in any order."""
    return [int(_integers(x).sum()) for x in tensors]


def _integers(x: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().reshape(-1).view(kinds.get(x.element_size(), torch.uint8))
