"""The training script of benchmarks/newcomer: a model all of which changes in a step that is a sleep."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from lsgd.client import Worker


class Weights(nn.Module):
    """Weights with the distribution of a layer's at its start."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel).uniform_(-0.03, 0.03))


def main() -> None:
    """Train until killed; the arguments are a file for notes, the seed, the parameters, and the seconds of a step."""
    path, seed, numel, step_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Weights(numel)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(os.getpid())
    model.weight.grad = torch.randn(numel)
    with path.open("a", buffering=1) as file, Worker.join(model, optimizer, same_data=True) as worker:

        def note(event: str) -> None:
            spent = worker.timings
            moved = {"sent_nbytes": spent.sent_nbytes, "received_nbytes": spent.received_nbytes}
            file.write(json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **moved}) + "\n")

        note("joined")
        while worker.begin_step():
            note("step")
            optimizer.step()
            time.sleep(step_s)
            worker.end_step()


if __name__ == "__main__":
    main()
