"""Handwritten digits, learned by several workers together: ``lsgd quickstart``."""

import itertools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from lsgd.client import Worker, device
from lsgd.examples.report import Progress, write_results


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images of 8x8 pixels to train on and 360 to test on, the same on every worker."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split([1437, 360])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Sequential:
    """Return ten convolutions with batch-norm: five on 8x8 pixels, five on 4x4.

    It is so deep that separately trained models cannot simply be averaged, so the exchange matters.
    """
    layers: list[nn.Module] = []
    channels = [1, *[24] * 5, *[48] * 5]
    for before, after in itertools.pairwise(channels):
        if (before, after) == (24, 48):
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def main() -> None:
    """Train until the plan ends the run. The model is then the consensus of all workers."""
    train, test = datasets()
    home = device()
    model = network().to(home)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Worker.join(model, optimizer) as worker:
        worker.schedule(optimizer, "linear")
        loader = worker.loader(train, batch_size=64)
        images, labels = (x.to(home) for x in train[:128])  # the same on every worker, for election = "probe"
        worker.probe(lambda: nn.functional.cross_entropy(model(images), labels))
        progress = Progress(worker)
        while not worker.stopped:
            for x, y in worker.batches(loader):
                loss = nn.functional.cross_entropy(model(x.to(home)), y.to(home))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                worker.report(loss)
                progress.show(loss)
        if worker.first:
            write_results(worker, model, test)


if __name__ == "__main__":
    main()
