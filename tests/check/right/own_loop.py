"""A loop of its own length, with a schedule, noise, an evaluation that all share, and one file at the end."""

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
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, worker.steps - 10)
last = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 10)
scheduler = worker.follow(torch.optim.lr_scheduler.SequentialLR(optimizer, [cosine, last], [worker.steps - 10]))

for _ in range(worker.step // len(loader), 2):
    for a, b in loader:
        loss = (model(a) - b).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        worker.report(loss)
    model.eval()
    with torch.no_grad():
        validation = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    model.train()
    worker.mean({"validation": validation})
worker.finish()
if worker.first:
    torch.save(model.state_dict(), "model.pt")
