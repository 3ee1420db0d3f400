"""Each worker evaluates by itself, and the others go on."""

import os

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

for _ in range(worker.step // len(loader), 2):
    for a, b in loader:
        loss = (model(a) - b).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.report(loss)
    with worker.pause(), torch.no_grad():
        model.eval()
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        model.train()
worker.finish()
if worker.first:
    with open("model.pt.part", "wb") as file:
        torch.save(model.state_dict(), file)
    os.replace("model.pt.part", "model.pt")
