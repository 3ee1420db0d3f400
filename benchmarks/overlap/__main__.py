"""How much of an exchange hides behind the compute: ``python -m benchmarks.overlap [--quick] [--json FILE]``.

Linux, root. Two hosts (benchmarks/testbed) of one worker each train a wide MLP of 25 million parameters over 100 Mbit/s
with the real servers, ``lsgd launch`` and Worker. Bytes are real. Compute is timed: every layer sleeps, a third of its
time in the forward and two thirds in the backward pass, beside the real passes on a small batch, because two cores
cannot keep two hosts busy for as long as the link is.

The sleeps take turns, none among them. A step's compute alone is timed before the join; the link alone is the step
without sleep less its compute, which is less than it really takes if some of that is hidden already; and

    hidden = (compute alone + link alone - step) / min(compute alone, link alone)

Gradients leave during the backward pass, bucket by bucket, so no more than that can be hidden, and not what leaves
after the last layer. The ceiling is what would be hidden if buckets left when their layers are computed, and one
after another took exactly their share of the link's time. Models leave before the forward pass; the ceiling is 1.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed import Testbed, told
from benchmarks.testbed.launch import await_all, launch_all
from benchmarks.workloads import BACKWARD_SHARE, LAYERS
from lsgd.algorithms import ALGORITHMS
from lsgd.algorithms.gradient import GradientSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings
from lsgd.settings import AlgorithmSettings

WORKERS = 2
RATE_MBIT = 100.0
WIDTH, QUICK_WIDTH = 1250, 320
BUCKET_MIB, QUICK_BUCKET_MIB = GradientSettings().bucket_mib, 1.0
METHODS = ("allreduce", "bytegrad", "qsgd", "decentralized")
QUICK_METHODS = ("bytegrad", "decentralized")
LOADS, QUICK_LOADS = (1.0, 1.5, 2.0), (1.5,)
"""Time of compute over that of the link by arithmetic; at 1.5 the backward pass takes as long."""
REPEATS, QUICK_REPEATS = 3, 2
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    method: str
    load: float
    compute_s: float
    link_s: float
    link_by_arithmetic_s: float
    step_s: float
    hidden: float
    ceiling: float


@dataclass(frozen=True)
class Size:
    """Of the model, its buckets, and the measurement."""

    width: int
    bucket_mib: float
    loads: Sequence[float]
    repeats: int


def measure(method: str, size: Size, folder: Path) -> Iterator[Result]:
    """Yield the result of one method at each load."""
    settings: AlgorithmSettings = ALGORITHMS[method]()
    numel = size.width**2 * LAYERS
    buckets: list[float] = []
    if isinstance(settings, GradientSettings):
        settings = replace(settings, bucket_mib=size.bucket_mib)
        full = size.bucket_mib * 2**20 / 4 / numel
        buckets = [1 % full] * (1 % full > 0) + [full] * int(1 / full)
    arithmetic_s = settings.sent_nbytes(numel, WORKERS) * 8 / (RATE_MBIT * 1e6)
    sleeps_s = [0.0, *(load * arithmetic_s for load in size.loads)]
    found = train(settings, size, sleeps_s, folder)
    steps_s = [statistics.median(seconds) for seconds in found["steps_s"]]
    link_s = steps_s[0] - found["compute_s"][0]
    for load, compute_s, step_s in zip(size.loads, found["compute_s"][1:], steps_s[1:], strict=True):
        shorter_s = min(compute_s, link_s)
        hidden = (compute_s + link_s - step_s) / shorter_s
        ceiling = (compute_s + link_s - fastest_s(compute_s, link_s, buckets)) / shorter_s if buckets else 1.0
        yield Result(method, load, compute_s, link_s, arithmetic_s, step_s, hidden, ceiling)


def fastest_s(compute_s: float, link_s: float, buckets: Sequence[float]) -> float:
    """Return the least time of a step whose ``buckets`` are such shares of all gradients, in order."""
    forward_s, backward_s = compute_s * (1 - BACKWARD_SHARE), compute_s * BACKWARD_SHARE
    computed = sent_at_s = 0.0
    for share in buckets:
        computed += share
        layers = math.ceil(computed * LAYERS - 1e-9)
        sent_at_s = max(sent_at_s, forward_s + backward_s * layers / LAYERS) + link_s * share
    return sent_at_s


def train(
    settings: AlgorithmSettings, size: Size, sleeps_s: Sequence[float], folder: Path
) -> Mapping[str, Sequence[Any]]:
    """Run the workers on two hosts and return what rank 0 has found.

    Raises:
        RunFailedError: a host failed.
    """
    folder.mkdir()
    run = RunSettings(workers=WORKERS, iterations=WORKERS * (len(sleeps_s) * size.repeats + 2))
    script = [sys.executable, "-m", "benchmarks.overlap.worker", str(size.width), *map(str, sleeps_s)]
    with Testbed(WORKERS, rate_mbit=RATE_MBIT) as testbed:
        processes = launch_all(testbed.hosts, Plan(run, (Phase(settings),)), folder, lambda host: script)
        await_all(processes, settings.name, DEADLINE_S)
    return dict(json.loads((folder / "node0" / "overlap.json").read_text()))


def row(result: Result) -> Sequence[str]:
    """Return a result as a line of the table."""
    return (
        result.method,
        f"{result.compute_s:.2f}",
        f"{result.link_s:.2f}",
        f"{result.link_by_arithmetic_s:.2f}",
        f"{result.step_s:.2f}",
        f"{result.hidden:.0%}",
        f"{result.ceiling:.0%}",
    )


def main() -> int:
    """Measure every method, and print a Markdown table."""
    parser = argument_parser("benchmarks.overlap", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, two methods, one load, two turns")
    parser.add_argument("--only", action="append", choices=METHODS, help="run this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="compute over link, by arithmetic")
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_MIB, help="of the gradient methods")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    size = Size(WIDTH, options.bucket_mib, options.loads, options.repeats)
    methods = options.only or METHODS
    if options.quick:
        methods = options.only or QUICK_METHODS
        size = Size(QUICK_WIDTH, QUICK_BUCKET_MIB, QUICK_LOADS, QUICK_REPEATS)

    machine = about("benchmarks.overlap")
    print(heading(machine) + "\n", flush=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as folder:
        for method in methods:
            results += measure(method, size, Path(folder) / method)
    columns = ("method", "compute s", "link s", "by arithmetic", "step s", "hidden", "ceiling")
    print(table(columns, [row(result) for result in results]))
    settings = {"parameters": size.width**2 * LAYERS, "workers": WORKERS, "rate_mbit": RATE_MBIT}
    write_json(options.json, machine, results, **settings)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
