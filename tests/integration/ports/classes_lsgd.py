"""A script with a Trainer class: DistributedDataParallel, DistributedSampler, snapshots, epochs."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lsgd


@dataclass
class TrainerConfig:
    """What a trainer needs to know."""

    max_epochs: int = int(sys.argv[2])
    batch_size: int = 16
    grad_norm_clip: float = 1.0
    save_every: int = 2
    snapshot_path: str = f"{sys.argv[1]}/snapshot.pt"


class Trainer:
    """Trains a model in as many processes as torchrun has started."""

    def __init__(self, config: TrainerConfig, model: nn.Module, optimizer, train: Dataset, test: Dataset):
        self.config = config
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.global_rank = int(os.environ.get("RANK", 0))
        self.train_loader = self._prepare_dataloader(train)
        self.test_loader = self._prepare_dataloader(test)
        self.epochs_run = 0
        self.optimizer = optimizer
        self.model = model
        self._load_snapshot()
        self.model = DistributedDataParallel(self.model)
        self.worker = lsgd.wrap(self.model, self.optimizer)
        self.train_loader = self.worker.shard(self.train_loader)
        self.local_rank = self.global_rank = 0 if self.worker.first else 1

    def _prepare_dataloader(self, dataset: Dataset) -> DataLoader:
        return DataLoader(dataset, batch_size=self.config.batch_size, sampler=DistributedSampler(dataset))

    def _load_snapshot(self) -> None:
        if not os.path.exists(self.config.snapshot_path):
            return
        snapshot = torch.load(self.config.snapshot_path)
        self.model.load_state_dict(snapshot["model_state"])
        self.optimizer.load_state_dict(snapshot["optimizer_state"])
        self.epochs_run = snapshot["finished_epoch"]

    def _run_batch(self, source, targets, train: bool) -> float:
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch: int, loader: DataLoader, train: bool) -> float:
        loader.sampler.set_epoch(epoch)
        self.model.train(train)
        losses = [self._run_batch(source, targets, train) for source, targets in loader]
        print(f"[rank {self.global_rank}] epoch {epoch}: {'train' if train else 'test'} loss {sum(losses):.4f}")
        return sum(losses) / len(losses)

    def _save_snapshot(self, epoch: int) -> None:
        model = self.model.module if hasattr(self.model, "module") else self.model
        snapshot = {"model_state": model.state_dict(), "optimizer_state": self.optimizer.state_dict()}
        torch.save({**snapshot, "finished_epoch": epoch}, self.config.snapshot_path)

    def train(self) -> float:
        """Train and test for as many epochs as configured; return the last test's loss."""
        for epoch in range(self.epochs_run + 1, self.config.max_epochs + 1):
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            tested = self._run_epoch(epoch, self.test_loader, train=False)
            if self.worker.stopped:
                break
        return tested


class Classifier(nn.Module):
    """Tells which of four quarters a point is in."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.05), nn.Linear(32, 4))

    def forward(self, source, targets=None):
        """Return the logits, and the loss if there are targets."""
        logits = self.layers(source)
        return logits, None if targets is None else nn.functional.cross_entropy(logits, targets)


def points(number: int, seed: int) -> TensorDataset:
    """Return points and the quarters that they are in."""
    made = torch.randn(number, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(made, (made > 0).long() @ torch.tensor([2, 1]))


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(TrainerConfig(), model, optimizer, points(960, 1), points(160, 2))
    tested = trainer.train()
    trainer.worker.finish()
    if trainer.global_rank == 0:
        Path(sys.argv[1], "final.json").write_text(json.dumps({"val": tested}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
