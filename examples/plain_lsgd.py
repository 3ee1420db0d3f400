"""Learn handwritten digits in as many processes as there are."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from lsgd.client import Worker

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(worker, loader):
    """Take a step for each batch."""
    while not worker.stopped:
        for x, y in worker.batches(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)


with Worker.join(model, optimizer) as worker:
    train(worker, worker.loader(data, batch_size=64))
    if worker.first:
        torch.save(model.state_dict(), "model.pt")
