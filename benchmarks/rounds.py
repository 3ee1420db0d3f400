"""What a round of ``local`` costs a worker itself, in copies of its model: processor time, without the network.

    python -m benchmarks.rounds [--parameters 25000000] [--rounds 20] [--workers 2]

The workers are simulated, threads with the real algorithm and codec; all settings but the period are the defaults.
Each round is timed on one core, and so is a copy of the model before it; the medians of the first worker are printed.
To compare two versions of lsgd, run this file by its path with PYTHONPATH set to one and the other, in turn.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from lsgd.algorithms.base import Flat
from lsgd.algorithms.local import LocalSettings
from lsgd.collectives.group import Group
from lsgd.protocol.messages import Round
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, land, simulate

NOISE = 1e-3
"""How far an element of the model moves between two rounds."""


class Vector(nn.Module):
    """A model that takes no time: one vector, of which the loss uses one element."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(parameters))

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        return self.weight[0] ** 2


def times(members: SimulatedGroup, numel: int, rounds: int) -> tuple[list[float], list[float]]:
    """Train, and return the processor seconds of each round and of each copy of the model."""
    model = Vector(numel)
    worker = SimulatedWorker.of_model(members, LocalSettings(period=1), model, torch.optim.SGD(model.parameters(), 0.0))
    exchange, other = worker.algorithm.before_forward, torch.empty(numel)
    rounds_s, copies_s = list[float](), list[float]()

    @torch.no_grad()
    def timed(parameters: Flat, group: Group, order: Round) -> None:
        start = time.thread_time()
        other.copy_(parameters[0])
        copied = time.thread_time()
        land(exchange(parameters, group, order))
        rounds_s.append(time.thread_time() - copied)
        copies_s.append(copied - start)
        parameters[0].add_(torch.randn(numel), alpha=NOISE)

    worker.algorithm.before_forward = timed  # type: ignore[method-assign]
    for _ in range(rounds + 1):
        worker.step(model)
    return rounds_s[1:], copies_s[1:]  # nobody has a change in the first one


def main() -> None:
    """Train, and print what a round costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = simulate((1,) * options.workers, lambda group: times(group, options.parameters, options.rounds))[0]
    round_s, copy_s = map(statistics.median, found)
    print(
        f"{options.workers} workers, {options.parameters:,} parameters: a round takes {round_s * 1e3:.1f} ms of one "
        f"core, as long as {round_s / copy_s:.1f} copies of the model"
    )


if __name__ == "__main__":
    main()
