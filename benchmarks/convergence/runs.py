"""One training of benchmarks/convergence: simulated workers of lsgd, or real ones of a baseline."""

import json
import multiprocessing
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.convergence.evaluation import Evaluation, Point
from benchmarks.methods import ALONE, ONE_MACHINE, OURS
from benchmarks.testbed.launch import await_all, free_port, start
from benchmarks.workloads import TASKS, Task
from lsgd.algorithms.local import LocalSettings
from lsgd.collectives.simulation import SimulatedGroup, SimulatedWorker, simulate, steps_at
from lsgd.settings import AlgorithmSettings

WORKERS = 4
NEVER = 1 << 30  # a period that no run reaches
DIGITS = 5  # of a curve's points
LAST_SHARE = 8  # the final accuracy is the mean over the last eighth of the tests
DEADLINE_S, SIMULATED_WITHIN_S = 3600.0, 600.0


@dataclass(frozen=True)
class Training:
    """What is to be trained, and how.

    Args:
        period: 0 for a method that has none.
        steps: of a worker; None: the task's.
        learning_rate_times: the task's learning rate, times this.
        shards: of :data:`benchmarks.workloads.SHARDS`.
        fastest: the first worker makes so many steps while each other one makes one.
    """

    task: str
    method: str
    period: int
    seed: int
    steps: int | None
    learning_rate_times: float
    shards: str = "dealt"
    fastest: float = 1.0

    def make_task(self) -> Task:
        """Return the task, with this learning rate."""
        task = TASKS[self.task]()
        task.learning_rate *= self.learning_rate_times
        task.shards = self.shards
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

    def __str__(self) -> str:
        return f"{self.steps_to_target} steps to the target, accuracy {self.final_accuracy:.4f}"


def train(
    task: Task, settings: AlgorithmSettings, steps: int, seed: int, workers: int = WORKERS, fastest: float = 1.0
) -> Sequence[Point]:
    """Train simulated workers, each on a node of its own and with its share of the data; return the curve.

    Steps are those of the mean worker.
    """
    torch.manual_seed(seed)
    start = task.model().state_dict()
    mean = (fastest + workers - 1) / workers

    def member(group: SimulatedGroup) -> Sequence[Point]:
        speed = (1.0 if group.rank else fastest) / mean
        model = task.model()
        model.load_state_dict(start)
        probe = partial(task.loss, model, *task.probe_data())
        optimizer, run = task.optimizer(model), f"seed {seed}"
        worker = SimulatedWorker.of_model(
            group, settings, model, optimizer, steps=steps, run=run, probe=probe, speed=speed
        )
        evaluation = Evaluation(task, model, worker.average, tests=group.rank == 0)
        batches = task.batches(group.rank, group.size, seed)
        every, own_every = task.evaluate_every, steps_at(speed, task.evaluate_every)
        for step, (x, y) in zip(range(1, int(steps * speed) + 1), batches, strict=False):
            worker.step(partial(task.loss, model, x, y))
            if step % own_every == 0:
                evaluation.after(step // own_every * every)
        return evaluation.curve

    return simulate((1,) * workers, member, timeout_s=SIMULATED_WITHIN_S)[0]


def run_baseline(training: Training, task: Task, steps: int, python: str) -> Sequence[Point]:
    """Train the workers of a baseline, real processes, and return the curve.

    Raises:
        RunFailedError: one failed.
    """
    given = {
        "task": training.task,
        "method": training.method,
        "period": training.period or 1,
        "steps": steps,
        "seed": training.seed,
        "shards": training.shards,
        "learning-rate": task.learning_rate,
        "port": free_port(),
    }
    flags = [f"--{name}={value}" for name, value in given.items()]
    command = [
        python,
        "-m",
        "benchmarks.convergence.baseline",
        *flags,
        "--addresses",
        *["127.0.0.1"] * WORKERS,
    ]
    processes = [start([*command, f"--rank={rank}"]) for rank in range(WORKERS)]
    said = await_all(processes, f"{training.method} on {training.task}", DEADLINE_S)
    return [(int(step), loss, accuracy) for step, loss, accuracy in json.loads(said[0].splitlines()[-1])]


def run(training: Training, python: str) -> Result:
    """Train with one method and one seed."""
    task = training.make_task()
    steps = training.steps or task.steps
    if training.method in (ONE_MACHINE, ALONE):
        workers = 1 if training.method == ONE_MACHINE else WORKERS
        curve = train(task, LocalSettings(period=NEVER), steps, training.seed, workers, training.fastest)
    elif training.method in OURS:
        settings = OURS[training.method](training.period or 1)
        curve = train(task, settings, steps, training.seed, fastest=training.fastest)
    else:
        curve = run_baseline(training, task, steps, python)
    reached = next((step for step, loss, _ in curve if loss <= task.target_loss), None)
    last = curve[-max(1, len(curve) // LAST_SHARE) :]
    loss = sum(loss for _, loss, _ in last) / len(last)
    accuracy = sum(accuracy for _, _, accuracy in last) / len(last)
    short = [(step, round(loss, DIGITS), round(accuracy, DIGITS)) for step, loss, accuracy in curve]
    return Result(reached, loss, accuracy, short)


def prepare() -> None:
    """In a process that trains: take one thread, and end with the process that gives it trainings."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
