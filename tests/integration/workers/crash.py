"""A small regression that comes to grief on request, and notes each step and each round that failed.

Writes a line for each step to ``<name>-<process id>.steps``, and at the end what it knows to ``<name>.json``.
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn

import lsgd.client.groups.form
import lsgd.client.iteration.steps
from lsgd.client import Worker
from lsgd.client.control import joining
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.client.groups.torch_group import torch_group
from lsgd.client.iteration.rounds import Rounds
from lsgd.errors import ExchangeError
from lsgd.protocol.messages import Round

parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.0, help="seconds in every turn")
parser.add_argument("--die-in-round", type=int, default=0, help="kill -9 when this or a later one broadcasts")
parser.add_argument("--lead", action="store_true", help="report a loss that no other worker is below")
parser.add_argument("--stick-at", type=int, default=0, help="hold the GIL in this iteration")
parser.add_argument("--stall-at", type=int, default=0, help="wait in this iteration, with the GIL free")
parser.add_argument("--stall-while", type=Path, help="wait in any iteration while this file is there")
parser.add_argument("--poison-at", type=int, default=0, help="make a parameter NaN in this iteration")
parser.add_argument("--dwell-in-round", type=int, default=0, help="wait once, when this or a later one broadcasts")
parser.add_argument("--until", type=Path, help="stall or dwell until this file is there; stick until this pipe opens")
parser.add_argument("--fail-from", type=int, default=0, help="this round and all later ones fail here")
parser.add_argument("--like-nccl", action="store_true", help="a GPU of its own, and Gloo in NCCL's place")
options = parser.parse_args()
if options.like_nccl:
    joining.gpu_name = lambda device: uuid4().hex
    lsgd.client.groups.form.torch_group = partial(torch_group, backend="gloo")

torch.manual_seed(time.monotonic_ns())
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
failed: list[tuple[int, int, bool]] = []
current = 0


def wait() -> None:
    """Wait until the test has made its file."""
    while not options.until.exists():
        time.sleep(0.02)


def digest() -> str:
    tensors = [x for x in model.state_dict().values() if x.is_floating_point()]
    data = b"".join(x.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class NotingRounds(Rounds):
    """Notes of each round that failed its id and generation, and whether the model is what it was before."""

    def carry_out(self, order: Round, **rest: Any) -> None:
        global current
        before, current = digest(), order.id
        try:
            super().carry_out(order, **rest)
        except ExchangeError:
            failed.append((order.id, order.generation.number, digest() == before))
            raise


class MortalGroup(TcpGroup):
    """Dies in the middle of a round, when the others wait for what it broadcasts or receives."""

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        if options.fail_from and current >= options.fail_from:
            raise ExchangeError("it fails on request")
        return super().all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if options.fail_from and current >= options.fail_from:
            raise ExchangeError("it fails on request")
        if options.die_in_round and current >= options.die_in_round:
            print(f"dies in round {current}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if options.dwell_in_round and current >= options.dwell_in_round:
            print(f"dwells in round {current}", flush=True)
            wait()
            print(f"goes on with round {current}", flush=True)
            options.dwell_in_round = 0
        super().broadcast(tensor, source)


lsgd.client.groups.form.TcpGroup = MortalGroup
lsgd.client.iteration.steps.Rounds = NotingRounds

with Worker.join(model, optimizer) as worker:
    assert worker.run_dir is not None
    name = worker.name.replace("/", "-")
    loader = worker.loader(data, batch_size=16)
    with (worker.run_dir / f"{name}-{os.getpid()}.steps").open("w", buffering=1) as steps:
        while not worker.stopped:
            for x, y in worker.batches(loader):
                if worker.iterations + 1 == options.stick_at:
                    print("holds the GIL", flush=True)
                    ctypes.PyDLL(None).open(os.fsencode(options.until), os.O_RDONLY)
                    print("lets the GIL go", flush=True)
                if worker.iterations + 1 == options.stall_at:
                    print("stalls", flush=True)
                    wait()
                    print("goes on", flush=True)
                while options.stall_while and options.stall_while.exists():
                    time.sleep(0.02)
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if worker.iterations + 1 == options.poison_at:
                    print("poisons its model", flush=True)
                    next(model.parameters()).data[0, 0] = float("nan")
                steps.write(f"{worker.iterations + 1}\n")
                worker.report(0.0 if options.lead else loss)
                time.sleep(options.sleep)

finite = all(bool(x.isfinite().all()) for x in model.state_dict().values())
result = {"iterations": worker.iterations, "failed": failed, "model": digest(), "finite": finite}
(worker.run_dir / f"{name}.json").write_text(json.dumps(result))
