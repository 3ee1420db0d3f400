"""What a round exchanges before the forward pass: the algorithm's part, and the model's buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lsgd.algorithms.base import all_finite
from lsgd.client.checkpoint.finite import clear
from lsgd.client.groups.base import WorkerGroup
from lsgd.client.iteration.consensus import mean_of, wide
from lsgd.client.iteration.replica import Replica
from lsgd.protocol.messages import Round


def exchange(replica: Replica, group: WorkerGroup, order: Round) -> None:
    """Have the algorithm exchange models, or begin to, and the floating-point buffers beside them.

    A global round may heal a non-finite model with those of others; the optimizers' state is then cleared of what
    would break it again.

    Raises:
        ExchangeError: it failed; nothing has changed.
    """
    parameters = replica.flat.buffers
    buffers, values = _exchange_buffers(replica, group, order)
    broken = order.scope == "global" and not replica.lockstep and not group.agree(all_finite(parameters))
    replica.algorithm.before_forward(parameters, group, order)
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value.view(buffer.shape))
    if broken and group.agree(all_finite(parameters)):
        clear(replica.optimizers)


def _exchange_buffers(replica: Replica, group: WorkerGroup, order: Round) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the model's floating buffers, and the values that the round gives them."""
    buffers, treated = replica.finite.buffers(), replica.run.buffers
    if order.scope == "local" or treated == "keep" or not buffers or group.size == 1:
        return (), ()
    if replica.lockstep:  # every iteration is a round: the last one is enough
        return (), ()
    flat = torch.cat([wide(b) for b in buffers])
    if treated == "leader":
        group.broadcast(flat, order.leader)
    else:
        (flat,) = mean_of([flat], group, contributes=True) or [flat]
    return buffers, torch.split(flat, [b.numel() for b in buffers])
