"""A Trainer class for torchrun like minGPT-ddp's: DDP, DistributedSampler, snapshots, bfloat16 and gradient clipping.

Steps: 200
Launch: --torchrun
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
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)  # without torchrun
os.environ.setdefault("MASTER_PORT", "0")


class Trainer:
    def __init__(self, model, optimizer, data):
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.model, self.optimizer, self.step = DistributedDataParallel(model), optimizer, 0
        self.loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
        self.worker = lsgd.wrap(self.model, self.optimizer, steps=STEPS)  # lsgd
        self.loader = self.worker.shard(self.loader)  # lsgd
        self.local_rank = self.global_rank = 0 if self.worker.first else 1  # lsgd
        self.step = self.worker.step  # lsgd

    def run_batch(self, x, y):
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        self.worker.report(loss)  # lsgd
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1

    def train(self):
        while self.step < STEPS and not self.worker.stopped:  # lsgd: while self.step < STEPS:
            for x, y in self.loader:
                self.run_batch(x, y)
                if self.step == STEPS:
                    break
            if self.global_rank == 0:
                torch.save({"model": self.model.module.state_dict(), "step": self.step}, "snapshot.pt")


dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), TensorDataset(x[297:], y[297:]))
trainer.train()
trainer.worker.finish()  # lsgd
if trainer.global_rank == 0:
    torch.save({"model": model.state_dict(), "step": trainer.step}, "final.pt")
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(model(x[:297]), y[:297]).item():.4f}")
dist.destroy_process_group()
