"""The training script of benchmarks/efficiency: steps that are timed sleeps, so that two cores suffice for many."""

import sys
import time

import torch
from torch.utils.data import TensorDataset

from lsgd.client import Worker


def main() -> None:
    """Train until the run ends; a step takes as many seconds as the argument says."""
    step_s = float(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(4096, 32))
    with Worker.join(model, optimizer) as worker:
        loader = worker.loader(data, batch_size=8)
        while not worker.stopped:
            for (x,) in worker.batches(loader):
                ends_at = time.monotonic() + step_s
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                worker.report(loss)
                time.sleep(max(0.0, ends_at - time.monotonic()))


if __name__ == "__main__":
    main()
