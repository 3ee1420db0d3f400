"""What a round exchanges before the forward pass: the algorithm's part and the model's buffers, or the consensus."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lsgd.algorithms.base import all_finite
from lsgd.client.checkpoint.finite import clear
from lsgd.client.control.island import Island
from lsgd.client.groups.base import WorkerGroup
from lsgd.client.iteration.replica import Replica, put
from lsgd.protocol.messages import Round

logger = logging.getLogger("lsgd")


def exchange(replica: Replica, group: WorkerGroup, order: Round) -> None:
    """Let the algorithm exchange models, or begin to; exchange the floating-point buffers as well.

    A global round may replace a non-finite model by finite ones. Then the optimizers' non-finite state is cleared,
    because it would break the model again.

    Raises:
        ExchangeError: it failed; nothing has changed.
    """
    parameters = replica.flat.buffers
    buffers, values = _exchange_buffers(replica, group, order)
    broken = order.scope == "global" and not replica.lockstep and not group.agree(all_finite(parameters))
    replica.algorithm.before_forward(parameters, group, order)
    put(buffers, values)
    if broken and group.agree(all_finite(parameters)):
        clear(replica.optimizers)


def _exchange_buffers(replica: Replica, group: WorkerGroup, order: Round) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the model's floating buffers, and the values that the round gives them."""
    buffers, treated = replica.finite.buffers(), replica.run.buffers
    # In lockstep, every iteration is a round, and averaging them in the consensus is enough.
    if order.scope == "local" or treated == "keep" or not buffers or group.size == 1 or replica.lockstep:
        return (), ()
    flat = torch.cat([wide(b) for b in buffers])
    if treated == "leader":
        group.broadcast(flat, order.leader)
    else:
        (flat,) = mean_of([flat], group, contributes=True) or [flat]
    return buffers, torch.split(flat, [b.numel() for b in buffers])


def make_consensus(replica: Replica, group: WorkerGroup, order: Round, island: Island) -> None:
    """Replace every model by the average of all, or by the leader's, and record how far apart they were.

    Each process of an island does so with its part.

    Raises:
        ExchangeError: it failed; nothing has changed.
    """
    parameters, buffers = replica.flat.buffers, replica.finite.buffers()
    own = [wide(x) for x in (*parameters, *buffers)]
    led = [x.clone() for x in own]
    for x in led:
        group.broadcast(x, order.leader)
    means = mean_of(own, group, contributes=group.rank not in order.new) or led
    distance = _distance(own[: len(parameters)], means[: len(parameters)], group, island)
    group.agree()
    replica.consensus_distance, replica.leader_model = distance, led
    chosen = means if replica.run.consensus == "average" else led
    put([*parameters, *buffers], chosen)


def mean_of(tensors: Sequence[Tensor], group: WorkerGroup, *, contributes: bool) -> list[Tensor] | None:
    """Return the means over the members that contribute finite numbers; None if no member does."""
    if not group.agree(all_finite(tensors)) and contributes:
        logger.warning("this worker's model is non-finite: the average leaves it out")
        contributes = False
    count = torch.tensor([float(contributes)], device=group.device)
    group.all_reduce(count).wait()
    if not float(count):
        return None
    means = [x / count.to(x.device) if contributes else torch.zeros_like(x) for x in tensors]
    for x in means:
        group.all_reduce(x).wait()
    return means


def wide(x: Tensor) -> Tensor:
    """Return ``x`` as one row, in float32 or wider."""
    return x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))


def _distance(own: Sequence[Tensor], means: Sequence[Tensor], group: WorkerGroup, island: Island) -> float:
    """Return the mean of |x - mean| / |mean| over the members whose model is finite."""
    group.agree()  # what follows is not a vote, and needs all processes of the island
    apart = sum(float((x - mean).square_().sum()) for x, mean in zip(own, means, strict=True))
    length = sum(float(mean.square().sum()) for mean in means)
    apart, length = (sum(parts) ** 0.5 for parts in zip(*island.gather("measures", (apart, length)), strict=True))
    distance = apart / length if length else 0.0
    summed = torch.tensor([distance, 1.0] if math.isfinite(distance) else [0.0, 0.0], device=group.device)
    group.all_reduce(summed).wait()
    total, count = summed.tolist()
    return total / count if count else 0.0
