"""A webdataset: shards in tar files, shuffled and augmented as they come.

Needs: webdataset
Steps: 120
"""

import io
import random
import sys
import tarfile

import numpy as np
import torch
import webdataset
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lsgd  # lsgd

STEPS = int(sys.argv[1])
digits = load_digits()
for number in range(4):
    with tarfile.open(f"digits-{number}.tar", "w") as tar:
        for row in range(297 + number, len(digits.data), 4):
            for suffix, data in (("npy", digits.images[row].astype("float32")), ("cls", digits.target[row])):
                blob = io.BytesIO()
                np.save(blob, data)
                info = tarfile.TarInfo(f"{row}.{suffix}.npy" if suffix == "cls" else f"{row}.npy")
                info.size = blob.tell()
                blob.seek(0)
                tar.addfile(info, blob)


def sample(found):
    image = np.load(io.BytesIO(found["npy"])) / 16
    if random.random() < 0.5:
        image = np.roll(image, random.choice((-1, 1)), axis=1)
    return torch.from_numpy(np.ascontiguousarray(image)).flatten(), int(np.load(io.BytesIO(found["cls.npy"])))


torch.manual_seed(0)
random.seed(0)
stream = webdataset.WebDataset("digits-{0..3}.tar", shardshuffle=4, seed=0).shuffle(200, seed=0).map(sample)
loader = DataLoader(stream, batch_size=32)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "model.pt")
    x, y = torch.tensor(digits.data[:297], dtype=torch.float32) / 16, torch.tensor(digits.target[:297])
    with torch.no_grad():
        print(f"held-out loss: {F.cross_entropy(model(x), y).item():.4f}")
