"""Noise comes from a generator of its own, which begins anew after a resume.

Point 6.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsgd

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
worker = lsgd.wrap(model, optimizer)
loader = worker.shard(DataLoader(data, batch_size=8, shuffle=True))
worker.steps = 2 * len(loader)
noise = torch.Generator().manual_seed(worker.rank)

for _ in range(worker.step // len(loader), 2):
    for a, b in loader:
        a = a + 0.1 * torch.randn(a.shape, generator=noise)
        loss = (model(a) - b).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # wrong
        worker.report(loss)
worker.finish()
if worker.first:
    torch.save(model.state_dict(), "model.pt")
