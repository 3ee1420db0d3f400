"""Averaged weights are in the model for an evaluation, and the trained ones come back."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsgd

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
worker = lsgd.wrap(model, optimizer, extra={"ema": ema})
loader = worker.shard(DataLoader(data, batch_size=8, shuffle=True))
worker.steps = 2 * len(loader)

for _ in range(worker.step // len(loader), 2):
    for a, b in loader:
        loss = (model(a) - b).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        worker.report(loss)
    trained = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, mean in zip(model.parameters(), ema.module.parameters(), strict=True):
            p.copy_(mean)
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        for p, mine in zip(model.parameters(), trained, strict=True):
            p.copy_(mine)
worker.finish()
if worker.first:
    torch.save(model.state_dict(), "model.pt")
