"""A flat script that ``lsgd.wrap`` has made a worker, and that goes wrong."""

import argparse
import os

import torch
from torch import nn

import lsgd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--nan-from", type=int, default=1 << 30, help="step from which on the loss is not a number")
parser.add_argument("--equal", action="store_true", help="draw what the other worker draws")
parser.add_argument("--without-finish", action="store_true")
options = parser.parse_args()

torch.manual_seed(0 if options.equal else int(os.environ.get("LSGD_LOCAL_RANK", 0)))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
worker = lsgd.wrap(model, optimizer, steps=options.steps)
for step in range(worker.step, options.steps):
    loss = model(torch.randn(8, 4)).square().mean()
    if step >= options.nan_from:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    worker.report(loss)
if not options.without_finish:
    worker.finish()
print("the last line of the script")
