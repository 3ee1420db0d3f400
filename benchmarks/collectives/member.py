"""A member of the collectives that benchmarks/collectives compares: one process on each host of the testbed."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks.testbed.interface import sent_with_headers_nbytes
from lsgd.client.groups.base import Members
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.codecs.minmax import MinMax8
from lsgd.collectives.two_round import QuantizedAllReduce

TIMEOUT_S = 120.0
SOURCE = 0
LARGEST_ERROR = 0.03
"""Largest difference from the mean of normal numbers that 8-bit codes, twice rounded, can have."""


class Bucket:
    """The one thing of a bucket of DistributedDataParallel that its float16 hook looks at."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def buffer(self) -> Tensor:
        """Return the gradients."""
        return self._gradient


def methods(rank: int, size: int, address: str) -> Mapping[str, Callable[[Tensor], object]]:
    """Return what benchmarks/collectives compares, by name, each on the default group: in place, on float32."""
    names = [f"node{index}" for index in range(size)]
    world = dist.group.WORLD
    assert world is not None
    mesh = Mesh("benchmark", 1, rank, names, address, world.get_group_store(), b"", TIMEOUT_S)
    group = TcpGroup(mesh, Members.apart(names, rank), TIMEOUT_S)
    in_8_bits = QuantizedAllReduce(group, MinMax8())
    return {
        "all-reduce, float32": dist.all_reduce,
        "all-reduce, float16": lambda x: fp16_compress_hook(world, cast(Any, Bucket(x))).wait(),
        "all-reduce, 8 bits": lambda x: in_8_bits(x, x, ("benchmark",)),
        "broadcast, Gloo's": lambda x: dist.broadcast(x, SOURCE),
        "broadcast": lambda x: group.broadcast(x, SOURCE),
    }


def check(x: Tensor, name: str, result: Tensor) -> None:
    """Make sure that a collective does what it is compared for."""
    expected = x.clone()
    if name.startswith("broadcast"):
        dist.broadcast(expected, SOURCE)
        assert result.equal(expected), f"{name}: not what was sent"
        return
    dist.all_reduce(expected)
    expected /= dist.get_world_size()
    if name == "all-reduce, float32":
        result = result / dist.get_world_size()
    error = float((result - expected).abs().max())
    assert error < LARGEST_ERROR, f"{name}: off by {error}"


def main() -> None:
    """Call every collective in turns; rank 0 prints when each call began and ended, and its bytes, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("store", help="address of the store")
    parser.add_argument("address", help="of this host")
    parser.add_argument("numel", type=int)
    parser.add_argument("repeats", type=int)
    given = parser.parse_args()
    dist.init_process_group("gloo", init_method=given.store, rank=given.rank, world_size=given.size)
    collectives = methods(given.rank, given.size, given.address)
    x = torch.randn(given.numel, generator=torch.Generator().manual_seed(given.rank))
    result = torch.empty_like(x)

    calls: dict[str, list[tuple[float, float, int]]] = {name: [] for name in collectives}
    for turn in range(given.repeats + 1):
        for name, collective in collectives.items():
            result.copy_(x)
            before = sent_with_headers_nbytes()
            dist.barrier()
            began_s = time.perf_counter()
            collective(result)
            ended_s = time.perf_counter()
            dist.barrier()
            if turn:
                calls[name].append((began_s, ended_s, sent_with_headers_nbytes() - before))
            else:
                check(x, name, result)

    everyone: list[dict[str, list[tuple[float, float, int]]] | None] = [None] * given.size
    dist.all_gather_object(everyone, calls)
    if given.rank == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
