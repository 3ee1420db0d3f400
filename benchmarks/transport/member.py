"""A member of the groups that benchmarks/transport compares: one process on each host of the testbed."""

import argparse
import datetime
import json
import resource
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lsgd.client.groups.base import Members, WorkerGroup
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.client.groups.torch_group import ProcessGroups, TorchGroup, gloo_group
from lsgd.codecs.minmax import MinMax8
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.protocol.credentials import run_certificate

TIMEOUT_S = 120.0
IN_SEQUENCE = 10
"""Calls of what takes little more than latency, timed together: members leave a barrier at different times."""

FEW = 4096
"""Numbers of a message whose time is latency rather than bytes."""

TINY_IN_SEQUENCE = f"exchange, 4 bytes, {IN_SEQUENCE} in sequence"
TINY_ALL_REDUCE = f"all-reduce, 4 bytes, {IN_SEQUENCE} in sequence"
EXCHANGE = "exchange"
BROADCAST = "broadcast"
ALL_REDUCE = "all-reduce"
IN_TWO_ROUNDS = "all-reduce, 8 bits"
FEW_IN_TWO_ROUNDS = f"all-reduce, 8 bits, {FEW} numbers, {IN_SEQUENCE} in sequence"
FEW_TO_NEIGHBORS = f"to neighbors, 8 bits, {FEW} numbers, {IN_SEQUENCE} in sequence"
VERBS = (
    *(TINY_IN_SEQUENCE, TINY_ALL_REDUCE, EXCHANGE, BROADCAST, ALL_REDUCE),
    *(IN_TWO_ROUNDS, FEW_IN_TWO_ROUNDS, FEW_TO_NEIGHBORS),
)


def open_store(address: str, port: int, *, here: bool) -> TCPStore:
    """Return the store where the members meet; one of them has it."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    return TCPStore(address, port, is_master=here, wait_for_workers=False, timeout=timeout)


def part(store: TCPStore, rank: int, size: int, groups: Iterable[WorkerGroup]) -> None:
    """Wait until all members have come here, and close the groups."""
    store.set(f"done{rank}", "")
    store.wait([f"done{index}" for index in range(size)])
    for group in groups:
        group.close()


def names_of(size: int) -> list[str]:
    """Return the names of so many members."""
    return [f"node{index}" for index in range(size)]


def tcp_group(number: int, rank: int, size: int, address: str, store: TCPStore, *, tls: bool = True) -> TcpGroup:
    """Return the group of the generation of this number over connections of its own."""
    certificate = run_certificate(b"s" * 32, "benchmark") if tls else b""
    own, names = PrefixStore(str(number), store), names_of(size)
    mesh = Mesh("benchmark", number, rank, names, address, own, certificate, TIMEOUT_S)
    return TcpGroup(mesh, Members.apart(names, rank), TIMEOUT_S)


def transports(rank: int, size: int, address: str, store: TCPStore) -> Mapping[str, WorkerGroup]:
    """Return the groups to compare, by name."""
    names = names_of(size)
    made = ProcessGroups(lambda name, _: gloo_group(store, rank, size, TIMEOUT_S, address), TIMEOUT_S)
    gloo = TorchGroup(made, Members.apart(names, rank), TIMEOUT_S, "gloo", torch.device("cpu"))
    own = (rank, size, address, store)
    return {"gloo": gloo, "tcp": tcp_group(1, *own, tls=False), "tcp, TLS": tcp_group(2, *own)}


def verbs(group: WorkerGroup) -> Mapping[str, Callable[[Tensor], object]]:
    """Return what is timed, by name, each in place on a float32 tensor."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    codec = MinMax8()
    in_8_bits = QuantizedAllReduce(group, codec)

    def exchange(x: Tensor) -> None:
        received = torch.empty_like(x)
        group.exchange({after: x}, {before: received})
        x.copy_(received)

    def to_neighbors(x: Tensor) -> None:
        payload = codec.empty(FEW, x.device)
        codec.encode(x[:FEW], payload)
        received = {rank: torch.empty_like(payload) for rank in (before, after)}
        group.exchange(dict.fromkeys(received, payload), received)
        for other in received.values():
            codec.decode_add(other, x[:FEW])

    def in_sequence(verb: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
        def call(x: Tensor) -> None:
            for _ in range(IN_SEQUENCE):
                verb(x)

        return call

    return {
        TINY_IN_SEQUENCE: in_sequence(lambda x: exchange(x[:1])),
        TINY_ALL_REDUCE: in_sequence(lambda x: group.all_reduce(x[:1]).wait()),
        EXCHANGE: exchange,
        BROADCAST: lambda x: group.broadcast(x, 0),
        ALL_REDUCE: lambda x: group.all_reduce(x).wait(),
        IN_TWO_ROUNDS: lambda x: in_8_bits(x, x, ("benchmark",)),
        FEW_IN_TWO_ROUNDS: in_sequence(lambda x: in_8_bits(x[:FEW], x[:FEW], ("benchmark",))),
        FEW_TO_NEIGHBORS: in_sequence(to_neighbors),
    }


def processor_s() -> float:
    """Return the processor time of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Call every verb over every transport in turns; print their seconds and processor time as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("store", help="address of the store")
    parser.add_argument("port", type=int)
    parser.add_argument("address", help="of this host")
    parser.add_argument("numel", type=int)
    parser.add_argument("repeats", type=int)
    parser.add_argument("verbs", nargs="+", choices=VERBS)
    given = parser.parse_args()
    store = open_store(given.store, given.port, here=given.rank == 0)
    groups = transports(given.rank, given.size, given.address, store)
    barrier = groups["gloo"]
    x = torch.randn(given.numel, generator=torch.Generator().manual_seed(given.rank))
    timed: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for turn in range(given.repeats + 1):  # the first one makes the connections
        results: dict[str, Tensor] = {}
        for transport, group in groups.items():
            of_group = verbs(group)
            for name in given.verbs:
                verb, result = of_group[name], x.clone()
                barrier.all_reduce(torch.zeros(1)).wait()
                used_s, started_at = processor_s(), time.perf_counter()
                verb(result)
                seconds = time.perf_counter() - started_at
                if turn:
                    timed.setdefault(name, {}).setdefault(transport, []).append((seconds, processor_s() - used_s))
                expected = results.setdefault(name, result)  # Gloo adds up in another order
                same = name.startswith("all-reduce") and torch.allclose(result, expected, rtol=1e-5, atol=1e-5)
                assert same or result.equal(expected), f"{name}: over {transport} another result"
    barrier.all_reduce(torch.zeros(1)).wait()
    print(json.dumps(timed), flush=True)
    part(store, given.rank, given.size, groups.values())


if __name__ == "__main__":
    main()
