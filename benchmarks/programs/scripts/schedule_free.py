"""schedule-free AdamW: no schedule, and the optimizer itself is switched between training and evaluation.

Needs: schedulefree
Steps: 300
"""

import sys

import schedulefree
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
loader = DataLoader(TensorDataset(x[297:], y[297:]), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=STEPS // 20)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd


@torch.no_grad()
def evaluate():
    model.eval()
    optimizer.eval()
    loss = F.cross_entropy(model(x[:297]), y[:297]).item()
    model.train()
    optimizer.train()
    return loss


step = 0
step = worker.step  # lsgd
optimizer.train()
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break
    print(f"step {step}: {evaluate():.4f}")

worker.finish()  # lsgd
if worker.first:  # lsgd
    print(f"held-out loss: {evaluate():.4f}")
    optimizer.eval()
    torch.save(model.state_dict(), "model.pt")
