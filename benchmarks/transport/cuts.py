"""What a link that is cut now and then costs: ``python -m benchmarks.transport.cuts [--cut-s 2] [--json FILE]``.

Linux, root. Two hosts exchange in TLS, message after message. On their link every packet is lost for a while, again
and again. Beside them, at the same time, another two hosts do the same on a link that is never cut: the speed is their
time over that of the first ones.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed import Testbed, told
from benchmarks.testbed.launch import await_all, start
from benchmarks.transport.member import open_store, part, tcp_group

PORT = 29650
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
MESSAGE_NBYTES = 1_250_000
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Result:
    """One line of the table: ``cuts`` of ``cut_s`` each; ``speed`` is the uncut link's time over this one."""

    cut_s: float
    cuts: int
    seconds: float
    goodput_mbit: float
    speed: float


def member(rank: int, store_address: str, address: str, messages: int) -> None:
    """Exchange, and print how long that took in seconds."""
    store = open_store(store_address, PORT, here=rank == 0)
    group = tcp_group(1, rank, 2, address, store)
    sent, received = torch.full((MESSAGE_NBYTES // 4,), float(rank)), torch.empty(MESSAGE_NBYTES // 4)
    group.all_reduce(torch.zeros(1)).wait()  # makes the connections
    print("begins", flush=True)
    sys.stdin.readline()  # until all have come here
    started_at = time.monotonic()
    for number in range(messages):
        group.exchange({1 - rank: sent.add_(1)}, {1 - rank: received})
        assert received[-1].item() == 2 - rank + number
    print(time.monotonic() - started_at, flush=True)
    part(store, rank, 2, [group])


class Cutter:
    """Cuts the links of testbeds, each for a while of its own.

    Args:
        testbeds: with the seconds for which each is cut; 0: never.
        every_s: from one cut to the next.
    """

    def __init__(self, testbeds: Sequence[tuple[Testbed, float]], every_s: float) -> None:
        self._testbeds = testbeds
        self._every_s = every_s
        self._cut = [False for _ in testbeds]
        self._begun_at = time.monotonic()

    def __call__(self) -> None:
        """Cut and mend what is due; to be called often."""
        passed_s = time.monotonic() - self._begun_at
        for index, (testbed, cut_s) in enumerate(self._testbeds):
            cut = passed_s >= self._every_s and passed_s % self._every_s < cut_s
            if cut != self._cut[index]:
                (testbed.cut if cut else testbed.mend)(testbed.hosts[1])
                self._cut[index] = cut


def measure(
    cuts_s: Sequence[float], every_s: float, messages: int, rate_mbit: float, delay_ms: float, congestion: str
) -> Iterator[Result]:
    """Yield the results of a link that is never cut, and then of those cut for so long.

    Raises:
        RunFailedError: a member failed; the message has what it said.
    """
    all_cuts_s, command = (0.0, *cuts_s), [sys.executable, "-m", "benchmarks.transport.cuts", "--member"]
    with ExitStack() as stack:
        testbeds = [stack.enter_context(Testbed(2, rate_mbit=rate_mbit, delay_ms=delay_ms)) for _ in all_cuts_s]
        for host in (host for testbed in testbeds for host in testbed.hosts):
            host.run(["sh", "-c", f"printf {congestion} > {CONGESTION}"])
        members = [
            start([*command, *map(str, (host.index, testbed.hosts[0].address, host.address, messages))], host)
            for testbed in testbeds
            for host in testbed.hosts
        ]
        for process in members:
            assert process.stdout
            process.stdout.readline()  # it begins, or has failed
        for process in members:
            assert process.stdin
            with suppress(BrokenPipeError):  # it has failed
                print(file=process.stdin, flush=True)
        cutter = Cutter(list(zip(testbeds, all_cuts_s, strict=True)), every_s)
        said = [float(text.splitlines()[-1]) for text in await_all(members, "the members", DEADLINE_S, cutter)]
    seconds = [max(pair) for pair in zip(said[::2], said[1::2], strict=True)]
    for cut_s, each_s in zip(all_cuts_s, seconds, strict=True):
        cuts = int(each_s // every_s) if cut_s else 0
        yield Result(cut_s, cuts, each_s, messages * MESSAGE_NBYTES * 8 / 1e6 / each_s, seconds[0] / each_s)


def main() -> int:
    """Measure a link that is never cut and others that are, and print a Markdown table."""
    parser = argument_parser("benchmarks.transport.cuts", __doc__)
    parser.add_argument("--cut-s", type=float, nargs="+", default=[2.0], help="for how long: a link for each")
    parser.add_argument("--every-s", type=float, default=30.0, help="from one cut to the next")
    parser.add_argument("--rate-mbit", type=float, default=10.0, help="what a host can send")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="one way")
    parser.add_argument("--messages", type=int, default=95, help="each of 1.25 MB: 1 s at 10 Mbit")
    parser.add_argument("--congestion", default=Path(CONGESTION).read_text().strip(), help="TCP's congestion control")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        rank, store, address, messages = options.member
        member(int(rank), store, address, int(messages))
        return 0
    machine = {**about("benchmarks.transport.cuts"), "congestion control": options.congestion}
    print(heading(machine) + "\n", flush=True)
    link = (options.rate_mbit, options.delay_ms, options.congestion)
    results = list(measure(options.cut_s, options.every_s, options.messages, *link))
    rows = [
        [f"{r.cut_s:g}", str(r.cuts), f"{r.seconds:.1f}", f"{r.goodput_mbit:.2f}", f"{r.speed:.2f}"] for r in results
    ]
    print(table(["cut for, s", "cuts", "s", "Mbit/s each way", "of the uncut speed"], rows))
    write_json(options.json, machine, results, every_s=options.every_s, nbytes=MESSAGE_NBYTES)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
