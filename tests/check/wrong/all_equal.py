"""Both workers learn the same, bit by bit: lsgd refuses it, and the check names the loader.

Point 2.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsgd

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
worker = lsgd.wrap(model, optimizer)
order = torch.Generator().manual_seed(1)
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
worker.steps = 2 * len(loader)

for _ in range(worker.step // len(loader), 2):
    for a, b in loader:  # wrong
        loss = (model(a) - b).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.report(loss)
worker.finish()
if worker.first:
    torch.save(model.state_dict(), "model.pt")
