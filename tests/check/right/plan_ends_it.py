"""The plan ends the run, and the rate follows its progress.

Variables: LSGD_ITERATIONS=96
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lsgd.client import Worker

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

with Worker.join(model, optimizer) as worker:
    worker.schedule(optimizer, "wsd", warmup=0.1)
    loader = worker.loader(data, batch_size=8)
    while not worker.stopped:
        for a, b in worker.batches(loader):
            loss = (model(a) - b).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    if worker.first:
        torch.save(model.state_dict(), "model.pt")
