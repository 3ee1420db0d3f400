"""A small regression that computes the same numbers each time; notes the model's digest after each iteration.

Writes them, a line each, to ``<name>.digests``, the consensus model's to ``<name>.model``, and the id of the process to
``<name>.pid``.
"""

import argparse
import hashlib
import os
from functools import partial
from uuid import uuid4

import torch
from torch import nn

import lsgd.client.groups.form
from lsgd.client import Worker
from lsgd.client.control import joining
from lsgd.client.groups.torch_group import torch_group

parser = argparse.ArgumentParser()
parser.add_argument("--like-nccl", action="store_true", help="a GPU of its own, and Gloo in NCCL's place")
parser.add_argument("--width", type=int, default=64, help="of the model")
options = parser.parse_args()
if options.like_nccl:
    joining.gpu_name = lambda device: uuid4().hex
    lsgd.client.groups.form.torch_group = partial(torch_group, backend="gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, options.width), nn.ReLU(), nn.Linear(options.width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * 64 / options.width, momentum=0.9)
inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def digest() -> str:
    state = b"".join(x.detach().numpy().tobytes() for x in model.parameters())
    return hashlib.blake2b(state, digest_size=8).hexdigest()


with Worker.join(model, optimizer) as worker:
    assert worker.run_dir is not None
    path = worker.run_dir / worker.name.replace("/", "-")
    path.with_suffix(".pid").write_text(f"{os.getpid()}")
    order = torch.Generator().manual_seed(worker.rank)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=order)
    with path.with_suffix(".digests").open("w", buffering=1) as digests:
        while not worker.stopped:
            for x, y in worker.batches(loader):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                digests.write(f"{digest()}\n")
                worker.report(loss)
path.with_suffix(".model").write_text(digest())
