"""Seconds to an accuracy: ``python -m benchmarks.endtoend [--link 100mbit] [--json FILE] [--plot FILE]``. Linux, root.

Two hosts of the testbed (benchmarks/testbed) or more (``--nodes``), one worker each, train an MLP of 5 million
parameters (W4) on scikit-learn's digits, or another task (``--task``); lsgd's methods with the real servers,
``lsgd launch`` and Worker.
Compute and bytes are real, and all processes share this machine's cores, so that what a method computes for its
exchange costs it time too. First model, batches, optimizer and learning rate are the same for all; a seed chooses model
and batches, and tables have medians over the seeds. ``--period`` is that of all methods that are given one. ``default``
is a plan that says nothing: the servers choose its period, and with Muon its delay, which is 0 in ``default-waiting``.
``one-machine`` is one worker with all data, which makes the steps of one; ``one-machine-samples`` those of all.
``--optimizer muon`` takes ``lsgd.client.muon`` instead of the task's optimizer, for all methods. A file may have the
results of both: the table shows all that it has, and so does the picture unless ``--optimizer`` is given.

The clock starts with the first step, when processes have met and have the same model. Every eight steps each worker
copies its model, while its clock stands; the average of the workers' models is tested after the run. That average
exists when the last worker has made the copy. ``alone`` never exchanges anything: its average is what a single exchange
at that time would give.

Methods whose bytes alone would take longer than ``Settings.wire_s`` for all steps make as many as that allows. Results
are written as they come; what the file has is not run again.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.baselines.environments import interpreters_of
from benchmarks.endtoend.runs import CHOSEN, Result, Settings, run
from benchmarks.endtoend.tables import table_of
from benchmarks.methods import ALONE, BASELINES, ONE_MACHINE, ONE_MACHINE_SAMPLES
from benchmarks.report.about import about, argument_parser, heading
from benchmarks.report.results import Results, add_options
from benchmarks.testbed import LINKS, Testbed, TestbedError
from benchmarks.workloads import TASKS, WideDigits, add_learner_options

METHODS = (
    *(ONE_MACHINE, ONE_MACHINE_SAMPLES),
    *BASELINES,
    *(ALONE, *CHOSEN),
    *("leader", "leader-8bit", "leader-8bit-delay", "local-8bit", "local-2bit", "local-2bit-delay"),
    *("diloco", "sparse"),
    *("low_precision_decentralized", "bytegrad"),
)
QUICK_METHODS = ("ddp", "ddp-powersgd1", "post-local-sgd", "leader-8bit", "local-8bit", "bytegrad")

NODES = (2, 3, 4)
WIDTH, PERIOD, WIRE_S = 2200, 64, 120.0
QUICK = Settings(task=WideDigits.name, width=512, period=16, steps=72, wire_s=4.0)


def settings_of(options: argparse.Namespace) -> Settings:
    """Return what all runs have in common."""
    if options.quick:
        return QUICK
    steps = options.steps or (WideDigits.steps if options.task == WideDigits.name else TASKS[options.task].steps)
    return Settings(options.task, WIDTH, options.period, steps, options.wire_s, options.nodes)


def run_all(options: argparse.Namespace, settings: Settings, pythons: Mapping[str, str], results: Results) -> None:
    """Make the runs that have no result yet."""
    for seed, (method, python) in itertools.product(range(options.seeds), pythons.items()):
        learner = {"optimizer": options.optimizer, "learning_rate_times": options.learning_rate_times}
        make = partial(run_once, method, options.link, seed, settings, python, learner)
        results.keep(make, f"{method}, seed {seed}", link=options.link, method=method, seed=seed, **learner)


def run_once(
    method: str, link: str, seed: int, settings: Settings, python: str, learner: Mapping[str, object]
) -> Result:
    """Train with a method on a new testbed."""
    rate_mbit, delay_ms = LINKS[link]
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in learner.items()]
    with Testbed(settings.nodes, rate_mbit=rate_mbit, delay_ms=delay_ms) as testbed:
        return run(testbed, method, link, seed, settings, python, arguments)


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.endtoend", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small wide model, six methods, few steps")
    parser.add_argument("--task", choices=(WideDigits.name, *TASKS), default=WideDigits.name, help="what is learned")
    parser.add_argument("--period", type=int, default=PERIOD, help="of the methods that are given one")
    parser.add_argument("--steps", type=int, help="of a worker, instead of the task's")
    parser.add_argument("--wire-s", type=float, default=WIRE_S, help="longest time of all steps' bytes, by arithmetic")
    parser.add_argument("--link", choices=LINKS, default="100mbit", help="the network between the hosts")
    parser.add_argument("--nodes", type=int, choices=NODES, default=2, help="how many hosts")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    add_learner_options(parser)
    add_options(parser, METHODS)
    parser.add_argument("--target-loss", type=float, help="of table and picture, instead of the task's")
    parser.add_argument("--plot", type=Path, help="draw the loss, or W4's accuracy, over seconds to this PNG file")
    options = parser.parse_args()
    options.methods = options.methods or (QUICK_METHODS if options.quick else METHODS)
    return options


def main() -> int:
    """Train with every method on one link, and print a Markdown table."""
    options = options_of()
    settings = settings_of(options)
    pythons = interpreters_of(options.methods, options.baseline_python)
    torch.set_num_threads(1)
    machine = about("benchmarks.endtoend")
    try:
        results = Results(options.json, machine, asdict(settings))
        for row in results.rows:  # written before there was a choice
            row.setdefault("optimizer", "task")
            row.setdefault("learning_rate_times", 1.0)
        print(heading(machine) + "\n", flush=True)
        run_all(options, settings, pythons, results)
    except (TestbedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [r for r in results.rows if r["link"] == options.link and r["method"] in options.methods]
    print(f"\n{table_of(rows, options.target_loss)}")
    if options.plot:
        from benchmarks.endtoend.plot import draw

        losses = settings.task != WideDigits.name
        title = f"{settings.task}, {settings.nodes} hosts, {options.link}, period {settings.period} where it is given"
        target = TASKS[settings.task].target_loss if losses else WideDigits.target_accuracy
        target = options.target_loss or target
        learner = (options.optimizer, options.learning_rate_times)
        any_learner = options.optimizer == "task"
        shown = [
            row
            for row in rows
            if row["seed"] < options.seeds
            and (any_learner or (row["optimizer"], row["learning_rate_times"]) == learner)
        ]
        draw(shown, title, target, options.plot, losses=losses)
    return results.end(options.methods, pythons)


if __name__ == "__main__":
    sys.exit(main())
