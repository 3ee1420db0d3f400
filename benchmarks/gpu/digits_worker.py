"""The training script of part 3: handwritten digits on this worker's device, in one of the ways that users train.

Writes the accuracy on the test data to ``accuracy.json`` in the run folder.
"""

import argparse
import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.workloads import Digits, WideDigits
from lsgd.client import Worker, device, muon

BATCH, RATE = 32, 0.05
MUON_WIDTH, MUON_RATE = 256, 0.005


def main() -> None:
    """Train until the plan says stop, and test the consensus."""
    given = options()
    home = device()
    torch.manual_seed(0)
    task = WideDigits(MUON_WIDTH) if given.muon else Digits()
    model = task.model().to(home)
    optimizer = muon(model, lr=MUON_RATE) if given.muon else torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    called: nn.Module = model
    if given.island:
        dist.init_process_group(given.island)
        called = DistributedDataParallel(model)
    if given.compile:
        model.compile(backend=given.compile)
    scaler = torch.amp.GradScaler(home.type, enabled=given.scaler)
    autocast = torch.autocast(home.type, torch.bfloat16) if given.bf16 else contextlib.nullcontext()
    x_test, y_test = (part.to(home) for part in task.test_data())
    with Worker.join(called, optimizer) as worker:
        worker.schedule(optimizer, "linear")
        loader = worker.loader(TensorDataset(*task.train_data), batch_size=BATCH)
        while not worker.stopped:
            for x, y in worker.batches(loader):
                with autocast:
                    loss = functional.cross_entropy(called(x.to(home)), y.to(home))
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                worker.report(loss)
        if worker.first and worker.is_head:
            assert worker.run_dir is not None
            with torch.no_grad():
                right = (model.eval()(x_test).argmax(1) == y_test).float().mean().item()
            (worker.run_dir / "accuracy.json").write_text(json.dumps({"accuracy": right}))
    if dist.is_initialized():
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--island", default="", metavar="BACKEND", help="of DistributedDataParallel inside the worker")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="of torch.compile")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--scaler", action="store_true", help="step by GradScaler")
    parser.add_argument(
        "--muon", action="store_true", help="train a perceptron by Muon, which has no use for convolutions"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
