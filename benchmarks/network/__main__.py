"""Step times on slow networks: ``python -m benchmarks.network [--quick] [--json FILE]``. Linux, root.

Every method trains a wide MLP of 25 million parameters (W3) on hosts of the testbed (benchmarks/testbed), lsgd's own
with the real servers, ``lsgd launch`` and Worker. Bytes are real. Compute is timed: the layers sleep, beside real
passes on a small batch, because a few cores cannot keep all hosts busy.

The steps that count are whole periods, after those in which groups are formed; torchft's are formed in the exchange
that counts. Methods without a period exchange in each step. The links have their limit from the first step to the last
of these: the whole models that travel before and after would take minutes at 10 Mbit/s, and are not measured. With
several repeats the methods take turns, and the ratio to DistributedDataParallel is the median over the turns of the
ratio of two runs of one turn. Results are written as they come; what the file has is not run again.

With ``--latencies`` it measures how many messages follow one another in a step: a model of 4,096 parameters without
sleep, on a network where a message is under way for 25 ms.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

from benchmarks.baselines.environments import interpreters_of
from benchmarks.methods import ALL, ONE_MACHINE, SAME_MESSAGES
from benchmarks.network.runs import Result, Run, Settings, measure
from benchmarks.network.tables import latency_table, step_table
from benchmarks.report.about import about, argument_parser, heading
from benchmarks.report.results import Results, add_options
from benchmarks.testbed import LINKS, Testbed, TestbedError
from benchmarks.workloads import WIDTH

NODES = (2, 3, 4)
METHODS = tuple(method for method in ALL if method not in (ONE_MACHINE, *SAME_MESSAGES))
QUICK_METHODS = ("ddp", "ddp-powersgd1", "post-local-sgd", "leader-8bit", "bytegrad", "decentralized")
LATENCY_METHODS = ("ddp", "allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "leader")
ALL_LINKS = ("unlimited", "1gbit", "100mbit", "10mbit", "100mbit-5ms", "100mbit-25ms")
LATENCY_LINK = "100mbit-25ms"

FULL = Settings(WIDTH, compute_ms=100.0, period=64, periods=1, steps=2)
QUICK = Settings(width=320, compute_ms=20.0, period=16, periods=2, steps=8)
LATENCY = Settings(width=16, compute_ms=0.0, period=1, periods=20, steps=20)


def measure_all(options: argparse.Namespace, settings: Settings, pythons: Mapping[str, str], results: Results) -> None:
    """Make the runs that have no result yet."""
    turns = itertools.product(options.nodes, options.links, range(options.repeats), pythons.items())
    for nodes, link, repeat, (method, python) in turns:
        make = partial(run_once, nodes, Run(link, method, python, settings))
        what = f"{nodes} nodes, {link}, {method}"
        results.keep(make, what, nodes=nodes, link=link, method=method, repeat=repeat)


def run_once(nodes: int, run: Run) -> Result:
    """Run a method on a new testbed."""
    with Testbed(nodes, delay_ms=LINKS[run.link][1]) as testbed:
        return measure(testbed, run)


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.network", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, six methods, 100 Mbit/s, two nodes")
    parser.add_argument("--latencies", action="store_true", help="count the messages that follow one another")
    parser.add_argument("--links", nargs="+", choices=LINKS, help="which ones")
    parser.add_argument("--nodes", type=int, nargs="+", help="how many, one run each")
    parser.add_argument("--repeats", type=int, default=1, help="turns of all methods")
    parser.add_argument("--compute-ms", type=float, help="for which a step sleeps")
    parser.add_argument("--period", type=int, help="steps between exchanges, for the methods that have a period")
    parser.add_argument("--periods", type=int, help="that count")
    parser.add_argument("--steps", type=int, help="that count, for the methods that exchange in each one")
    parser.add_argument("--lookahead", type=int, help="iterations that lsgd's workers ask for ahead")
    add_options(parser, ALL)
    options = parser.parse_args()
    if options.latencies:
        options.links, options.methods = options.links or [LATENCY_LINK], options.methods or LATENCY_METHODS
    elif options.quick:
        options.links, options.methods = options.links or ["100mbit"], options.methods or QUICK_METHODS
        options.nodes = options.nodes or [2]
    options.links, options.methods = options.links or ALL_LINKS, options.methods or METHODS
    options.nodes = options.nodes or list(NODES)
    return options


def main() -> int:
    """Measure every method on every link, and print a Markdown table for each."""
    options = options_of()
    settings = LATENCY if options.latencies else QUICK if options.quick else FULL
    given = {name: getattr(options, name) for name in ("compute_ms", "period", "periods", "steps", "lookahead")}
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    pythons = interpreters_of(options.methods, options.baseline_python)
    machine = about("benchmarks.network")
    try:
        results = Results(options.json, machine, {**asdict(settings), "parameters": settings.numel})
        print(heading(machine) + "\n", flush=True)
        measure_all(options, settings, pythons, results)
    except (TestbedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wanted = [row for row in results.rows if row["method"] in options.methods]
    print("\n" + (latency_table(wanted, LINKS) if options.latencies else step_table(wanted)))
    return results.end(options.methods, pythons)


if __name__ == "__main__":
    sys.exit(main())
