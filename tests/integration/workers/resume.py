"""A small regression without chance of its own: the same seeds give the same bits, dropout included.

At the end it writes what it knows to ``<name>.json``.
"""

import argparse
import hashlib
import json
import os
import random
import signal
from typing import Any

import numpy as np
import torch
from torch import nn

import lsgd.client.iteration.steps
from lsgd.client import Worker
from lsgd.client.iteration.rounds import Rounds
from lsgd.protocol.messages import Round

parser = argparse.ArgumentParser()
parser.add_argument("--die-in-round", type=int, default=0, help="kill -9 when told of this one")
parser.add_argument("--width", type=int, default=16, help="of the model")
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument("--frozen-mib", type=int, default=0, help="of a parameter that each process begins with another of")
options = parser.parse_args()

index = int(os.environ["LSGD_LOCAL_RANK"])
random.seed(index)
np.random.seed(index)
torch.manual_seed(0)
norm = nn.BatchNorm1d(options.width) if options.batch_norm else nn.Identity()
model = nn.Sequential(nn.Linear(8, options.width), norm, nn.Dropout(0.2), nn.Linear(options.width, 1))
torch.seed()
frozen = nn.Parameter(torch.rand(options.frozen_mib << 18), requires_grad=False)
model.register_parameter("frozen", frozen if options.frozen_mib else None)
torch.manual_seed(index)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
rates = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
seen: list[list[float]] = []


class MortalRounds(Rounds):
    """Dies when all have completed the round before, and know of this one."""

    def carry_out(self, order: Round, **rest: Any) -> None:
        if order.id == options.die_in_round:
            os.kill(os.getpid(), signal.SIGKILL)
        super().carry_out(order, **rest)


lsgd.client.iteration.steps.Rounds = MortalRounds

with Worker.join(model, optimizer, extra={"rates": rates}) as worker:
    assert worker.run_dir is not None
    loader = worker.loader(data, batch_size=8)
    while not worker.stopped:
        for x, y in worker.batches(loader):
            noise = random.random() + np.random.random()
            loss = nn.functional.mse_loss(model(x + 0.01 * noise), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            worker.report(loss)
            seen.append([worker.iterations + 1, x.sum().item(), noise])
    status = worker.status()

tensors = b"".join(x.detach().view(torch.uint8).numpy().tobytes() for x in model.parameters())
result = {
    "iterations": worker.iterations,
    "seen": seen,
    "rate": rates.get_last_lr(),
    "model": hashlib.blake2b(tensors, digest_size=8).hexdigest(),
    "distance": worker.consensus_distance,
    "count": status["count"],
    "received_nbytes": worker.timings.received_nbytes,
}
(worker.run_dir / f"{worker.name.replace('/', '-')}.json").write_text(json.dumps(result))
