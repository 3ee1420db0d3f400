"""A script for torchrun: DistributedDataParallel in a machine, batch norm, metrics of all processes, a schedule."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lsgd

out_dir, epochs, batch_size = Path(sys.argv[1]), int(sys.argv[2]), 16

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)


def points(number, seed):
    """Return points and the quarters that they are in."""
    made = torch.randn(number, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(made, (made > 0).long() @ torch.tensor([2, 1]))


model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(device)
model = DistributedDataParallel(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train, test = points(1920, 1), points(320, 2)
sampler = DistributedSampler(train)
train_loader = DataLoader(train, batch_size=batch_size, sampler=sampler)
worker = lsgd.wrap(model, optimizer)
train_loader = worker.shard(train_loader)
test_loader = DataLoader(test, batch_size=batch_size, sampler=DistributedSampler(test, shuffle=False))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train_loader))
worker.follow(scheduler)


@torch.no_grad()
def evaluate():
    """Return the mean loss over the test data of all processes."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for x, y in test_loader:
        x, y = x.to(device), y.to(device)
        sums += torch.stack([criterion(model(x), y) * len(x), torch.tensor(float(len(x)), device=device)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


for epoch in range(epochs):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
    tested = evaluate()
    if rank == 0:
        print(f"epoch {epoch}: test loss {tested:.4f}", flush=True)
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, out_dir / "snapshot.pt")
    dist.barrier()
    if worker.stopped:
        break

worker.finish()
final = {"val": evaluate(), "lr": scheduler.get_last_lr()[0]}
if rank == 0:
    torch.save(model.module.state_dict(), out_dir / "model.pt")
    (out_dir / "final.json").write_text(json.dumps(final))
dist.destroy_process_group()
