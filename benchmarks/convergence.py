"""Steps and time to a target: ``python -m benchmarks.convergence [--quick] [--json FILE] [--plots FOLDER]``.

Four workers learn handwritten digits (W1) and the standard library's bytes (W2), benchmarks/workloads.py. Those of
lsgd's methods are simulated, threads of one process (lsgd.collectives.simulation, the real algorithms); those of
the peers are real
processes on this machine. All have the same first model, batches, optimizer and learning rate, which were chosen with
DistributedDataParallel and not tuned for any other method. A seed chooses the model, the split and the batches; methods
are compared in pairs of equal seed.

The average of all models is tested every few steps. Counted are the steps of a worker until its loss on the test data
is at the task's target, and its accuracy, as the mean over the last eighth of the tests. Steps need no network; with
the results of benchmarks.network (``--network FILE --link 100mbit``), steps times the time of a step is the time to the
target. Results are written as they come; what the file has is not run again.

hivemind is not among the peers here: its rounds follow the clock, and a step of these tasks takes milliseconds.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks._about import about, argument_parser, heading
from benchmarks._convergence_tables import tables
from benchmarks._evaluation import Point
from benchmarks._launch import RunFailedError, await_all
from benchmarks._results import Results
from benchmarks._training import train
from benchmarks.methods import OURS, PEERS, PERIODIC, add_peer_python, interpreters_of, settings_of
from benchmarks.workloads import TASKS, Task

ROOT = Path(__file__).parents[1]
WORKERS = 4
PERIODS, QUICK_PERIODS = (4, 16, 64), (16,)
SEEDS, QUICK_SEEDS = 5, 1
METHODS = (*(method for method in PEERS if method != "hivemind"), *OURS)
QUICK_TASKS, QUICK_METHODS = (
    ("digits",),
    ("ddp", "leader", "elastic", "local", "diloco", "bytegrad", "decentralized"),
)
DIGITS = 5  # of a curve's points
LAST_SHARE = 8  # the final accuracy is the mean over the last eighth of the tests
DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Training:
    """What is to be trained, and how.

    Args:
        period: 0 for a method that has none.
        steps: of a worker; None: the task's.
        learning_rate_times: the task's learning rate, times this.
    """

    task: str
    method: str
    period: int
    seed: int
    steps: int | None
    learning_rate_times: float

    def make_task(self) -> Task:
        """Return the task, with this learning rate."""
        task = TASKS[self.task]()
        task.learning_rate *= self.learning_rate_times
        return task


@dataclass(frozen=True)
class Result:
    """What came of a training.

    Args:
        steps_to_target: of a worker; None if the target was never reached.
        final_loss: mean over the last tests, as is ``final_accuracy``.
        curve: (step, loss, accuracy) of each test.
    """

    steps_to_target: int | None
    final_loss: float
    final_accuracy: float
    curve: Sequence[Point]


def run_peer(training: Training, task: Task, steps: int, python: str) -> Sequence[Point]:
    """Train the workers of a peer, real processes, and return the curve.

    Raises:
        RunFailedError: one failed; its error is on standard error.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = {
        "task": training.task,
        "method": training.method,
        "period": training.period or 1,
        "steps": steps,
        "seed": training.seed,
        "learning-rate": task.learning_rate,
        "workers": WORKERS,
        "port": port,
    }
    flags = [f"--{name}={value}" for name, value in given.items()]
    command = [python, "-m", "benchmarks._convergence_peer", *flags]
    processes = [
        subprocess.Popen(
            [*command, f"--rank={rank}"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(WORKERS)
    ]
    said = await_all(processes, f"{training.method} on {training.task}", DEADLINE_S)
    return [(int(step), loss, accuracy) for step, loss, accuracy in json.loads(said[0])]


def run(training: Training, python: str) -> Result:
    """Train with one method and one seed."""
    task = training.make_task()
    steps = training.steps or task.steps
    if training.method in OURS:
        settings = settings_of(training.method, training.period or 1)
        curve = train(task, settings, WORKERS, steps, training.seed)
    else:
        curve = run_peer(training, task, steps, python)
    reached = next((step for step, loss, _ in curve if loss <= task.target_loss), None)
    last = curve[-max(1, len(curve) // LAST_SHARE) :]
    loss = sum(loss for _, loss, _ in last) / len(last)
    accuracy = sum(accuracy for _, _, accuracy in last) / len(last)
    short = [(step, round(loss, DIGITS), round(accuracy, DIGITS)) for step, loss, accuracy in curve]
    return Result(reached, loss, accuracy, short)


def run_all(options: argparse.Namespace, pythons: Mapping[str, str], results: Results) -> Iterator[str]:
    """Make the trainings that have no result yet, several at a time; yield what failed."""
    methods = [(m, period) for m in pythons for period in (options.periods if m in PERIODIC else (0,))]
    trainings = [
        Training(task, method, period, seed, options.steps, options.learning_rate_times)
        for task, seed, (method, period) in itertools.product(options.tasks, range(options.seeds), methods)
    ]
    trainings = [training for training in trainings if not results.has(**asdict(training))]
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.jobs, spawn, initializer=_prepare)
    running = [pool.submit(run, training, pythons[training.method]) for training in trainings]
    try:
        for training, future in zip(trainings, running, strict=True):
            try:
                result = future.result()
            except RunFailedError as error:
                print(error, file=sys.stderr, flush=True)
                yield f"{training.method} on {training.task}"
                continue
            results.add({**asdict(training), **asdict(result)})
            what = f"{training.task}, seed {training.seed}, {training.method}, period {training.period}"
            reached = f"{result.steps_to_target} steps to the target"
            print(f"{what}: {reached}, accuracy {result.final_accuracy:.4f}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare() -> None:
    """In a process that trains: take one thread, and end with the process that gives it trainings."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.convergence", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="digits, one seed, a period of 16, seven methods"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="which ones")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="which ones")
    parser.add_argument("--periods", type=int, nargs="+", help="of the methods that have one, one run each")
    parser.add_argument("--seeds", type=int, help="how many, from 0")
    parser.add_argument("--steps", type=int, help="of a worker, instead of the task's")
    parser.add_argument(
        "--learning-rate-times", type=float, default=1.0, metavar="X", help="of the task's learning rate"
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    add_peer_python(parser)
    parser.add_argument(
        "--network", type=Path, help="results of benchmarks.network, for the time to the target"
    )
    parser.add_argument("--link", default="100mbit", help="whose step times are taken from there")
    parser.add_argument(
        "--json", type=Path, help="write the results to this file as they come, and go on with those"
    )
    parser.add_argument(
        "--plots", type=Path, help="draw the curves to PNG files in this folder (needs matplotlib)"
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    options.tasks = options.tasks or (QUICK_TASKS if options.quick else tuple(TASKS))
    first = max(TASKS[task].evaluate_every for task in options.tasks)
    if options.steps is not None and options.steps < first:
        parser.error(
            f"--steps must be at least {first}, when the average is first tested, not {options.steps}"
        )
    options.methods = options.methods or (QUICK_METHODS if options.quick else METHODS)
    options.periods = options.periods or (QUICK_PERIODS if options.quick else PERIODS)
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    return options


def main() -> int:
    """Train with every method, and print a Markdown table for each task."""
    options = options_of()
    pythons = interpreters_of(options.methods, options.peer_python)
    machine = about("benchmarks.convergence")
    try:
        results = Results(options.json, machine, {"workers": WORKERS})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(heading(machine) + "\n", flush=True)
    failed = list(run_all(options, pythons, results))
    wanted = [
        row
        for row in results.rows
        if row["task"] in options.tasks
        and row["method"] in options.methods
        and (row["steps"], row["learning_rate_times"]) == (options.steps, options.learning_rate_times)
    ]
    network = json.loads(options.network.read_text()) if options.network else None
    print("\n" + tables(wanted, network, options.link, WORKERS))
    if options.plots:
        from benchmarks._convergence_plots import draw_all

        draw_all(wanted, options.plots)
    missing = [method for method in options.methods if method not in pythons]
    if missing:
        print(f"\nnot installed: {', '.join(missing)}")
    if failed:
        print(f"\nfailed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
