"""The training script of benchmarks/overlap: a wide MLP whose layers take a set time beside what they compute."""

import argparse
import json
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.workloads import TimedMLP, timed_step
from lsgd.client import Worker

BATCH_SIZE = 2


def step(model: TimedMLP, optimizer: torch.optim.Optimizer, x: Tensor, sleep_s: float) -> None:
    """Make one iteration that sleeps for ``sleep_s`` beside what it computes."""
    model.sleep_s = sleep_s
    timed_step(model, optimizer, x)


def alone(model: TimedMLP, optimizer: torch.optim.Optimizer, x: Tensor, sleeps_s: Sequence[float]) -> list[float]:
    """Return the least seconds of three iterations with each sleep, without any exchange."""

    def step_s(sleep_s: float) -> float:
        start = time.perf_counter()
        step(model, optimizer, x, sleep_s)
        return time.perf_counter() - start

    step_s(0.0)  # warms up
    return [min(step_s(sleep_s) for _ in range(3)) for sleep_s in sleeps_s]


def main() -> None:
    """Train with the sleeps in turns; rank 0 writes the seconds of every iteration, by sleep, and those alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("width", type=int)
    parser.add_argument("sleeps_s", type=float, nargs="+")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = TimedMLP(given.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(1024, given.width)
    compute_s = alone(model, optimizer, data[:BATCH_SIZE], given.sleeps_s)
    steps_s: list[list[float]] = [[] for _ in given.sleeps_s]
    with Worker.join(model, optimizer) as worker:
        loader = worker.loader(TensorDataset(data), batch_size=BATCH_SIZE)
        started_at, turn = 0.0, -1  # the first iteration builds the groups, and is not counted
        while not worker.stopped:
            for (x,) in worker.batches(loader):
                now = time.perf_counter()
                if turn > 0:
                    steps_s[(turn - 1) % len(given.sleeps_s)].append(now - started_at)
                started_at, turn = now, turn + 1
                step(model, optimizer, x, given.sleeps_s[(turn - 1) % len(given.sleeps_s)] if turn else 0.0)
        if worker.rank == 0:
            assert worker.run_dir is not None
            result = {"compute_s": compute_s, "steps_s": steps_s}
            (worker.run_dir / "overlap.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
