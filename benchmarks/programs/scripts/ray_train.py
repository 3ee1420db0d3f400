"""Ray Train: a TorchTrainer whose workers are those of a run, with Ray's checkpoints.

Needs: ray
Steps: 240
Launch: none
Remark: Ray starts the workers, in place of lsgd launch, so there is no check
"""

import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd
from lsgd.integrations.ray import LsgdConfig, report  # lsgd

STEPS, WORKERS = int(sys.argv[1]), int(sys.argv[2])


def train():
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[297:], y[297:]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
    loader = worker.shard(loader)  # lsgd
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
    worker.finish()  # lsgd
    with torch.no_grad():
        found = {"loss": F.cross_entropy(model(x[:297]), y[:297]).item()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "model.pt"))
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        checkpoint = checkpoint if worker.first else None  # lsgd
        report(worker, found, checkpoint)  # lsgd: ray.train.report(found, checkpoint=checkpoint)


if __name__ == "__main__":
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        torch_config=LsgdConfig(algorithm="local", period=4),  # lsgd
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
        run_config=ray.train.RunConfig(storage_path=str(Path("ray-results").resolve())),
    )
    print(f"held-out loss: {trainer.fit().metrics['loss']:.4f}")
