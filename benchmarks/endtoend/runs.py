"""One training of benchmarks/endtoend: a method on the hosts of a testbed."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.endtoend.recorder import MARKS, SNAPSHOTS, task_of, tested
from benchmarks.methods import ALONE, ONE_MACHINE, ONE_MACHINE_SAMPLES, OURS, PERIODIC
from benchmarks.testbed import LINKS, Host, Testbed
from benchmarks.testbed.launch import Process, await_all, launch_all, start
from benchmarks.workloads import Task
from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.plan.plan import DEFAULT as DEFAULT_SETTINGS
from lsgd.plan.plan import Phase, Plan, algorithm_of
from lsgd.plan.run import RunSettings
from lsgd.settings import AlgorithmSettings

MORE_STEPS = 32  # at most, of methods with a period, so that the slower worker too sees the end of those that count
DEADLINE_S = 3600.0
DIGITS = 5  # of a part's loss

DEFAULT = "default"
"""The method of a plan that says nothing: its servers choose the period, and the delay if all train with Muon."""

WAITING = "default-waiting"
"""The method of a plan that says only ``delay = 0``: its servers choose the period, and rounds hide behind no steps."""

CHOSEN: Mapping[str, AlgorithmSettings] = {
    DEFAULT: DEFAULT_SETTINGS(),
    WAITING: algorithm_of({"name": DEFAULT_SETTINGS.name, "delay": 0}, WAITING),
}
"""Settings of the methods whose servers choose the period."""


@dataclass(frozen=True)
class Settings:
    """What all runs have in common.

    Args:
        task: what is learned.
        width: of the wide model's two hidden layers.
        period: steps between exchanges, for the methods that are given one.
        steps: of a worker.
        wire_s: longest that the bytes of all steps may take, by arithmetic; else there are fewer steps.
        nodes: hosts, each with one worker.
    """

    task: str
    width: int
    period: int
    steps: int
    wire_s: float
    nodes: int = 2

    def make_task(self) -> Task:
        """Return the task."""
        return task_of(self.task, self.width)

    def steps_of(self, method: str, link: str, numel: int, every: int) -> int:
        """Return how many steps of a worker are recorded, a multiple of those between two tests."""
        rate_mbit = LINKS[link][0]
        most = self.steps * (self.nodes if method == ONE_MACHINE_SAMPLES else 1)
        if rate_mbit is not None and method not in (*PERIODIC, *CHOSEN):
            step_s = nbytes_of(method, numel, self.nodes) * 8 / (rate_mbit * 1e6)
            most = min(most, int(self.wire_s / step_s)) if step_s else most
        return max(2 * every, most // every * every)


@dataclass(frozen=True)
class Result:
    """One training.

    ``step_s`` and ``sent_nbytes`` leave out the steps before the first test, and more of them where whole periods
    would not remain: an exchange more than there are periods would count otherwise.

    Args:
        steps: of a worker, the mean where speeds differ.
        seconds_to_target: until the average of the models first has the target accuracy; None: never.
        steps_to_target: of a worker, until then.
        step_s: time of a step.
        sent_nbytes: what a host sent for a step, headers of the segments included, the mean over the hosts.
        final_loss: of the trained models' average on all test data, as is ``final_accuracy``.
        curve: step, seconds, loss and accuracy of each test.
    """

    steps: int
    seconds_to_target: float | None
    steps_to_target: int | None
    step_s: float
    sent_nbytes: float
    final_loss: float
    final_accuracy: float
    curve: Sequence[tuple[int, float, float, float]]
    parts: Sequence[float] = ()

    def __str__(self) -> str:
        reached = "never" if self.seconds_to_target is None else f"after {self.seconds_to_target:.1f} s"
        return f"{self.step_s * 1e3:.1f} ms a step, at the target {reached}, final loss {self.final_loss:.4f}"


def settings_of(method: str, period: int) -> AlgorithmSettings:
    """Return the settings of one of lsgd's methods."""
    return CHOSEN[method] if method in CHOSEN else OURS[method](period)


def nbytes_of(method: str, numel: int, nodes: int) -> float:
    """Return what a host must send in a step of a method without a period; 0 where it is next to nothing."""
    if method in OURS:
        return OURS[method](1).sent_nbytes(numel, nodes)
    share = {"ddp": 1.0, "ddp-float16": 0.5}.get(method, 0.0)
    return share * AllReduceSettings().sent_nbytes(numel, nodes)


def run(
    testbed: Testbed, method: str, link: str, seed: int, settings: Settings, python: str, learner: Sequence[str] = ()
) -> Result:
    """Train with a method in a Python of its own, and test what the workers have recorded.

    ``learner`` has the workers' arguments of the optimizer.

    Raises:
        RunFailedError: a host failed.
    """
    task = settings.make_task()
    steps = settings.steps_of(method, link, sum(x.numel() for x in task.model().parameters()), task.evaluate_every)
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as name:
        folder, hosts = Path(name), testbed.hosts
        arguments = [f"--task={settings.task}", f"--width={settings.width}", f"--steps={steps}", f"--seed={seed}"]
        arguments += learner
        if method in OURS or method in CHOSEN:
            processes = start_ours(testbed, method, steps, settings, folder, arguments)
        elif method in (ONE_MACHINE, ONE_MACHINE_SAMPLES):
            hosts = testbed.hosts[:1]
            processes = start_baseline(hosts, ALONE, settings, folder, python, arguments)
        else:
            processes = start_baseline(hosts, method, settings, folder, python, arguments)
        await_all(processes, f"{method}, {link},", DEADLINE_S)
        period = settings.period if method in PERIODIC else 1
        return result_of(task, [folder / host.name for host in hosts], period)


def start_ours(
    testbed: Testbed, method: str, steps: int, settings: Settings, folder: Path, arguments: Sequence[str]
) -> list[Process]:
    """Start the launchers of one of lsgd's methods, whose plans differ from the defaults in the algorithm only."""
    more = min(MORE_STEPS, steps // 4) if method in (*PERIODIC, *CHOSEN) else 1
    limits = RunSettings(workers=settings.nodes, iterations=settings.nodes * (steps + more))
    command = [sys.executable, "-m", "benchmarks.endtoend.worker", *arguments]
    plan = Plan(limits, (Phase(settings_of(method, settings.period)),))
    return launch_all(testbed.hosts, plan, folder, lambda host: command)


def start_baseline(
    hosts: Sequence[Host], method: str, settings: Settings, folder: Path, python: str, arguments: Sequence[str]
) -> list[Process]:
    """Start the processes of a baseline."""
    command = [python, "-m", "benchmarks.endtoend.baseline", *arguments]
    command += [f"--method={method}", f"--period={settings.period}"]
    command += ["--addresses", *(host.address for host in hosts)]
    return [start([*command, f"--rank={host.index}", f"--output={folder / host.name}"], host) for host in hosts]


def result_of(task: Task, folders: Sequence[Path], period: int) -> Result:
    """Return the result of a run from what its workers have left, each in a folder.

    ``period`` is that of the method's exchanges, 1 where it has none.
    """
    marks = [json.loads((folder / MARKS).read_text()) for folder in folders]
    numbers = (folders[0] / SNAPSHOTS).stat().st_size // 4
    models = [torch.from_file(str(folder / SNAPSHOTS), size=numbers).view(len(marks[0]), -1) for folder in folders]
    curve, reached = [], None
    for index, at in enumerate(zip(*marks, strict=True)):
        score = task.test(average_of(task, models, index))
        point = (at[0]["step"], max(one["at_s"] for one in at), score.loss, score.accuracy)
        reached = reached or (point if task.reached(score) else None)
        curve.append(point)
    final = task.measure(average_of(task, models, -1))
    end = curve[-1][0]
    begin = next((index for index, point in enumerate(curve[:-1]) if (end - point[0]) % period == 0), 0)
    steps = end - curve[begin][0]
    sent = sum(one[-1]["sent_nbytes"] - one[begin]["sent_nbytes"] for one in marks) / len(marks)
    return Result(
        end,
        reached[1] if reached else None,
        reached[0] if reached else None,
        (curve[-1][1] - curve[begin][1]) / steps,
        sent / steps,
        final.loss,
        final.accuracy,
        curve,
        [round(loss, DIGITS) for loss in final.parts],
    )


@torch.no_grad()
def average_of(task: Task, models: Sequence[Tensor], index: int) -> nn.Module:
    """Return the model whose tested tensors are the mean of the workers' copies of this index, each float32."""
    model = task.model()
    tensors = tested(model)
    mean = torch.stack([of_one[index] for of_one in models]).mean(0)
    for x, given in zip(tensors, mean.split([x.numel() for x in tensors]), strict=True):
        x.copy_(given.view_as(x))
    return model
