"""Two trainings, one after the other: the second one joins again."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lsgd

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
for fold in (0, 1):
    torch.manual_seed(fold)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    worker = lsgd.wrap(model, optimizer)
    rows = [row for row in range(256) if row % 4 != fold]
    loader = worker.shard(DataLoader(Subset(data, rows), batch_size=8, shuffle=True))
    worker.steps = 2 * len(loader)
    for _ in range(worker.step // len(loader), 2):
        for a, b in loader:
            loss = (model(a) - b).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    worker.finish()
    if worker.first:
        torch.save(model.state_dict(), f"model{fold}.pt")
