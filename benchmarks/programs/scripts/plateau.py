"""An own loop by epochs: a plateau scheduler, the best checkpoint, early stopping, classes drawn equally often.

Steps: 240
Figure: held-out loss
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import lsgd  # lsgd

STEPS, PER_EPOCH = int(sys.argv[1]), 20
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
kept = (y[297:] < 5) | (torch.arange(1500) % 5 == 0)
train = TensorDataset(x[297:][kept], y[297:][kept])
weights = 1 / torch.bincount(train.tensors[1])[train.tensors[1]]
loader = DataLoader(train, batch_size=32, sampler=WeightedRandomSampler(weights, 32 * PER_EPOCH))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


class Patience:
    best, bad = float("inf"), 0

    def ends(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= 4

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


patience = Patience()
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
for each in (scheduler, patience):  # lsgd
    worker.follow(each)  # lsgd


@torch.no_grad()
def validate():
    model.eval()
    loss = F.cross_entropy(model(x[:297]), y[:297]).item()
    model.train()
    return loss


step = 0
step = worker.step  # lsgd
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
    val = validate()
    val = worker.mean({"val": val})["val"]  # lsgd
    scheduler.step(val)
    if val < patience.best and worker.first:  # lsgd: if val < patience.best:
        torch.save(model.state_dict(), "best.pt")
    if patience.ends(val):
        break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "last.pt")
    print(f"held-out loss: {validate():.4f}")
