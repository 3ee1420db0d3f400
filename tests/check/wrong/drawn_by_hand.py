"""Both draw the same batches by hand, from a generator with one seed.

Point 2.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lsgd

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
worker = lsgd.wrap(model, optimizer)
worker.steps = 32
order = torch.Generator().manual_seed(1)

for _ in range(worker.step, 32):
    rows = torch.randint(len(x), (8,), generator=order)
    loss = (model(x[rows]) - x[rows].sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # wrong
    worker.report(loss)
    if worker.stopped:
        break
worker.finish()
if worker.first:
    torch.save(model.state_dict(), "model.pt")
