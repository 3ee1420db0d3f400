"""One training of benchmarks/convergence: simulated workers of lsgd, or real ones of a baseline."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.convergence.evaluation import Evaluation, Point
from benchmarks.methods import ALONE, ONE_MACHINE, ONE_MACHINE_SAMPLES, OURS, sent_nbytes
from benchmarks.testbed.launch import await_all, free_port, start
from benchmarks.workloads import TASKS, Score, Task
from lsgd.algorithms.local import LocalSettings
from lsgd.settings import AlgorithmSettings
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, simulate, steps_at

NEVER = 1 << 30  # a period that no run reaches
DIGITS = 5  # of a curve's points
LAST_SHARE = 8  # of the tests, over which a task with a constant learning rate takes the mean of the final ones
DEADLINE_S, SIMULATED_WITHIN_S = 4 * 3600.0, 600.0


@dataclass(frozen=True)
class Training:
    """What is to be trained, and how.

    Args:
        period: 0 for a method that has none.
        steps: of a worker; None: the task's.
        learning_rate_times: the task's learning rate, times this.
        shards: of :data:`benchmarks.workloads.SHARDS`.
        fastest: the first worker makes so many steps while each other one makes one.
        optimizer: of :data:`benchmarks.workloads.OPTIMIZERS`.
    """

    task: str
    method: str
    period: int
    seed: int
    steps: int | None
    learning_rate_times: float
    shards: str = "dealt"
    fastest: float = 1.0
    optimizer: str = "task"

    def __str__(self) -> str:
        rate = "" if self.learning_rate_times == 1 else f", learning rate times {self.learning_rate_times:g}"
        muon = "" if self.optimizer == "task" else f", {self.optimizer}"
        return f"{self.task}, seed {self.seed}, {self.method}, period {self.period}{muon}{rate}"

    def make_task(self) -> Task:
        """Return the task, with this learning rate."""
        task = TASKS[self.task]()
        task.learning_rate *= self.learning_rate_times
        task.shards, task.chosen_optimizer = self.shards, self.optimizer
        return task


@dataclass(frozen=True)
class Result:
    """What came of a training.

    Args:
        steps_to_target: of a worker; None if the target was never reached.
        final_loss: of the trained model, as is ``final_accuracy``, on all test data; the mean over the last eighth of
            the tests where the learning rate does not decay.
        sent_nbytes: by a worker in a step, on average, by formula; None: unknown.
        compute_s: processor time of a step of one worker; None: not measured.
        curve: (step, loss, accuracy) of each test.
        parts: the final loss on each of :data:`benchmarks.workloads.PARTS`; none where it is a mean of tests.
    """

    steps_to_target: int | None
    final_loss: float
    final_accuracy: float
    sent_nbytes: float | None
    compute_s: float | None
    curve: Sequence[Point]
    parts: Sequence[float] = ()

    def __str__(self) -> str:
        last = f"loss {self.final_loss:.4f}, accuracy {self.final_accuracy:.4f}"
        return f"{self.steps_to_target} steps to the target, {last}"


def train(
    task: Task,
    settings: AlgorithmSettings,
    steps: int,
    seed: int,
    workers: int,
    *,
    fastest: float = 1.0,
    or_own: bool = False,
) -> tuple[Sequence[Point], Score, float]:
    """Train simulated workers, each on a node of its own and with its share of the data.

    Returns:
        The curve, in steps of the mean worker, the final score, and the processor seconds of a step of the first
        worker.
    """
    torch.manual_seed(seed)
    start = task.model().state_dict()
    mean = (fastest + workers - 1) / workers

    def member(group: SimulatedGroup) -> tuple[Sequence[Point], Score | None, float]:
        speed = (1.0 if group.rank else fastest) / mean
        model = task.model()
        model.load_state_dict(start)
        probe = partial(task.loss, model, *task.probe_data())
        optimizer, run = task.make_optimizer(model), f"seed {seed}"
        worker = SimulatedWorker.of_model(
            group, settings, model, optimizer, steps=steps, run=run, probe=probe, speed=speed
        )
        evaluation = Evaluation(task, model, worker.average, tests=group.rank == 0, or_own=or_own)
        compute_s, own_steps = 0.0, int(steps * speed)
        batches = task.batches(group.rank, group.size, seed)
        every, own_every = task.evaluate_every, steps_at(speed, task.evaluate_every)
        for step, (x, y) in zip(range(1, own_steps + 1), batches, strict=False):
            task.set_learning_rate(worker.optimizer, (step - 0.5) / own_steps)
            began_s = time.thread_time()
            worker.step(partial(task.loss, model, x, y))
            compute_s += time.thread_time() - began_s
            if step % own_every == 0:
                evaluation.after(step // own_every * every)
        return evaluation.curve, evaluation.end(), compute_s / own_steps

    curve, final, compute_s = simulate((1,) * workers, member, timeout_s=SIMULATED_WITHIN_S)[0]
    assert final is not None, "the first worker is the one that tests"
    return curve, final, compute_s


def run_baseline(
    training: Training, task: Task, steps: int, workers: int, python: str
) -> tuple[Sequence[Point], Score]:
    """Train the workers of a baseline, real processes, and return the curve and the final score.

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
        "optimizer": training.optimizer,
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
        *["127.0.0.1"] * workers,
    ]
    processes = [start([*command, f"--rank={rank}"]) for rank in range(workers)]
    said = await_all(processes, f"{training.method} on {training.task}", DEADLINE_S)
    found = json.loads(said[0].splitlines()[-1])
    return [(int(step), loss, accuracy) for step, loss, accuracy in found["curve"]], Score(**found["final"])


def run(training: Training, workers: int, python: str) -> Result:
    """Train with one method and one seed."""
    task, method, seed = training.make_task(), training.method, training.seed
    steps = training.steps or task.steps
    compute_s: float | None = None
    if method in (ONE_MACHINE, ONE_MACHINE_SAMPLES):
        steps *= workers if method == ONE_MACHINE_SAMPLES else 1
        curve, final, compute_s = train(task, LocalSettings(period=NEVER, compression="none"), steps, seed, 1)
    elif method == ALONE or method in OURS:
        settings = (
            LocalSettings(period=NEVER, compression="none") if method == ALONE else OURS[method](training.period or 1)
        )
        alone, fastest = method == ALONE, training.fastest
        curve, final, compute_s = train(task, settings, steps, seed, workers, fastest=fastest, or_own=alone)
    else:
        curve, final = run_baseline(training, task, steps, workers, python)
    reached = next((step for step, loss, _ in curve if loss <= task.target_loss), None)
    if task.warmup is None:
        last = curve[-max(1, len(curve) // LAST_SHARE) :]
        final = Score(*(sum(each) / len(last) for each in list(zip(*last, strict=True))[1:]))
    short = [(step, round(loss, DIGITS), round(accuracy, DIGITS)) for step, loss, accuracy in curve]
    nbytes = sent_nbytes(method, training.period, task.model(), workers)
    parts = [round(loss, DIGITS) for loss in final.parts]
    return Result(reached, final.loss, final.accuracy, nbytes, compute_s, short, parts)


def prepare() -> None:
    """In a process that trains: take one thread, and end with the process that gives it trainings."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
