"""Handwritten digits by a small network. Writes a line for each step to ``<name>-<process id>.steps``, and a result."""

import json
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from lsgd.client import Worker

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
train, test = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split([1437, 360])
model = nn.Sequential(
    *(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with Worker.join(model, optimizer) as worker:
    assert worker.run_dir is not None
    name = worker.name.replace("/", "-")
    loader = worker.loader(TensorDataset(images[train], labels[train]), batch_size=32)
    with (worker.run_dir / f"{name}-{os.getpid()}.steps").open("w", buffering=1) as steps:
        while not worker.stopped:
            for x, y in worker.batches(loader):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps.write(f"{worker.iterations + 1}\n")
                worker.report(loss)
                time.sleep(0.003)
accuracy = (model.eval()(images[test]).argmax(1) == labels[test]).float().mean().item()
(worker.run_dir / f"{name}.json").write_text(json.dumps({"accuracy": accuracy}))
