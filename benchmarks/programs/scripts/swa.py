"""Stochastic weight averaging of torch: an averaged model from three quarters on, its batch-norm statistics anew.

Steps: 240
Remark: The figure is that of the averaged weights
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS = int(sys.argv[1])
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
data = TensorDataset(x[297:], y[297:])
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
averaged = AveragedModel(model)
worker = lsgd.wrap(model, optimizer, steps=STEPS, extra={"averaged": averaged})  # lsgd
loader = worker.shard(loader)  # lsgd
begins = 3 * STEPS // 4
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, begins, eta_min=0.02)
constant = SWALR(optimizer, swa_lr=0.02, anneal_epochs=5)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [cosine, constant], milestones=[begins])
worker.follow(scheduler)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step >= begins:
            averaged.update_parameters(model)
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    update_bn(DataLoader(data, batch_size=32), averaged)
    torch.save({"model": model.state_dict(), "averaged": averaged.state_dict()}, "model.pt")
    averaged.eval()
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(averaged(x[:297]), y[:297]).item():.4f}")
