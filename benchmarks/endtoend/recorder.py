"""What a worker of benchmarks/endtoend records: copies of its model, to be tested after the run, and their times."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.testbed.interface import counters
from benchmarks.workloads import TASKS, Task, WideDigits, add_learner_options
from lsgd.flat import floating_buffers

SNAPSHOTS, MARKS = "snapshots.float32", "marks.json"
"""Names of the files that a worker leaves: models, float32 of shape (marks, elements), and the times of these."""


def tested(model: nn.Module) -> list[Tensor]:
    """Return what a copy has of a model: its parameters, and statistics such as those of batch norm."""
    return [*model.parameters(), *floating_buffers(model)]


class Recorder:
    """Keeps a copy of the model every few steps, to be tested after the run; the clock stands while it copies.

    Args:
        task: what is learned.
        model: this worker's.
        optimizer: of the model; its learning rate follows the steps.
        steps: that are recorded; later ones are not.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._task, self._optimizer, self._steps = task, optimizer, steps
        self._tensors = tested(model)
        every = self._every = task.evaluate_every
        numel = sum(x.numel() for x in self._tensors)
        self._copies = torch.ones(steps // every, numel)  # written now, so that copying takes no page faults
        self._marks: list[dict[str, float]] = []
        self._start_s: float | None = None

    @torch.no_grad()
    def step_begins(self, position: float) -> None:
        """Note that a step begins when ``position`` steps are made: the mean over all workers where speeds differ.

        The first call starts the clock.
        """
        self._task.set_learning_rate(self._optimizer, min(1.0, (position + 0.5) / self._steps))
        now = time.perf_counter()
        if self._start_s is None:
            self._start_s = now
        due = (len(self._marks) + 1) * self._every
        if position < due or len(self._marks) == len(self._copies):
            return
        sent_nbytes = counters().sent_nbytes
        torch.cat([x.reshape(-1) for x in self._tensors], out=self._copies[len(self._marks)])
        self._marks.append({"step": due, "at_s": now - self._start_s, "sent_nbytes": sent_nbytes})
        self._start_s += time.perf_counter() - now

    def write(self, folder: Path) -> None:
        """Write the copies and their times to ``folder``.

        Raises:
            RuntimeError: the run has ended before the last copy.
        """
        if len(self._marks) < len(self._copies):
            raise RuntimeError(f"the run has ended before step {(len(self._marks) + 1) * self._every}")
        folder.mkdir(parents=True, exist_ok=True)
        self._copies.numpy().tofile(folder / SNAPSHOTS)
        (folder / MARKS).write_text(json.dumps(self._marks))


def parser() -> argparse.ArgumentParser:
    """Return the arguments that every worker has."""
    found = argparse.ArgumentParser()
    found.add_argument("--task", required=True)
    found.add_argument("--width", type=int, required=True)
    found.add_argument("--steps", type=int, required=True)
    found.add_argument("--seed", type=int, required=True)
    add_learner_options(found)
    return found


def task_of(name: str, width: int) -> Task:
    """Return a task; the width is that of the wide one."""
    return WideDigits(width) if name == WideDigits.name else TASKS[name]()


def prepare(given: argparse.Namespace) -> tuple[Task, nn.Module, torch.optim.Optimizer, Recorder]:
    """Return the task, its model and optimizer, the same for every method, and what records the model."""
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    task = task_of(given.task, given.width)
    model = task.model()
    task.chosen_optimizer = given.optimizer
    task.learning_rate *= given.learning_rate_times
    optimizer = task.make_optimizer(model)
    return task, model, optimizer, Recorder(task, model, optimizer, given.steps)
