"""Seconds to an accuracy: ``python -m benchmarks.endtoend [--link 100mbit] [--json FILE] [--plot FILE]``. Linux, root.

Two hosts of the laboratory (benchmarks/lab.py), one worker each, train an MLP of 5 million parameters (W4) on
scikit-learn's digits; lsgd's methods with the real servers, ``lsgd launch`` and Worker. Compute and bytes are real, and
all processes share this machine's cores, so that what a method computes for its exchange costs it time too. First
model, batches, optimizer, learning rate and period are the same for all; a seed chooses model and batches, and tables
have medians over the seeds.

The clock starts with the first step, when processes have met and have the same model. Every eight steps each worker
copies its model, while its clock stands; the average of the workers' models is tested after the run. That average
exists when the last worker has made the copy. ``alone`` never exchanges anything: its average is what a single exchange
at that time would give.

Methods whose bytes alone would take longer than ``Settings.wire_s`` for all steps make as many as that allows. Results
are written as they come; what the file has is not run again.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._about import about, argument_parser, heading, table
from benchmarks._endtoend_recorder import MARKS, SNAPSHOTS
from benchmarks._launch import RunFailedError, await_all, launch, start
from benchmarks._results import Results
from benchmarks.lab import Lab, LabError
from benchmarks.methods import OURS, PEERS, PERIODIC, add_peer_python, interpreters_of, settings_of
from benchmarks.network import LINKS
from benchmarks.workloads import WideDigits
from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

NODES = 2
BASELINE = "ddp"
METHODS = (
    *PEERS,
    "alone",
    *("leader", "leader-8bit", "leader-8bit-delay", "local-8bit", "diloco"),
    *("low_precision_decentralized", "bytegrad"),
)
QUICK_METHODS = ("ddp", "ddp-powersgd1", "post-local-sgd", "leader-8bit", "local-8bit", "bytegrad")
MORE_STEPS = 8  # of methods with a period, so that the slower worker too sees the end of those that count
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Settings:
    """What all runs have in common.

    Args:
        width: of the model's two hidden layers.
        period: steps between exchanges, for the methods that have a period.
        steps: of a worker.
        wire_s: longest that the bytes of all steps may take, by arithmetic; else there are fewer steps.
    """

    width: int
    period: int
    steps: int
    wire_s: float

    def steps_of(self, method: str, link: str, numel: int) -> int:
        """Return how many steps of a worker are recorded, a multiple of those between two tests."""
        rate_mbit, every = LINKS[link][0], WideDigits.evaluate_every
        most = self.steps
        if rate_mbit is not None and method not in PERIODIC:
            step_s = nbytes_of(method, numel) * 8 / (rate_mbit * 1e6)
            most = min(most, int(self.wire_s / step_s)) if step_s else most
        return max(2 * every, most // every * every)


FULL = Settings(width=2200, period=64, steps=WideDigits.steps, wire_s=120.0)
QUICK = Settings(width=512, period=16, steps=72, wire_s=4.0)


@dataclass(frozen=True)
class Result:
    """One training; ``step_s`` and ``sent_nbytes`` leave out the steps before the first test.

    Args:
        seed: of the first model, the split and the batches.
        steps: of a worker, the mean where speeds differ.
        seconds_to_target: until the average of the models first has the target accuracy; None: never.
        steps_to_target: of a worker, until then.
        step_s: time of a step.
        sent_nbytes: what a host sent for a step, headers of the segments included, the mean over the hosts.
        final_accuracy: in the last test.
        curve: step, seconds and accuracy of each test.
    """

    link: str
    method: str
    seed: int
    steps: int
    seconds_to_target: float | None
    steps_to_target: int | None
    step_s: float
    sent_nbytes: float
    final_accuracy: float
    curve: Sequence[tuple[int, float, float]]


def nbytes_of(method: str, numel: int) -> float:
    """Return what a host must send in a step of a method without a period; 0 where it is next to nothing."""
    if method in OURS:
        return settings_of(method, period=1).sent_nbytes(numel, NODES)
    share = {"ddp": 1.0, "ddp-float16": 0.5}.get(method, 0.0)
    return share * AllReduceSettings().sent_nbytes(numel, NODES)


def run(lab: Lab, method: str, link: str, seed: int, settings: Settings, python: str) -> Result:
    """Train with a method in a Python of its own, and test what the workers have recorded.

    Raises:
        RunFailedError: a host failed.
    """
    task = WideDigits(settings.width)
    steps = settings.steps_of(method, link, sum(x.numel() for x in task.model().parameters()))
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as name:
        folder = Path(name)
        arguments = [f"--width={settings.width}", f"--steps={steps}", f"--seed={seed}"]
        if method in OURS:
            processes = start_ours(lab, method, steps, settings, folder, arguments)
        else:
            processes = start_peer(lab, method, settings, folder, python, arguments)
        await_all(processes, f"{method}, {link},", DEADLINE_S)
        return result_of(task, method, link, seed, [folder / host.name for host in lab.hosts])


def start_ours(
    lab: Lab, method: str, steps: int, settings: Settings, folder: Path, arguments: Sequence[str]
) -> "list[subprocess.Popen[str]]":
    """Start the launchers of one of lsgd's methods, whose plan differs from the defaults in the period only."""
    more = MORE_STEPS if method in PERIODIC else 1
    limits = RunSettings(workers=NODES, iterations=NODES * (steps + more))
    plan = folder / "plan.toml"
    plan.write_text(Plan(limits, (Phase(settings_of(method, settings.period)),)).to_toml())
    command = [sys.executable, "-m", "benchmarks._endtoend_worker", *arguments]
    return [launch(host, lab.hosts, plan, folder, command) for host in lab.hosts]


def start_peer(
    lab: Lab, method: str, settings: Settings, folder: Path, python: str, arguments: Sequence[str]
) -> "list[subprocess.Popen[str]]":
    """Start the processes of a peer."""
    command = [python, "-m", "benchmarks._endtoend_peer", *arguments]
    command += [f"--method={method}", f"--period={settings.period}"]
    command += ["--addresses", *(host.address for host in lab.hosts)]
    return [
        start(host, [*command, f"--rank={host.index}", f"--output={folder / host.name}"])
        for host in lab.hosts
    ]


def result_of(task: WideDigits, method: str, link: str, seed: int, folders: Sequence[Path]) -> Result:
    """Return the result of a run from what its workers have left, each in a folder."""
    marks = [json.loads((folder / MARKS).read_text()) for folder in folders]
    numbers = (folders[0] / SNAPSHOTS).stat().st_size // 4
    models = [
        torch.from_file(str(folder / SNAPSHOTS), size=numbers).view(len(marks[0]), -1) for folder in folders
    ]
    curve = []
    for index, at in enumerate(zip(*marks, strict=True)):
        mean = torch.stack([of_one[index] for of_one in models]).mean(0)
        curve.append((at[0]["step"], max(one["at_s"] for one in at), accuracy_of(task, mean)))
    steps = curve[-1][0] - curve[0][0]
    sent = sum(one[-1]["sent_nbytes"] - one[0]["sent_nbytes"] for one in marks) / len(marks)
    reached = next((point for point in curve if point[2] >= task.target_accuracy), None)
    return Result(
        link,
        method,
        seed,
        curve[-1][0],
        reached[1] if reached else None,
        reached[0] if reached else None,
        (curve[-1][1] - curve[0][1]) / steps,
        sent / steps,
        curve[-1][2],
        curve,
    )


def accuracy_of(task: WideDigits, parameters: Tensor) -> float:
    """Return the accuracy on the test data of the model with these parameters, float32 in one dimension."""
    model = task.model()
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    return task.test(model).accuracy


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of the runs on one link: medians over the seeds, and the range of the seconds."""
    columns = ("method", "seeds", "steps", "s to target", "range", "over DDP", "steps to target")
    columns += ("ms a step", "over DDP", "MB a step", "final accuracy")
    methods = dict.fromkeys(row["method"] for row in rows)
    of_method = {method: [row for row in rows if row["method"] == method] for method in methods}
    base = of_method.get(BASELINE, [])
    return table(columns, [_line(runs, base) for runs in of_method.values()])


def _line(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    seconds = [never_is_inf(run["seconds_to_target"]) for run in runs]
    reached = _median(runs, "seconds_to_target")
    base_reached = _median(base, "seconds_to_target") if base else math.inf
    steps, step_s = _median(runs, "steps_to_target"), _median(runs, "step_s")
    return (
        runs[0]["method"],
        str(len(runs)),
        f"{_median(runs, 'steps'):.0f}",
        _seconds(reached),
        f"{_seconds(min(seconds))} to {_seconds(max(seconds))}" if len(runs) > 1 else "",
        f"{base_reached / reached:.2f}" if math.isfinite(reached) and math.isfinite(base_reached) else "",
        f"{steps:.0f}" if math.isfinite(steps) else "",
        f"{step_s * 1e3:.1f}",
        f"{_median(base, 'step_s') / step_s:.2f}" if base else "",
        f"{_median(runs, 'sent_nbytes') / 1e6:.3f}",
        f"{_median(runs, 'final_accuracy'):.4f}",
    )


def never_is_inf(value: float | None) -> float:
    """Return when the target was reached; infinity for a run that never did."""
    return math.inf if value is None else value


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(never_is_inf(run[name]) for run in runs)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "never"


def run_all(
    options: argparse.Namespace, settings: Settings, pythons: Mapping[str, str], results: Results
) -> Iterator[str]:
    """Make the runs that have no result yet; yield what failed."""
    rate_mbit, delay_ms = LINKS[options.link]
    for seed, (method, python) in itertools.product(range(options.seeds), pythons.items()):
        if results.has(link=options.link, method=method, seed=seed):
            continue
        try:
            with Lab(NODES, rate_mbit=rate_mbit, delay_ms=delay_ms) as lab:
                result = run(lab, method, options.link, seed, settings, python)
        except RunFailedError as error:
            print(error, file=sys.stderr, flush=True)
            yield method
            continue
        results.add(asdict(result))
        reached = "never" if result.seconds_to_target is None else f"after {result.seconds_to_target:.1f} s"
        what = f"{method}, seed {seed}"
        print(f"{what}: {result.step_s * 1e3:.1f} ms a step, at the target {reached}", flush=True)


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.endtoend", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, six methods, few steps")
    parser.add_argument("--link", choices=LINKS, default="100mbit", help="the wire between the hosts")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="which ones")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0")
    add_peer_python(parser)
    parser.add_argument(
        "--json", type=Path, help="write the results to this file as they come, and go on with those"
    )
    parser.add_argument(
        "--plot", type=Path, help="draw accuracy over seconds to this PNG file (needs matplotlib)"
    )
    options = parser.parse_args()
    options.methods = options.methods or (QUICK_METHODS if options.quick else METHODS)
    return options


def main() -> int:
    """Train with every method on one wire, and print a Markdown table."""
    options = options_of()
    settings = QUICK if options.quick else FULL
    pythons = interpreters_of(options.methods, options.peer_python)
    torch.set_num_threads(1)
    machine = about("benchmarks.endtoend")
    try:
        results = Results(options.json, machine, asdict(settings))
        print(heading(machine) + "\n", flush=True)
        failed = list(run_all(options, settings, pythons, results))
    except (LabError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [r for r in results.rows if r["link"] == options.link and r["method"] in options.methods]
    print(f"\n{table_of(rows)}")
    if options.plot:
        from benchmarks._endtoend_plot import draw

        title = (
            f"Digits, MLP of width {settings.width}, {NODES} hosts, {options.link}, period {settings.period}"
        )
        draw(rows, title, WideDigits.target_accuracy, options.plot)
    missing = [method for method in options.methods if method not in pythons]
    if missing:
        print(f"\nnot installed: {', '.join(missing)}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
