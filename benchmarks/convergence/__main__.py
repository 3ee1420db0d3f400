"""Loss, steps and time to a target: ``python -m benchmarks.convergence [--quick] [--json FILE] [--plots FOLDER]``.

Two to sixteen workers learn a task of benchmarks/workloads.py. By default these are ``text`` (the next byte, by a small
transformer; ``text-full`` is its full size: a million parameters, 4,096 steps, hours), ``vit`` (handwritten digits, by
a vision transformer) and ``skewed`` (digits, of which each worker has some labels only). One worker alone ends far
behind there. ``digits`` and ``bytes`` are easier, and their learning rate is constant.

Workers of lsgd's methods are simulated, threads of one process (lsgd.testing.simulation, the real algorithms);
those of the baselines are real processes on this machine. All have the same first model, batches, optimizer and
schedule. ``one-machine`` is one worker with all data and the steps of one worker, ``one-machine-samples`` the same with
the steps of all. ``alone`` exchanges nothing; kept is the better of the average and the first worker's own model.

``--tune`` gives every method the same budget: the learning rate times 0.5, 1 and 2 on two seeds that are not reported,
then the reported seeds with the best. Without it, learning rates are those chosen with DistributedDataParallel, times
``--learning-rate-times``. ``--optimizer muon`` takes ``lsgd.client.muon`` instead of the task's optimizer, for all
methods. A seed chooses the model, the split and the batches; runs of equal seed are compared.

Where both are run, a table says how many steps of one machine a method's final loss is worth, and whether the task can
show what exchanges are worth at all: not if synchronous training with two workers, on a network that costs nothing, is
worth less than 1.6 machines.

The average of all models is tested every few steps. Counted are the steps of a worker until its loss on the test data
is at the task's target, and its final loss and accuracy. Bytes are by formula. Seconds to the target are computed for
links of 1 Gbit, 100 and 10 Mbit: steps times (the processor time of a step, measured, plus bytes over bandwidth, one
after the other). With the results of benchmarks.network (``--network FILE --link 100mbit``) they are also steps times
the measured time of a step there. Results are written as they come; what the file has is not run again.

hivemind is not among the baselines here: its rounds follow the clock, and a step of these tasks takes milliseconds.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.baselines.environments import interpreters_of
from benchmarks.convergence.runs import Training, prepare, run
from benchmarks.convergence.tables import tables
from benchmarks.convergence.tuning import SEEDS as TRIAL_SEEDS
from benchmarks.convergence.tuning import reported, trials, tuned
from benchmarks.methods import ALONE, BASELINES, ONE_MACHINE, ONE_MACHINE_SAMPLES, OURS, PERIODIC
from benchmarks.report.about import about, argument_parser, heading
from benchmarks.report.results import Results, add_options
from benchmarks.workloads import SHARDS, TASKS, add_learner_options

DEFAULT_TASKS = ("text", "vit", "skewed")
WORKERS = (2, 3, 4, 8, 16)
PERIODS, QUICK_PERIODS = (4, 16, 64), (16,)
SEEDS, QUICK_SEEDS = 3, 1
METHODS = (ONE_MACHINE, ONE_MACHINE_SAMPLES, ALONE, *(method for method in BASELINES if method != "hivemind"), *OURS)
QUICK_TASKS, QUICK_METHODS = (
    ("digits",),
    ("ddp", "leader", "elastic", "local", "diloco", "bytegrad", "decentralized"),
)


def trainings_of(options: argparse.Namespace, methods: Sequence[str]) -> Sequence[Training]:
    """Return all trainings that the options ask for, with the learning rate that they have or begin with."""
    return [
        Training(
            *(task, method, period, seed, options.steps, options.learning_rate_times),
            *(options.shards or TASKS[task].shards, options.fastest, options.optimizer),
        )
        for task, seed, method in itertools.product(options.tasks, range(options.seeds), methods)
        for period in (options.periods if method in PERIODIC else (0,))
    ]


def run_all(options: argparse.Namespace, pythons: Mapping[str, str], results: Results) -> None:
    """Make the trainings that have no result yet, several at a time; those that tune come first."""
    trainings = trainings_of(options, list(pythons))
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.jobs, spawn, initializer=prepare)

    def make(trainings: Sequence[Training]) -> None:
        trainings = [training for training in trainings if not results.has(**asdict(training))]
        running = [pool.submit(run, training, options.workers, pythons[training.method]) for training in trainings]
        for training, future in zip(trainings, running, strict=True):
            results.keep(future.result, str(training), **asdict(training))

    try:
        if options.tune:
            make(trials(trainings))
            trainings = tuned(trainings, results.rows, options.learning_rate_times)
        make(trainings)
    finally:
        pool.shutdown(cancel_futures=True)


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.convergence", __doc__)
    parser.add_argument("--quick", action="store_true", help="digits, one seed, a period of 16, seven methods")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="which ones")
    parser.add_argument(
        "--workers", type=int, choices=WORKERS, default=4, help="how many, each on a machine of its own"
    )
    parser.add_argument("--periods", type=int, nargs="+", help="of the methods that have one, one run each")
    parser.add_argument("--seeds", type=int, help="how many, from 0")
    parser.add_argument("--steps", type=int, help="of a worker, instead of the task's")
    parser.add_argument("--tune", action="store_true", help="find the best of three learning rates for each method")
    add_learner_options(parser)
    parser.add_argument(
        "--shards",
        choices=SHARDS,
        help="anew in each epoch, once, or once by label (digits), instead of the task's",
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
    options.tasks = options.tasks or (QUICK_TASKS if options.quick else DEFAULT_TASKS)
    first = max(TASKS[task].evaluate_every for task in options.tasks)
    if options.steps is not None and options.steps < first:
        parser.error(f"--steps must be at least {first}, when the average is first tested, not {options.steps}")
    options.methods = options.methods or (QUICK_METHODS if options.quick else METHODS)
    options.periods = options.periods or (QUICK_PERIODS if options.quick else PERIODS)
    if options.fastest != 1 and (others := set(options.methods) & set(BASELINES)):
        parser.error(f"--fastest is for simulated workers, not for {', '.join(sorted(others))}; name --methods")
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    return options


def rows_of(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the results that the options ask for."""
    if options.tune:
        rows = reported(rows, options.learning_rate_times)
    else:
        rows = [
            r for r in rows if r["seed"] not in TRIAL_SEEDS and r["learning_rate_times"] == options.learning_rate_times
        ]
    return [
        row
        for row in rows
        if row["task"] in options.tasks
        and row["method"] in options.methods
        and (row["steps"], row["fastest"]) == (options.steps, options.fastest)
        and row["optimizer"] == options.optimizer
        and row["shards"] == (options.shards or TASKS[row["task"]].shards)
    ]


def main() -> int:
    """Train with every method, and print a Markdown table for each task."""
    options = options_of()
    pythons = interpreters_of(options.methods, options.baseline_python)
    machine = about("benchmarks.convergence")
    try:
        results = Results(options.json, machine, {"workers": options.workers})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in results.rows:
        row.setdefault("optimizer", "task")  # written before there was a choice
    print(heading(machine) + "\n", flush=True)
    run_all(options, pythons, results)
    wanted = rows_of(options, results.rows)
    network = json.loads(options.network.read_text()) if options.network else None
    print("\n" + tables(wanted, network, options.link, options.workers))
    if options.plots:
        from benchmarks.convergence.plots import draw_all

        draw_all(wanted, options.plots, options.workers)
    return results.end(options.methods, pythons)


if __name__ == "__main__":
    sys.exit(main())
