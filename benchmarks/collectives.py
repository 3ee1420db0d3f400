"""The all-reduce in 8 bits against Gloo's: ``python -m benchmarks.collectives [--quick] [--json FILE]``. Linux, root.

Every member is a process on a host of its own (benchmarks/lab.py), all on this machine. In turns they reduce the same
float32 message with Gloo's all_reduce, with the float16 hook of DistributedDataParallel, and in two rounds of 8 bits
(lsgd.quantized on lsgd.client.groups.TorchGroup). The time of a call is that of the slowest member; a speed-up is the
median over the turns of the ratio of two calls of one turn. Bytes are counted where the wire's rate is, with the
headers of every packet, and compared with codes and scales alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._about import about, heading, table
from benchmarks.lab import Lab, LabError
from lsgd.kernels import DEFAULT_BLOCK
from lsgd.wire import coded

ROOT = Path(__file__).parents[1]
PORT = 29500
MEMBERS = (2, 4)
RATES_MBIT = (100.0, 1000.0)
MESSAGE_NBYTES, QUICK_MESSAGE_NBYTES = 25_000_000, 2_500_000  # of float32
REPEATS, QUICK_REPEATS = 7, 3
DEADLINE_S = 600.0
BYTES_PER_NUMBER: Mapping[str, float] = {"float32": 4.0, "float16": 2.0, "8 bits": coded(DEFAULT_BLOCK)}


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    members: int
    rate_mbit: float
    method: str
    seconds: float
    speed_up_over_float32: float
    speed_up_over_float16: float
    bytes_over_formula: float
    seconds_over_wire: float


def measure(lab: Lab, rate_mbit: float, nbytes: int, repeats: int) -> Iterator[Result]:
    """Yield the results of each method at one rate."""
    lab.set_rate(rate_mbit)
    size, numel = len(lab.hosts), nbytes // 4
    everyone = run(lab, numel, repeats)
    turns = {
        name: [
            max(calls[turn][0] for calls in (member[name] for member in everyone)) for turn in range(repeats)
        ]
        for name in everyone[0]
    }
    for name, per_number in BYTES_PER_NUMBER.items():
        needed = 2 * (size - 1) / size * numel * per_number
        sent = statistics.median(nbytes for member in everyone for _, nbytes in member[name])
        seconds = statistics.median(turns[name])
        yield Result(
            size,
            rate_mbit,
            name,
            seconds,
            ratio(turns["float32"], turns[name]),
            ratio(turns["float16"], turns[name]),
            sent / needed,
            seconds / (needed * 8 / (rate_mbit * 1e6)),
        )


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median over the turns of ``one / other``."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def run(lab: Lab, numel: int, repeats: int) -> list[dict[str, list[tuple[float, int]]]]:
    """Run a member on each host and return, for each, the seconds and bytes of its calls by method.

    Raises:
        RuntimeError: a member failed; the message has what it said.
    """
    size, store = len(lab.hosts), f"tcp://{lab.hosts[0].address}:{PORT}"
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    members = []
    for host in lab.hosts:
        arguments = [str(host.index), str(size), store, str(numel), str(repeats)]
        members.append(
            host.popen(
                [sys.executable, "-m", "benchmarks._collective_member", *arguments],
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [member.communicate(timeout=DEADLINE_S) for member in members]
    if any(member.returncode for member in members):
        raise RuntimeError("a member failed:\n" + "\n".join(error for _, error in said))
    return list(json.loads(said[0][0]))


def row(result: Result) -> Sequence[str]:
    """Return a result as a line of the table."""
    return (
        result.method,
        str(result.members),
        f"{result.rate_mbit:g}",
        f"{result.seconds * 1e3:.0f}",
        f"{result.speed_up_over_float32:.2f}",
        f"{result.speed_up_over_float16:.2f}",
        f"{result.bytes_over_formula:.3f}",
        f"{result.seconds_over_wire:.2f}",
    )


def main() -> int:
    """Measure every method with every number of members at every rate, and print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
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
    try:
        for members in all_members:
            with Lab(members) as lab:
                for rate_mbit in rates_mbit:
                    results += measure(lab, rate_mbit, nbytes, repeats)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    columns = ["all-reduce", "members", "Mbit/s", "ms", "over float32", "over float16"]
    columns += ["bytes / needed", "time / wire"]
    print(table(columns, [row(result) for result in results]))
    if options.json:
        text = json.dumps({**machine, "nbytes": nbytes, "results": [asdict(r) for r in results]}, indent=2)
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
