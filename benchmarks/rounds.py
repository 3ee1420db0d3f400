"""Seconds that a round of ``local`` takes on a worker alone, without transfers: what is done with the model itself.

    python -m benchmarks.rounds [--parameters 25000000] [--rounds 40]

To compare two versions of lsgd, run this file by its path with PYTHONPATH set to one and the other, in turn.
The model that enters a round is looked at for NaN once; until November 2026 it was three times. With 25 million
parameters and 12 rounds, medians of five runs in turn on a busy machine of two cores: 490 ms before and 451 ms after
by the clock, 95 and 89 ms of one core (a pass over the model takes 5 ms of one core there).
"""

import argparse
import itertools
import os
import statistics
import time

import torch
from torch import nn


class Vector(nn.Module):
    """A model that takes no time: one vector, of which the loss uses one element."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(parameters))

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        return self.weight[0] ** 2


def main() -> None:
    """Train, and print the seconds of a round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    os.environ |= {"LSGD_SOLO": "1", "LSGD_ALGORITHM": "local", "LSGD_PERIOD": "1", "LSGD_COMPRESSION": "none"}
    os.environ |= {"LSGD_ITERATIONS": str(options.rounds), "LSGD_RESCALE": "false"}
    from lsgd.client import Worker  # by now the plan is set

    model = Vector(options.parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    torch.set_num_threads(1)  # so that processor time is what the round needs, whatever else the machine does
    seconds, busy = [], []
    with Worker.join(model, optimizer) as worker:
        before, busy_before = 0.0, time.thread_time()
        for _ in worker.batches(itertools.repeat(0)):
            seconds.append(worker.timings.exchange_s - before)
            busy.append(time.thread_time() - busy_before)
            optimizer.zero_grad(set_to_none=False)
            model().backward()
            optimizer.step()
            before, busy_before = worker.timings.exchange_s, time.thread_time()
    wall, processor = (statistics.median(each[1:]) * 1e3 for each in (seconds, busy))
    print(f"{wall:.1f} ms a round, {processor:.1f} of one core, at {options.parameters:,} parameters")


if __name__ == "__main__":
    main()
