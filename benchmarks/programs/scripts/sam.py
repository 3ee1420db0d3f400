"""Sharpness-aware minimization: two passes a step, the weights moved between them, label noise in the data.

Steps: 200
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS = int(sys.argv[1])
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
noisy = torch.where(torch.rand(len(y)) < 0.1, torch.randint(10, y.shape), y)
loader = DataLoader(TensorDataset(x[297:], noisy[297:]), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm() + 1e-12
        for p in every:
            self.state[p]["was"] = p.detach().clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "was" in self.state[p]:
                    p.copy_(self.state[p]["was"])
        self.base_optimizer.step()
        self.zero_grad()


optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.first_step()
        F.cross_entropy(model(a), b).backward()
        worker.report(loss)  # lsgd
        optimizer.second_step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "model.pt")
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(model(x[:297]), y[:297]).item():.4f}")
