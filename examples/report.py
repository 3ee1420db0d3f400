"""What the example shows and saves: progress, the accuracy and the model.

Training needs none of it. It shows what a worker knows about its run.
"""

import copy
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsgd.client import Worker

LINE_PERIOD_S = 5.0


class Progress:
    """Prints the run's progress every few seconds, on rank 0."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._started_s = self._shown_s = time.monotonic()

    def show(self, loss: Tensor) -> None:
        """Show progress and the loss of the last batch, if it is time to."""
        now_s = time.monotonic()
        if self._worker.rank == 0 and now_s - self._shown_s >= LINE_PERIOD_S:
            self._shown_s = now_s
            took_s = now_s - self._started_s
            print(f"{self._worker.progress:4.0%}, loss {loss.item():.4f}, {took_s:.0f} s", flush=True)


def write_results(worker: Worker, model: nn.Module, test: TensorDataset) -> None:
    """Print the accuracy, and write accuracy.json and model.safetensors to the folder of the run.

    One worker calls it after training, when ``model`` is the consensus. The launcher writes what the servers know of
    the run: losses, rounds, leaders.
    """
    leader_state = worker.leader_state_dict()
    leader_accuracy = None
    if leader_state is not None:
        leader_model = copy.deepcopy(model)
        leader_model.load_state_dict(leader_state)
        leader_accuracy = accuracy(leader_model, test)
    result = {
        "test_accuracy": accuracy(model, test),
        "leader_accuracy": leader_accuracy,
        "relative_distance_before_last_average": worker.consensus_distance,
    }
    folder = worker.run_dir or Path("runs/digits")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accuracy.json").write_text(json.dumps(result, indent=2) + "\n")
    worker.save(folder)
    of_leader = "" if leader_accuracy is None else f", {leader_accuracy:.4f} of the leader"
    print(f"test accuracy: {result['test_accuracy']:.4f} of the average{of_leader}")
    print(f"written to {folder}: accuracy.json, model.safetensors", flush=True)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of ``data`` that ``model`` classifies right."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        right = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in DataLoader(data, batch_size=256))
    model.train(was_training)
    return right / len(data)
