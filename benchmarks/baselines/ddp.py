"""torch's own: DistributedDataParallel with its hooks, and PostLocalSGDOptimizer."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.baselines.member import Attach, Member, Pair

POWERSGD_STARTS_AT = 2  # the first step that it can
ONE_BUCKET_MB = 1024  # torch's PowerSGD hook deadlocks on Gloo with several buckets


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
    """PostLocalSGDOptimizer: no exchange of gradients or buffers, and an average after each period."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    own = [dist.new_group([rank]) for rank in range(member.size)][member.rank]
    wrapped = DistributedDataParallel(model)
    wrapped.broadcast_buffers = False  # the argument has another name in newer torch
    state = PostLocalSGDState(None, own, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=member.period, warmup_steps=member.period - 1)
    yield wrapped, PostLocalSGDOptimizer(optimizer, averager)
