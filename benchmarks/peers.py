"""What lsgd is compared with: DistributedDataParallel and its hooks, PostLocalSGDOptimizer, torchft and hivemind.

The last two are optional, and may live in an environment of their own: this module needs nothing but torch.
"""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = datetime.timedelta(hours=1)
POWERSGD_STARTS_AT = 2  # the first step that it can
ONE_BUCKET_MB = 1024  # torch's PowerSGD hook deadlocks on Gloo with several buckets
MATCHMAKING_S = 1.0
JOIN_WITHIN_S = 60.0
POLL_PERIOD_S = 0.05


@dataclass(frozen=True)
class Member:
    """One process among those that train together.

    Args:
        rank: its number.
        size: how many there are.
        address: its own, which the others reach it by.
        first_address: that of rank 0.
        period: steps between two exchanges, for the methods that have one.
        batch_size: samples in a step.
    """

    rank: int
    size: int
    address: str
    first_address: str
    period: int
    batch_size: int


Pair = tuple[nn.Module, torch.optim.Optimizer]
"""The model to call, and the optimizer to step."""

Attach = Callable[[nn.Module, torch.optim.Optimizer, Member], contextlib.AbstractContextManager[Pair]]


@contextlib.contextmanager
def alone(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
    """No communication at all."""
    yield model, optimizer


@contextlib.contextmanager
def ddp(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
    """DistributedDataParallel with its defaults."""
    yield DistributedDataParallel(model), optimizer


@contextlib.contextmanager
def ddp_float16(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
    """DistributedDataParallel with the hook that sends float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    yield wrapped, optimizer


def ddp_powersgd(rank: int) -> Attach:
    """DistributedDataParallel with the PowerSGD hook of this rank, in one bucket."""

    @contextlib.contextmanager
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_STARTS_AT)
        wrapped.register_comm_hook(state, powerSGD_hook)
        yield wrapped, optimizer

    return attach


@contextlib.contextmanager
def post_local_sgd(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
    """PostLocalSGDOptimizer from the first step on, with no exchange of gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    own = [dist.new_group([rank]) for rank in range(member.size)][member.rank]
    wrapped = DistributedDataParallel(model)
    state = PostLocalSGDState(None, own, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=member.period, warmup_steps=0)
    yield wrapped, PostLocalSGDOptimizer(optimizer, averager)


def torchft(outer: bool) -> Attach:
    """LocalSGD of torchft, or its DiLoCo (``outer``) with the outer optimizer of lsgd's ``diloco``."""

    @contextlib.contextmanager
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, member: Member) -> Iterator[Pair]:
        os.environ.setdefault("RUST_LOG", "warn")  # or it says a dozen lines in each exchange
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo, LocalSGD

        lighthouse, found = None, [""]
        if member.rank == 0:
            lighthouse = LighthouseServer(bind="[::]:0", min_replicas=member.size)
            found = [f"http://{member.first_address}:{urlsplit(lighthouse.address()).port}"]
        dist.broadcast_object_list(found, 0)
        store = dist.TCPStore(member.address, 0, is_master=True, wait_for_workers=False)
        os.environ["MASTER_ADDR"] = member.address
        manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            min_replica_size=member.size,
            load_state_dict=lambda state: model.load_state_dict(state),
            state_dict=model.state_dict,
            replica_id=f"replica{member.rank}",
            store_addr=member.address,
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=found[0],
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            hostname=member.address,
            init_sync=False,  # or it sends the whole model in its first exchange, and all go on from one worker's
        )
        if outer:
            outer_step = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            context = DiLoCo(manager, [model], optimizer, outer_step, sync_every=member.period)
        else:
            context = LocalSGD(manager, model, optimizer, sync_every=member.period)
        with context:
            yield model, optimizer
        dist.barrier()
        manager.shutdown(wait=False)
        del store
        if lighthouse is not None:
            lighthouse.shutdown()

    return attach


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


PEERS: dict[str, Attach] = {
    "alone": alone,
    "ddp": ddp,
    "ddp-float16": ddp_float16,
    "ddp-powersgd1": ddp_powersgd(1),
    "ddp-powersgd2": ddp_powersgd(2),
    "post-local-sgd": post_local_sgd,
    "torchft-local-sgd": torchft(outer=False),
    "torchft-diloco": torchft(outer=True),
    "hivemind": hivemind,
}
"""What prepares a model and its optimizer, by name; the default process group is there."""


@contextlib.contextmanager
def joined(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, member: Member, port: int
) -> Iterator[Pair]:
    """Meet the other members over Gloo, and prepare the model and its optimizer by the method ``name``."""
    store = f"tcp://{member.first_address}:{port}"
    dist.init_process_group(
        "gloo", init_method=store, rank=member.rank, world_size=member.size, timeout=TIMEOUT
    )
    with PEERS[name](model, optimizer, member) as pair:
        yield pair
    dist.barrier()
    dist.destroy_process_group()


def end_process() -> NoReturn:
    """End this process at once, which on a busy machine torch does not always do.

    At the end of the interpreter its threads abort now and then. And who lets go of a DistributedDataParallel while
    Gloo's thread still frees tensors of the last collective waits for it for ever, with the lock of the interpreter,
    which that thread waits for: this is to be called where the model still is.
    """
    sys.stdout.flush()
    os._exit(0)
