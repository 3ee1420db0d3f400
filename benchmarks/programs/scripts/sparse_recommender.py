"""A recommender: sparse embeddings with SparseAdam beside a dense part with Adam, negative samples.

Steps: 400
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS, USERS, ITEMS, WIDTH = int(sys.argv[1]), 300, 200, 16
rng = np.random.default_rng(0)
taste, kind = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
users = rng.integers(USERS, size=40_000)
drawn = rng.integers(ITEMS, size=(len(users), 12))
liked = drawn[np.arange(len(users)), (taste[users][:, None] * kind[drawn]).sum(-1).argmax(1)]
pairs = torch.tensor(np.stack([users, liked], axis=1))
torch.manual_seed(0)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.of_users = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.of_items = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def forward(self, users, items):
        scores = F.normalize(self.of_users(self.users(users)), dim=-1) @ F.normalize(
            self.of_items(self.items(items)), dim=-1
        ).transpose(-1, -2)
        return F.cross_entropy(8 * scores, torch.arange(len(users)))


model = Towers()
sparse = torch.optim.SparseAdam([model.users.weight, model.items.weight], lr=0.05)
dense = torch.optim.Adam([*model.of_users.parameters(), *model.of_items.parameters()], lr=3e-3)
loader = DataLoader(TensorDataset(pairs[4000:]), batch_size=128, shuffle=True)
worker = lsgd.wrap(model, [sparse, dense], steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (batch,) in loader:
        loss = model(batch[:, 0], batch[:, 1])
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        loss.backward()
        worker.report(loss)  # lsgd
        for optimizer in (sparse, dense):
            optimizer.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "towers.pt")
    model.eval()
    with torch.no_grad():
        losses = [model(batch[:, 0], batch[:, 1]) for batch in pairs[:4000].split(128)]
    print(f"held-out loss: {torch.stack(losses).mean():.4f}")
