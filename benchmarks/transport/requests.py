"""How long a request takes while tensors leave: ``python -m benchmarks.transport.requests [--json FILE]``. Linux, root.

A process on one of two hosts sends requests to the other, which answers each at once; both over one plain connection,
one request after the other. First on an idle link; then while a tensor leaves in the same direction, over each
transport in turn.
"""

import argparse
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed import Testbed, told
from benchmarks.testbed.launch import await_all, start
from benchmarks.transport.member import open_store, part, transports

STORE_PORT, REQUEST_PORT = 29660, 29661
REQUEST_NBYTES = 200
PAUSE_S = 0.05
IDLE = "nothing"
FEWEST = 2
"""Requests of each case, at least: fewer have no percentiles."""

DEADLINE_S = 600.0


@dataclass(frozen=True)
class Result:
    """One line of the table: ``ratio`` is the median over that of the idle link."""

    beside: str
    requests: int
    median_s: float
    within_s: float
    ratio: float


class Requests(threading.Thread):
    """Sends requests until :attr:`over`, and notes how long each took under what :attr:`beside` is then."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.beside = IDLE
        self.over = False
        self.seconds: dict[str, list[float]] = {}
        self._connection = socket.create_connection((address, REQUEST_PORT))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def enough(self) -> bool:
        """Whether enough requests were beside what is there now."""
        return len(self.seconds.get(self.beside, ())) >= FEWEST

    def run(self) -> None:
        """Send and wait."""
        while not self.over:
            beside, started_at = self.beside, time.perf_counter()
            self._connection.sendall(bytes(REQUEST_NBYTES))
            self._connection.recv(REQUEST_NBYTES, socket.MSG_WAITALL)
            if beside == self.beside:
                self.seconds.setdefault(beside, []).append(time.perf_counter() - started_at)
            time.sleep(PAUSE_S)


def answer(address: str) -> None:
    """Answer each request of the first caller."""
    with socket.create_server((address, REQUEST_PORT)) as server:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(REQUEST_NBYTES):
            connection.sendall(data)


def member(rank: int, sender: str, address: str, nbytes: int, idle_s: float) -> None:
    """Send requests and tensors, and print the requests' seconds as JSON; or take both."""
    store = open_store(sender, STORE_PORT, here=rank == 0)
    groups = transports(rank, 2, address, store)
    x = torch.zeros(nbytes // 4)
    if rank == 1:
        threading.Thread(target=answer, args=(address,), daemon=True).start()
        store.set("address", address)
    requests = Requests(store.get("address").decode()) if rank == 0 else None
    for group in groups.values():
        group.all_reduce(torch.zeros(1)).wait()  # makes the connections
    if requests is not None:
        requests.start()
        time.sleep(idle_s)
        while not requests.enough:
            time.sleep(PAUSE_S)
    for transport, group in groups.items():
        if requests is not None:
            requests.beside = transport
        enough = torch.zeros(1)
        while not enough:
            group.exchange(*(({1: x}, {}) if rank == 0 else ({}, {0: x})))
            enough.fill_(requests is not None and requests.enough)
            group.all_reduce(enough).wait()  # all has arrived
    if requests is not None:
        requests.over = True
        requests.join()
        print(json.dumps(requests.seconds), flush=True)
    part(store, rank, 2, groups.values())


def measure(nbytes: int, idle_s: float, rate_mbit: float, delay_ms: float) -> list[Result]:
    """Return the results of the idle link and of each transport.

    Raises:
        RunFailedError: a member failed; the message has what it said.
    """
    command = [sys.executable, "-m", "benchmarks.transport.requests", "--member"]
    with Testbed(2, rate_mbit=rate_mbit, delay_ms=delay_ms) as testbed:
        sender = testbed.hosts[0].address
        members = [
            start([*command, *map(str, (host.index, sender, host.address, nbytes, idle_s))], host)
            for host in testbed.hosts
        ]
        said = await_all(members, "the members", DEADLINE_S)[0]
    seconds: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    medians = {beside: statistics.median(each) for beside, each in seconds.items()}
    return [
        Result(
            beside, len(each), medians[beside], statistics.quantiles(each, n=20)[-1], medians[beside] / medians[IDLE]
        )
        for beside, each in seconds.items()
    ]


def row(result: Result) -> Sequence[str]:
    """Return a result as a line of the table."""
    times = (f"{seconds * 1e3:.0f}" for seconds in (result.median_s, result.within_s))
    return (result.beside, str(result.requests), *times, f"{result.ratio:.1f}")


def main() -> int:
    """Measure, and print a Markdown table."""
    parser = argument_parser("benchmarks.transport.requests", __doc__)
    parser.add_argument("--nbytes", type=int, default=25_000_000, help="of the tensor")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long the link is idle")
    parser.add_argument("--rate-mbit", type=float, default=10.0, help="what a host can send")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--member", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        rank, sender, address, nbytes, idle_s = options.member
        member(int(rank), sender, address, int(nbytes), float(idle_s))
        return 0
    machine = about("benchmarks.transport.requests")
    print(heading(machine) + "\n", flush=True)
    results = measure(options.nbytes, options.idle_s, options.rate_mbit, options.delay_ms)
    print(table(["beside", "requests", "median, ms", "95 % within, ms", "over idle"], [row(r) for r in results]))
    write_json(options.json, machine, results, nbytes=options.nbytes)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
