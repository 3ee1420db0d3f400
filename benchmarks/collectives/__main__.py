"""lsgd's collectives against Gloo's: ``python -m benchmarks.collectives [--quick] [--json FILE]``. Linux, root.

Every member is a process on a host of its own (benchmarks/testbed), all on this machine. In turns they reduce the same
float32 message with Gloo's all_reduce, with the float16 hook of DistributedDataParallel, and in two rounds of 8 bits
(lsgd.collectives.two_round on TcpGroup), and send that of the first member to all with Gloo's broadcast and
with TcpGroup's, which passes it on from member to member. The time of a call is that of the slowest member; a
speed-up is the median over the turns of the ratio of two calls of one turn. Bytes are counted where the link's rate is,
with the headers of every packet, and compared with codes and scales, or numbers, alone.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed import Testbed, told
from benchmarks.testbed.launch import await_all, start
from lsgd.codecs.minmax import MinMax8

PORT = 29500
MEMBERS = (2, 4)
RATES_MBIT = (100.0, 1000.0)
MESSAGE_NBYTES, QUICK_MESSAGE_NBYTES = 25_000_000, 2_500_000  # of float32
REPEATS, QUICK_REPEATS = 7, 3
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Method:
    """What is called.

    Args:
        name: of the method, as the table and the members have it.
        compared_with: the methods whose time is divided by this one's.
        element_nbytes: bytes of a number that is sent.
        all_reduce: rather than a broadcast.
    """

    name: str
    compared_with: Sequence[str]
    element_nbytes: float
    all_reduce: bool

    def sent_nbytes(self, size: int, numel: int) -> float:
        """Return what a member has to send, as the mean over all."""
        return (2 if self.all_reduce else 1) * (size - 1) / size * numel * self.element_nbytes

    def busiest_nbytes(self, size: int, numel: int) -> float:
        """Return what the member that has most to send has to."""
        return self.sent_nbytes(size, numel) if self.all_reduce else numel * self.element_nbytes


METHODS = (
    Method("all-reduce, float32", (), 4.0, True),
    Method("all-reduce, float16", ("all-reduce, float32",), 2.0, True),
    Method("all-reduce, 8 bits", ("all-reduce, float32", "all-reduce, float16"), MinMax8().element_nbytes, True),
    Method("broadcast, Gloo's", (), 4.0, False),
    Method("broadcast", ("broadcast, Gloo's",), 4.0, False),
)


@dataclass(frozen=True)
class Result:
    """One line of the table; ``speed_ups`` are over the methods that its own is compared with."""

    members: int
    rate_mbit: float
    method: str
    seconds: float
    speed_ups: Mapping[str, float]
    bytes_over_formula: float
    seconds_over_link: float


def measure(testbed: Testbed, rate_mbit: float, nbytes: int, repeats: int) -> Iterator[Result]:
    """Yield the results of each method at one rate."""
    testbed.set_rate(rate_mbit)
    size, numel = len(testbed.hosts), nbytes // 4
    everyone = run(testbed, numel, repeats)
    turns = {
        method.name: [taken_s([member[method.name][turn] for member in everyone]) for turn in range(repeats)]
        for method in METHODS
    }
    for method in METHODS:
        sent = [statistics.median(nbytes for *_, nbytes in member[method.name]) for member in everyone]
        seconds = statistics.median(turns[method.name])
        yield Result(
            size,
            rate_mbit,
            method.name,
            seconds,
            {other: ratio(turns[other], turns[method.name]) for other in method.compared_with},
            statistics.mean(sent) / method.sent_nbytes(size, numel),
            seconds / (method.busiest_nbytes(size, numel) * 8 / (rate_mbit * 1e6)),
        )


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median over the turns of ``one / other``."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def taken_s(calls: Sequence[tuple[float, float, int]]) -> float:
    """Return the seconds from the first member's begin to the last one's end, on the clock that all have."""
    return max(ended_s for _, ended_s, _ in calls) - min(began_s for began_s, _, _ in calls)


def run(testbed: Testbed, numel: int, repeats: int) -> list[dict[str, list[tuple[float, float, int]]]]:
    """Run a member on each host and return, for each and by method, when its calls began and ended, and their bytes.

    Raises:
        RunFailedError: a member failed; the message has what it said.
    """
    size, store = len(testbed.hosts), f"tcp://{testbed.hosts[0].address}:{PORT}"
    command = [sys.executable, "-m", "benchmarks.collectives.member"]
    arguments = [str(numel), str(repeats)]
    members = [
        start([*command, str(host.index), str(size), store, host.address, *arguments], host) for host in testbed.hosts
    ]
    said = await_all(members, f"{size} members", DEADLINE_S)
    return list(json.loads(said[0].splitlines()[-1]))


def row(result: Result) -> Sequence[str]:
    """Return a result as a line of the table."""
    return (
        result.method,
        str(result.members),
        f"{result.rate_mbit:g}",
        f"{result.seconds * 1e3:.0f}",
        *([f"{speed_up:.2f}" for speed_up in result.speed_ups.values()] + ["", ""])[:2],
        f"{result.bytes_over_formula:.3f}",
        f"{result.seconds_over_link:.2f}",
    )


def main() -> int:
    """Measure every method with every number of members at every rate, and print a Markdown table."""
    parser = argument_parser("benchmarks.collectives", __doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_MESSAGE_NBYTES / 1e6:g} MB, {QUICK_REPEATS} turns, the first of MEMBERS and RATES_MBIT only",
    )
    parser.add_argument("--members", type=int, nargs="+", default=MEMBERS, help="how many, one run each")
    parser.add_argument("--rates-mbit", type=float, nargs="+", default=RATES_MBIT, help="one run each")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns in a run, besides the first")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    nbytes, repeats = MESSAGE_NBYTES, options.repeats
    all_members, rates_mbit = options.members, options.rates_mbit
    if options.quick:
        nbytes, repeats = QUICK_MESSAGE_NBYTES, QUICK_REPEATS
        all_members, rates_mbit = all_members[:1], rates_mbit[:1]

    machine = about("benchmarks.collectives")
    print(heading(machine) + "\n", flush=True)
    results: list[Result] = []
    for members in all_members:
        with Testbed(members) as testbed:
            for rate_mbit in rates_mbit:
                results += measure(testbed, rate_mbit, nbytes, repeats)
    columns = ["method", "members", "Mbit/s", "ms", "over Gloo's", "over float16"]
    columns += ["bytes / needed", "time / link"]
    print(table(columns, [row(result) for result in results]))
    write_json(options.json, machine, results, nbytes=nbytes)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
