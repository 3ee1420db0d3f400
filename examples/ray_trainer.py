"""Learn handwritten digits on a Ray cluster, in as many workers as you like."""

import sys
import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsgd
from lsgd.integrations.ray import LsgdConfig, report

EPOCHS = 10


def train():
    """Train in one of Ray's workers."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    worker = lsgd.wrap(model, optimizer)
    loader = worker.shard(DataLoader(data, batch_size=32, shuffle=True))
    worker.steps = EPOCHS * len(loader)
    while worker.step < worker.steps and not worker.stopped:  # one in another's place begins where the others are
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    worker.finish()
    with torch.no_grad():
        accuracy = (model(data.tensors[0]).argmax(dim=1) == data.tensors[1]).float().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        report(worker, {"accuracy": accuracy}, ray.train.Checkpoint.from_directory(folder) if worker.first else None)


if __name__ == "__main__":
    workers = int(sys.argv[1]) if sys.argv[1:] else 2
    trainer = TorchTrainer(
        train,
        torch_config=LsgdConfig(period=8),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            storage_path=str(Path("ray-results").resolve()), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(f"accuracy {result.metrics['accuracy']:.4f}; {result.checkpoint.path}")
