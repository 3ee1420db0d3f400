"""All baselines by name, and how a process begins to train by one, and ends."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.baselines import ddp
from benchmarks.baselines.hivemind import hivemind
from benchmarks.baselines.member import TIMEOUT, Attach, Member, Pair
from benchmarks.baselines.torchft import torchft

BASELINES: dict[str, Attach] = {
    "alone": ddp.alone,
    "ddp": ddp.ddp,
    "ddp-float16": ddp.ddp_float16,
    "ddp-powersgd1": ddp.ddp_powersgd(1),
    "ddp-powersgd2": ddp.ddp_powersgd(2),
    "post-local-sgd": ddp.post_local_sgd,
    "torchft-local-sgd": torchft(outer=False),
    "torchft-diloco": torchft(outer=True),
    "hivemind": hivemind,
}
"""What prepares a model and its optimizer, by name; the default process group is there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a process the arguments that :func:`joined` needs."""
    parser.add_argument("--method", choices=BASELINES, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--addresses", nargs="+", required=True, help="of all members, in rank order")
    parser.add_argument("--period", type=int, required=True)


@contextlib.contextmanager
def joined(
    given: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, port: int
) -> Iterator[Pair]:
    """Meet the other members over Gloo at a port of the first, and prepare the model and its optimizer."""
    member = Member(given.rank, given.addresses, given.period, batch_size)
    store = f"tcp://{member.first_address}:{port}"
    dist.init_process_group("gloo", init_method=store, rank=member.rank, world_size=member.size, timeout=TIMEOUT)
    with BASELINES[given.method](model, optimizer, member) as pair:
        dist.barrier()  # all begin their first step together
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
