"""A script for torchrun with DDP inside a machine: DistributedSampler and all-reduced metrics.

Steps: 200
Alone: -m torch.distributed.run --standalone --nproc-per-node=2
Launch: --processes-per-worker 2
Remark: Each machine has two processes. A check takes each worker as one process
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lsgd  # lsgd

STEPS = int(sys.argv[1])
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)))
rank = dist.get_rank()
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
data = TensorDataset(x[297:], y[297:])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
worker.follow(scheduler)  # lsgd
step = epoch = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    sampler.set_epoch(epoch)
    epoch += 1
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
model.eval()
with torch.no_grad():
    loss = F.cross_entropy(model.module(x[:297]), y[:297])
dist.all_reduce(loss)
if rank == 0 and worker.first:  # lsgd: if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
    print(f"held-out loss: {loss.item() / dist.get_world_size():.4f}")
dist.destroy_process_group()
