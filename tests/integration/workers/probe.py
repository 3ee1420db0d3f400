"""A regression that only worker 1 learns, though worker 0 reports the lower losses; the probe can tell."""

import torch
from torch import nn

from lsgd.client import Worker

torch.manual_seed(1)
model = nn.Linear(8, 1)
inputs = torch.randn(64, 8)
targets = inputs.sum(1, keepdim=True)


def loss() -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with Worker.join(model, optimizer, same_data=True) as worker:
    learns = worker.name == "node0/worker1"
    optimizer.param_groups[0]["lr"] = 0.01 if learns else 0.0
    worker.probe(loss)
    while worker.begin_step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        worker.end_step(100.0 if learns else 0.0)
