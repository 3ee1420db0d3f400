"""Self-supervised learning like BYOL's: two views of each image, and a target network that follows slowly.

Steps: 200
Remark: The figure is that of a classifier on the features that were learned
Figure: held-out error
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS = int(sys.argv[1])
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, digits.target
loader = DataLoader(TensorDataset(images[297:]), batch_size=64, shuffle=True, drop_last=True)
online = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
model = nn.Sequential(online, predictor)
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
worker = lsgd.wrap(model, optimizer, steps=STEPS, extra={"target": target})  # lsgd
loader = worker.shard(loader)  # lsgd


def view(x):
    return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)


step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (x,) in loader:
        one, other = view(x), view(x)
        loss = 0
        for a, b in ((one, other), (other, one)):
            loss = loss - F.cosine_similarity(model(a), target(b).detach()).mean()
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save({"online": online.state_dict(), "target": target.state_dict()}, "byol.pt")
    online.eval()
    with torch.no_grad():
        features = online(images).numpy()
    classifier = LogisticRegression(max_iter=500).fit(features[297:], labels[297:])
    print(f"held-out error: {1 - classifier.score(features[:297], labels[:297]):.4f}")
