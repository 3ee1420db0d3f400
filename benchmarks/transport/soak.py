"""Whether long runs over TCP cost more and more: ``python -m benchmarks.transport.soak [--rounds N] [--json FILE]``.

Processes of this machine exchange in TLS, round after round: an all-reduce of a few bytes and one of 256 KiB. Every
250 rounds they make a new generation's group. Memory, threads and descriptors of each are counted after a tenth of the
rounds and at the end.
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed.launch import await_all, free_port, start
from benchmarks.transport.member import open_store, part, tcp_group

ROUNDS, GENERATION_ROUNDS, NUMEL = 20_000, 250, 1 << 16
DEADLINE_S = 3600.0


def state() -> dict[str, float]:
    """Return what this process holds, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return {
        "MiB": process.memory_info().rss / 2**20,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }


def member(rank: int, size: int, port: int, rounds: int) -> None:
    """Exchange, and print what this process held after a tenth of the rounds and at the end, as JSON."""
    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, here=rank == 0)
    small, large, held = torch.zeros(1), torch.zeros(NUMEL), []
    group = None
    for done in range(rounds):
        if done % GENERATION_ROUNDS == 0:
            if group is not None:
                group.close()
            group = tcp_group(done // GENERATION_ROUNDS + 1, rank, size, "127.0.0.1", store)
        assert group is not None
        for tensor in (small.fill_(rank + 1), large.fill_(rank + 1)):
            group.all_reduce(tensor).wait()
            assert tensor[-1].item() == size * (size + 1) / 2
        if done + 1 in (rounds // 10, rounds):
            held.append(state())
    print(json.dumps(held), flush=True)
    assert group is not None
    part(store, rank, size, [group])


def soak(size: int, rounds: int) -> list[list[dict[str, float]]]:
    """Return what each of ``size`` processes held, twice.

    Raises:
        RunFailedError: a member failed; the message has what it said.
    """
    own, port = [sys.executable, "-m", "benchmarks.transport.soak", "--member"], free_port()
    members = [start([*own, *map(str, (rank, size, port, rounds))]) for rank in range(size)]
    return [json.loads(text.splitlines()[-1]) for text in await_all(members, f"{size} members", DEADLINE_S)]


def rows(held: Sequence[Sequence[dict[str, float]]]) -> list[list[str]]:
    """Return a line of the table for each member."""
    return [
        [str(rank), *(f"{before[name]:.0f} / {after[name]:.0f}" for name in before)]
        for rank, (before, after) in enumerate(held)
    ]


def main() -> int:
    """Run the members, and print a Markdown table."""
    parser = argument_parser("benchmarks.transport.soak", __doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how many")
    parser.add_argument("--members", type=int, default=3, help="processes")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--member", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        member(*options.member)
        return 0
    machine = about("benchmarks.transport.soak")
    print(heading(machine) + "\n", flush=True)
    held = soak(options.members, options.rounds)
    print(table(["member", "MiB", "threads", "descriptors"], rows(held)))
    write_json(options.json, machine, [{"member": rank, "held": each} for rank, each in enumerate(held)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
