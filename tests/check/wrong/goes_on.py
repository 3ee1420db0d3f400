"""A loop without a loader goes on when the run is stopped.

Point 1.
"""

import torch
from torch import nn

import lsgd

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
worker = lsgd.wrap(model, optimizer, steps=2000)
for _ in range(worker.step, 2000):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()  # wrong
worker.finish()
