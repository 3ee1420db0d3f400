"""Distillation: a frozen teacher, a student, two loaders of unequal length that are cycled together.

Steps: 200
"""

import sys
from itertools import cycle

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
labelled = DataLoader(TensorDataset(x[297:597], y[297:597]), batch_size=16, shuffle=True)
unlabelled = DataLoader(TensorDataset(x[597:]), batch_size=32, shuffle=True)
teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
before = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
for _ in range(60):  # the teacher is the same everywhere: it trains before the join
    before.zero_grad()
    F.cross_entropy(teacher(x[297:]), y[297:]).backward()
    before.step()
teacher.requires_grad_(False).eval()
student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
worker = lsgd.wrap(student, optimizer, steps=STEPS)  # lsgd
labelled, unlabelled = worker.shard({"a": labelled, "b": unlabelled}).values()  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (a, b), (c,) in zip(cycle(labelled), unlabelled, strict=False):
        both = torch.cat([a, c])
        wanted = teacher(both)
        found = student(both)
        loss = F.cross_entropy(found[: len(b)], b) + F.kl_div(
            F.log_softmax(found / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean"
        )
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(student.state_dict(), "student.pt")
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(student(x[:297]), y[:297]).item():.4f}")
