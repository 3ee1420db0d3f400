"""An optimizer that evaluates a closure several times."""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsgd

torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
worker = lsgd.wrap(model, optimizer)
loader = worker.shard(DataLoader(data, batch_size=8, shuffle=True))
worker.steps = 2 * len(loader)

for _ in range(worker.step // len(loader), 2):
    for a, b in loader:

        def closure(a=a, b=b):
            optimizer.zero_grad()
            loss = (model(a) - b).square().mean()
            loss.backward()
            return loss

        worker.report(optimizer.step(closure))
worker.finish()
if worker.first:
    save_file(model.state_dict(), "model.safetensors")
