"""Steps and time to a target: ``python -m benchmarks.convergence [--quick] [--json FILE] [--plots FOLDER]``.

Four workers learn handwritten digits (W1) and the standard library's bytes (W2), benchmarks/workloads.py. Those of
lsgd's methods are simulated, threads of one process (lsgd.collectives.simulation, the real algorithms); those of the
baselines are real processes on this machine. All have the same first model, batches, optimizer and learning rate, which
were chosen with DistributedDataParallel and not tuned for any other method. A seed chooses the model, the split and the
batches; methods are compared in pairs of equal seed.

The average of all models is tested every few steps. Counted are the steps of a worker until its loss on the test data
is at the task's target, and its accuracy, as the mean over the last eighth of the tests. Steps need no network; with
the results of benchmarks.network (``--network FILE --link 100mbit``), steps times the time of a step is the time to the
target. Results are written as they come; what the file has is not run again.

hivemind is not among the baselines here: its rounds follow the clock, and a step of these tasks takes milliseconds.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.baselines.environments import interpreters_of
from benchmarks.convergence.runs import WORKERS, Training, prepare, run
from benchmarks.convergence.tables import tables
from benchmarks.methods import ALONE, BASELINES, ONE_MACHINE, OURS, PERIODIC
from benchmarks.report.about import about, argument_parser, heading
from benchmarks.report.results import Results, add_options
from benchmarks.workloads import SHARDS, TASKS

PERIODS, QUICK_PERIODS = (4, 16, 64), (16,)
SEEDS, QUICK_SEEDS = 5, 1
COMMON = ("steps", "learning_rate_times", "shards", "fastest")
METHODS = (ONE_MACHINE, ALONE, *(method for method in BASELINES if method != "hivemind"), *OURS)
QUICK_TASKS, QUICK_METHODS = (
    ("digits",),
    ("ddp", "leader", "elastic", "local", "diloco", "bytegrad", "decentralized"),
)


def run_all(options: argparse.Namespace, pythons: Mapping[str, str], results: Results) -> None:
    """Make the trainings that have no result yet, several at a time."""
    methods = [(m, period) for m in pythons for period in (options.periods if m in PERIODIC else (0,))]
    trainings = [
        Training(task, method, period, seed, *(getattr(options, name) for name in COMMON))
        for task, seed, (method, period) in itertools.product(options.tasks, range(options.seeds), methods)
    ]
    trainings = [training for training in trainings if not results.has(**asdict(training))]
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.jobs, spawn, initializer=prepare)
    running = [pool.submit(run, training, pythons[training.method]) for training in trainings]
    try:
        for training, future in zip(trainings, running, strict=True):
            what = f"{training.task}, seed {training.seed}, {training.method}, period {training.period}"
            results.keep(future.result, what, **asdict(training))
    finally:
        pool.shutdown(cancel_futures=True)


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.convergence", __doc__)
    parser.add_argument("--quick", action="store_true", help="digits, one seed, a period of 16, seven methods")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="which ones")
    parser.add_argument("--periods", type=int, nargs="+", help="of the methods that have one, one run each")
    parser.add_argument("--seeds", type=int, help="how many, from 0")
    parser.add_argument("--steps", type=int, help="of a worker, instead of the task's")
    parser.add_argument(
        "--learning-rate-times", type=float, default=1.0, metavar="X", help="of the task's learning rate"
    )
    parser.add_argument(
        "--shards",
        choices=SHARDS,
        default=SHARDS[0],
        help="anew in each epoch, once, or once by label (digits)",
    )
    parser.add_argument(
        "--fastest", type=float, default=1.0, metavar="X", help="one worker makes X steps while the others make one"
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    add_options(parser, METHODS)
    parser.add_argument("--network", type=Path, help="results of benchmarks.network, for the time to the target")
    parser.add_argument("--link", default="100mbit", help="whose step times are taken from there")
    parser.add_argument("--plots", type=Path, help="draw the curves to PNG files in this folder (needs matplotlib)")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    options.tasks = options.tasks or (QUICK_TASKS if options.quick else tuple(TASKS))
    first = max(TASKS[task].evaluate_every for task in options.tasks)
    if options.steps is not None and options.steps < first:
        parser.error(f"--steps must be at least {first}, when the average is first tested, not {options.steps}")
    options.methods = options.methods or (QUICK_METHODS if options.quick else METHODS)
    options.periods = options.periods or (QUICK_PERIODS if options.quick else PERIODS)
    if options.fastest != 1 and (others := set(options.methods) & set(BASELINES)):
        parser.error(f"--fastest is for simulated workers, not for {', '.join(sorted(others))}; name --methods")
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    return options


def main() -> int:
    """Train with every method, and print a Markdown table for each task."""
    options = options_of()
    pythons = interpreters_of(options.methods, options.baseline_python)
    machine = about("benchmarks.convergence")
    try:
        results = Results(options.json, machine, {"workers": WORKERS})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(heading(machine) + "\n", flush=True)
    run_all(options, pythons, results)
    wanted = [
        row
        for row in results.rows
        if row["task"] in options.tasks
        and row["method"] in options.methods
        and all(row[name] == getattr(options, name) for name in COMMON)
    ]
    network = json.loads(options.network.read_text()) if options.network else None
    print("\n" + tables(wanted, network, options.link, WORKERS))
    if options.plots:
        from benchmarks.convergence.plots import draw_all

        draw_all(wanted, options.plots)
    return results.end(options.methods, pythons)


if __name__ == "__main__":
    sys.exit(main())
