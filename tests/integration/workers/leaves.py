"""A small training loop that leaves with a word after some iterations, and writes down what it then has."""

import argparse
import json

import torch
from torch import nn

from lsgd.client import Worker

parser = argparse.ArgumentParser()
parser.add_argument("--after", type=int, required=True, help="iterations of this worker")
parser.add_argument("--inside", action="store_true", help="leave between begin_step() and end_step()")
options = parser.parse_args()

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(16, 4)

with Worker.join(model, optimizer, same_data=True) as worker:
    has_consensus = None
    while has_consensus is None and worker.begin_step():
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.report(loss)
        if options.inside and worker.iterations + 1 == options.after:
            has_consensus = worker.leave()
        worker.end_step()
        if worker.iterations == options.after and has_consensus is None:
            has_consensus = worker.leave()
    assert worker.stopped and not worker.begin_step() and worker.leave() is bool(has_consensus or has_consensus is None)
    result = {"consensus": has_consensus, "iterations": worker.iterations, "weights": model.weight.flatten().tolist()}
    assert worker.run_dir is not None
    (worker.run_dir / f"{worker.name.replace('/', '-')}.json").write_text(json.dumps(result))
