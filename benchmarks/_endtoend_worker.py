"""A process of benchmarks/endtoend.py: the worker of one host, of one of lsgd's methods or of a peer."""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks import peers
from benchmarks._meter import interface_counters
from benchmarks.workloads import WideDigits
from lsgd.client import Worker

PORT = 47600
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
        sent_nbytes = interface_counters()[2]
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


def train_ours(task: WideDigits, given: argparse.Namespace) -> None:
    """Train with the plan's method until its end."""
    model = task.model()
    optimizer = task.optimizer(model)
    recorder = Recorder(model, given.steps, task.evaluate_every)
    with Worker.join(model, optimizer) as worker:
        for x, y in worker.batches(task.batches(worker.rank, worker.world_size, given.seed)):
            recorder.step_begins(worker.progress * worker.plan.run.iterations / worker.world_size)
            optimizer.zero_grad()
            loss = task.loss(model, x, y)
            loss.backward()
            optimizer.step()
            worker.report(loss)
        assert worker.run_dir is not None
        recorder.write(worker.run_dir)


def train_peer(task: WideDigits, given: argparse.Namespace) -> None:
    """Train with a peer's method."""
    model = task.model()
    optimizer = task.optimizer(model)
    recorder = Recorder(model, given.steps, task.evaluate_every)
    own, first, size = given.addresses[given.rank], given.addresses[0], len(given.addresses)
    member = peers.Member(given.rank, size, own, first, given.period, task.batch_size)
    batches = task.batches(given.rank, size, given.seed)
    with peers.joined(given.peer, model, optimizer, member, PORT) as (wrapped, stepped):
        for step, (x, y) in zip(range(given.steps), batches, strict=False):
            recorder.step_begins(step)
            stepped.zero_grad()
            task.loss(wrapped, x, y).backward()
            stepped.step()
        recorder.step_begins(given.steps)
    recorder.write(given.output)


def main() -> None:
    """Train, and write what was recorded to the run folder."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--width", type=int, required=True)
    arguments.add_argument("--steps", type=int, required=True)
    arguments.add_argument("--seed", type=int, required=True)
    arguments.add_argument("--peer", choices=peers.PEERS, help="else one of lsgd's methods, by the plan")
    arguments.add_argument("--rank", type=int)
    arguments.add_argument("--addresses", nargs="+", help="of all members, in rank order")
    arguments.add_argument("--period", type=int)
    arguments.add_argument("--output", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    task = WideDigits(given.width)
    (train_peer if given.peer else train_ours)(task, given)


if __name__ == "__main__":
    main()
