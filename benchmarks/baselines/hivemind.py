"""hivemind.Optimizer. The library may live in an environment of its own."""

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.baselines.member import TIMEOUT, Member, Pair

MATCHMAKING_S = 1.0
JOIN_WITHIN_S = 60.0
POLL_PERIOD_S = 0.05


@contextlib.contextmanager
def hivemind(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
    """hivemind.Optimizer with local updates: models are averaged after ``period`` steps of all workers."""
    import hivemind as library

    found: list[str | None] = [None]
    maddrs = [f"/ip4/{member.address}/tcp/0"]
    dht = library.DHT(host_maddrs=maddrs, start=True) if member.rank == 0 else None
    if dht is not None:
        found = [str(dht.get_visible_maddrs()[0])]
    dist.broadcast_object_list(found, 0)
    if dht is None:
        dht = library.DHT(initial_peers=found, host_maddrs=maddrs, start=True)
    wrapped = library.Optimizer(
        dht=dht,
        run_id="benchmark",
        batch_size_per_step=member.batch_size,
        target_batch_size=member.batch_size * member.period * member.size,
        optimizer=optimizer,
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=TIMEOUT.total_seconds(),
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
    )
    dist.barrier()
    deadline = time.monotonic() + JOIN_WITHIN_S
    while wrapped.tracker.global_progress.num_peers < member.size and time.monotonic() < deadline:
        time.sleep(0.1)
    yield model, wrapped
    # Another may still make steps, and would wait for a member that has ended in its next averaging round.
    ended = dist.barrier(async_op=True)
    while not ended.is_completed():
        wrapped.step(batch_size=0)
        time.sleep(POLL_PERIOD_S)
    wrapped.shutdown()
    dht.shutdown()
