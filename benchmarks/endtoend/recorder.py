"""What a worker of benchmarks/endtoend records: copies of its model, to be tested after the run, and their times."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.testbed.interface import counters
from benchmarks.workloads import WideDigits

SNAPSHOTS, MARKS = "snapshots.float32", "marks.json"
"""Names of the files that a worker leaves: models, float32 of shape (marks, parameters), and the times of these."""


class Recorder:
    """Keeps a copy of the model every few steps, to be tested after the run; the clock stands while it copies.

    Args:
        model: this worker's.
        steps: that are recorded; later ones are not.
        every: how many steps lie between two copies.
    """

    def __init__(self, model: nn.Module, steps: int, every: int) -> None:
        self._parameters = list(model.parameters())
        self._every = every
        numel = sum(x.numel() for x in self._parameters)
        self._copies = torch.ones(steps // every, numel)  # written now, so that copying takes no page faults
        self._marks: list[dict[str, float]] = []
        self._start_s: float | None = None

    @torch.no_grad()
    def step_begins(self, position: float) -> None:
        """Note that a step begins when ``position`` steps are made: the mean over all workers where speeds differ.

        The first call starts the clock.
        """
        now = time.perf_counter()
        if self._start_s is None:
            self._start_s = now
        due = (len(self._marks) + 1) * self._every
        if position < due or len(self._marks) == len(self._copies):
            return
        sent_nbytes = counters().sent_nbytes
        torch.cat([x.reshape(-1) for x in self._parameters], out=self._copies[len(self._marks)])
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
    found.add_argument("--width", type=int, required=True)
    found.add_argument("--steps", type=int, required=True)
    found.add_argument("--seed", type=int, required=True)
    return found


def prepare(given: argparse.Namespace) -> tuple[WideDigits, nn.Module, torch.optim.Optimizer, Recorder]:
    """Return the task, its model and optimizer, the same for every method, and what records the model."""
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    task = WideDigits(given.width)
    model = task.model()
    return task, model, task.optimizer(model), Recorder(model, given.steps, task.evaluate_every)
