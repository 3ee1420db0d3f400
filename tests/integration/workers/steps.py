"""A small regression that notes the bits of its model, with switches for what a test is about.

Writes to ``<name>.json`` what the test looks at; ``turns`` has, for each turn of the loop, the digest of the parameters
before its forward pass and the settings of the algorithm then.
"""

import argparse
import hashlib
import json
import os
import signal
import time
from functools import partial
from uuid import uuid4

import torch
from torch import Tensor, nn

import lsgd.client.groups.form
from lsgd.client import Worker
from lsgd.client.control import joining
from lsgd.client.groups.torch_group import torch_group

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32, help="of the model")
parser.add_argument("--low", action="store_true", help="a layer in bfloat16 and one in float64")
parser.add_argument("--unused", action="store_true", help="a parameter that nobody, and one that rank 0 uses")
parser.add_argument("--micro-batches", type=int, default=1, help="in a step")
parser.add_argument("--scaler", action="store_true", help="step by GradScaler")
parser.add_argument("--closure", action="store_true", help="compute gradients in a closure of the step")
parser.add_argument("--overflow-at", type=int, default=0, help="gradients are infinite in this turn")
parser.add_argument("--die-at", type=int, default=0, help="kill -9 in this turn")
parser.add_argument("--meet-at", type=int, default=0, help="wait for all workers in this turn's backward pass")
parser.add_argument("--die-in", choices=("forward", "backward"), default="backward")
parser.add_argument("--sleep", type=float, default=0.0, help="seconds in every turn")
parser.add_argument("--seed", type=int, default=0, help="of the model; 0: another one each time")
parser.add_argument("--like-nccl", action="store_true", help="a GPU of its own, and Gloo in NCCL's place")
options = parser.parse_args()
if options.like_nccl:
    joining.gpu_name = lambda device: uuid4().hex
    lsgd.client.groups.form.torch_group = partial(torch_group, backend="gloo")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.bfloat16, torch.float64) if options.low else (torch.float32, torch.float32)
        self.first = nn.Linear(8, options.width)
        self.low = nn.Linear(options.width, options.width, dtype=dtypes[0])
        self.wide = nn.Linear(options.width, 1, dtype=dtypes[1])
        self.unused = nn.Parameter(torch.ones(3), requires_grad=options.unused)
        self.sometimes = nn.Parameter(torch.zeros(1), requires_grad=options.unused)

    def forward(self, x: Tensor, shifted: bool) -> Tensor:
        x = torch.tanh(self.first(x)).to(self.low.weight.dtype)
        x = torch.tanh(self.low(x)).to(self.wide.weight.dtype)
        return self.wide(x).float() + (self.sometimes if shifted else 0.0)


def digest(tensors: list[Tensor]) -> str:
    data = b"".join(x.detach().view(torch.uint8).numpy().tobytes() for x in tensors)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def meet() -> None:
    """Wait until all workers have come to this turn's backward pass."""
    assert worker.run_dir is not None
    (worker.run_dir / f"meets-{os.getpid()}").touch()
    while len(list(worker.run_dir.glob("meets-*"))) < worker.world_size:
        time.sleep(0.02)


def die() -> None:
    if turn == options.die_at:
        os.kill(os.getpid(), signal.SIGKILL)


def in_backward(gradient: Tensor) -> None:
    if turn == options.meet_at:
        meet()
    if options.die_in == "backward":
        die()


def gradients(worker: Worker, micro_batches: list[tuple[Tensor, ...]]) -> Tensor:
    """Compute the gradients of some micro-batches and return their mean loss."""
    total = torch.zeros(())
    for number, (x, y) in enumerate(micro_batches, start=1):
        shifted = options.unused and worker.rank == 0
        loss = nn.functional.mse_loss(model(x, shifted), y) / len(micro_batches)
        if turn == options.overflow_at:
            loss = loss * float("inf")
        if number < len(micro_batches):
            with worker.no_sync():
                scaler.scale(loss).backward()
        else:
            scaler.scale(loss).backward()
        total += loss.detach()
    return total


torch.manual_seed(options.seed or time.monotonic_ns())
model = Model()
# Its gradient comes last: those of the layers behind it are under way then.
model.first.weight.register_hook(in_backward)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.64 / options.width, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=options.scaler, init_scale=8.0)
inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
turn = 0
turns: list[tuple[str, str, dict]] = []

with Worker.join(model, optimizer) as worker:
    assert worker.run_dir is not None
    loader = worker.loader(data, batch_size=16)
    while not worker.stopped:
        for x, y in worker.batches(loader):
            turn += 1
            turns.append((digest(trained), worker.algorithm.name, vars(worker.algorithm)))
            if options.die_in == "forward":
                die()
            optimizer.zero_grad()
            chunks = (z.chunk(options.micro_batches) for z in (x, y))
            micro_batches = list(zip(*chunks, strict=True))
            if options.closure:
                loss = optimizer.step(partial(gradients, worker, micro_batches))
            else:
                loss = gradients(worker, micro_batches)
                scaler.step(optimizer)
                scaler.update()
            worker.report(loss)
            time.sleep(options.sleep)
    status = worker.status()

result = {
    "iterations": worker.iterations,
    "turns": turns,
    "final": digest(trained),
    "distance": worker.consensus_distance,
    "status": status,
    "unused": model.unused.tolist(),
    "sometimes": model.sometimes.item(),
    "scale": scaler.get_scale() if options.scaler else None,
    "loss": nn.functional.mse_loss(model(inputs, False), data.tensors[1]).item(),
}
(worker.run_dir / f"{worker.name.replace('/', '-')}.json").write_text(json.dumps(result))
