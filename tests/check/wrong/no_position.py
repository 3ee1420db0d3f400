"""A loader of its own begins anew after a resume.

Point 6.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lsgd

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
worker = lsgd.wrap(model, optimizer)
mine = Subset(data, worker.rows(len(data)))
loader = DataLoader(mine, batch_size=8)
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
