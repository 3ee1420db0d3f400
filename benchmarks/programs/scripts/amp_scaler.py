"""Mixed precision by hand: autocast, GradScaler, accumulation, a scheduler by epochs, a convolutional network.

Steps: 120
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS, ACCUMULATE, PER_EPOCH = int(sys.argv[1]), 2, 20
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
loader = DataLoader(TensorDataset(x[297:], y[297:]), batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=50)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
worker = lsgd.wrap(model, optimizer, steps=STEPS, extra={"scaler": scaler})  # lsgd
loader = worker.shard(loader)  # lsgd
worker.follow(scheduler, lambda: worker.step // PER_EPOCH)  # lsgd
step, micro = 0, 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for a, b in loader:
        micro += 1
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(a), b)
        worker.report(loss)  # lsgd
        scaler.scale(loss / ACCUMULATE).backward()
        if micro % ACCUMULATE:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1
        step = worker.step  # lsgd
        if step % PER_EPOCH == 0:
            scheduler.step()
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "model.pt")
    model.eval()
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(model(x[:297]), y[:297]).item():.4f}")
