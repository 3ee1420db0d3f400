"""Groups over TCP beside those over Gloo: ``python -m benchmarks.transport [--quick] [--json FILE]``. Linux, root.

Every host (benchmarks/testbed) has a process, all on this machine. In turns they call the same
verbs of :class:`lsgd.collectives.group.Group` with the same float32 tensor over Gloo, over connections of their own,
and over those in TLS; the results are compared. The time of a call is that of the slowest host; a
speed is the median over the turns of Gloo's time over this one's.

A second table has the time of the two-round all-reduce of few numbers in 8 bits over that of sending them to the
neighbors in a ring, which is what low-precision decentralized SGD does (docs/concepts/formulas.md).
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed import LINKS, Testbed, told
from benchmarks.testbed.launch import await_all, start
from benchmarks.transport.member import FEW_IN_TWO_ROUNDS, FEW_TO_NEIGHBORS, VERBS

PORT = 29600
HOSTS = (2,)
NETWORKS = ("unlimited", "1gbit", "100mbit", "100mbit-25ms")
MESSAGE_NBYTES, QUICK_MESSAGE_NBYTES = 25_000_000, 2_500_000
REPEATS, QUICK_REPEATS = 5, 2
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Result:
    """One line of the table: ``speed`` is Gloo's time over this one, ``processor_s`` that of all hosts in a call."""

    hosts: int
    network: str
    verb: str
    transport: str
    turns_s: Sequence[float]
    speed: float
    processor_s: float


def measure(
    testbed: Testbed, network: str, nbytes: int, repeats: int, wanted: Sequence[str] = VERBS
) -> Iterator[Result]:
    """Yield the results of each verb that is wanted, and each transport.

    Raises:
        RunFailedError: a member failed; the message has what it said.
    """
    size, store = len(testbed.hosts), testbed.hosts[0].address
    command = [sys.executable, "-m", "benchmarks.transport.member"]
    members = [
        start([*command, *map(str, (host.index, size, store, PORT, host.address, nbytes // 4, repeats, *wanted))], host)
        for host in testbed.hosts
    ]
    said = [json.loads(text.splitlines()[-1]) for text in await_all(members, f"{size} hosts", DEADLINE_S)]
    for verb in said[0]:
        slowest = {
            transport: [max(member[verb][transport][turn][0] for member in said) for turn in range(repeats)]
            for transport in said[0][verb]
        }
        for transport, seconds in slowest.items():
            speeds = [gloo / own for gloo, own in zip(slowest["gloo"], seconds, strict=True)]
            used = [sum(member[verb][transport][turn][1] for member in said) for turn in range(repeats)]
            yield Result(
                size,
                network,
                verb,
                transport,
                seconds,
                statistics.median(speeds),
                statistics.median(used),
            )


def row(result: Result) -> Sequence[str]:
    """Return a result as a line of the table."""
    return (
        result.network,
        str(result.hosts),
        result.verb,
        result.transport,
        f"{statistics.median(result.turns_s) * 1e3:.1f}",
        f"{result.speed:.2f}",
        f"{result.processor_s * 1e3:.0f}",
    )


def ratio_rows(results: Sequence[Result]) -> list[Sequence[str]]:
    """Return the lines of the second table: the median over the turns of one time over the other."""
    turns = {(r.network, r.hosts, r.transport, r.verb): r.turns_s for r in results}
    rows: list[Sequence[str]] = []
    for (network, hosts, transport, verb), two_rounds in turns.items():
        neighbors = turns.get((network, hosts, transport, FEW_TO_NEIGHBORS))
        if verb == FEW_IN_TWO_ROUNDS and neighbors is not None:
            ratio = statistics.median(one / other for one, other in zip(two_rounds, neighbors, strict=True))
            rows.append((network, str(hosts), transport, f"{ratio:.2f}"))
    return rows


def main() -> int:
    """Measure every verb over every transport on every network, and print a Markdown table."""
    parser = argument_parser("benchmarks.transport", __doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_MESSAGE_NBYTES / 1e6:g} MB, {QUICK_REPEATS} turns, the first of HOSTS and NETWORKS only",
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS, help="how many, one run each")
    parser.add_argument(
        "--verbs", nargs="+", choices=VERBS, default=VERBS, metavar="VERB", help=", ".join(map(repr, VERBS))
    )
    parser.add_argument("--networks", nargs="+", choices=LINKS, default=NETWORKS, help="one run each")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns in a run, besides the first")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    nbytes, repeats = MESSAGE_NBYTES, options.repeats
    all_hosts, networks = options.hosts, options.networks
    if options.quick:
        nbytes, repeats = QUICK_MESSAGE_NBYTES, QUICK_REPEATS
        all_hosts, networks = all_hosts[:1], networks[:1]

    machine = about("benchmarks.transport")
    print(heading(machine) + "\n", flush=True)
    results: list[Result] = []
    for hosts in all_hosts:
        for network in networks:
            rate_mbit, delay_ms = LINKS[network]
            with Testbed(hosts, rate_mbit=rate_mbit, delay_ms=delay_ms) as testbed:
                results += measure(testbed, network, nbytes, repeats, options.verbs)
    columns = ["network", "hosts", "verb", "over", "ms", "speed", "processor ms"]
    print(table(columns, [row(result) for result in results]))
    if ratios := ratio_rows(results):
        print("\n" + table(["network", "hosts", "over", "two rounds / to neighbors"], ratios))
    write_json(options.json, machine, results, nbytes=nbytes)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
