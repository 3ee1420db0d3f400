"""L-BFGS with a closure that it evaluates several times a step, on large batches.

Steps: 40
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
loader = DataLoader(TensorDataset(x[297:], y[297:]), batch_size=300, shuffle=True)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.LBFGS(
    model.parameters(),
    lr=0.1,
    max_iter=4,
    history_size=8,
    line_search_fn="strong_wolfe",  # lsgd
)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for a, b in loader:

        def closure(a=a, b=b):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b) + 1e-4 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            worker.report(loss)  # lsgd
            return loss

        optimizer.step(closure)
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "model.pt")
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(model(x[:297]), y[:297]).item():.4f}")
