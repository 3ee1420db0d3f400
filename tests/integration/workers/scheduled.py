"""A flat script with torch's schedulers, which dies, and is started again where the other worker is.

Writes to ``<name>.json`` the place and the learning rate of each of its steps.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import lsgd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=90)
parser.add_argument("--die-at", type=int, default=-1, help="kill -9 after this step")
parser.add_argument("--untold", action="store_true", help="leave out worker.follow")
parser.add_argument("--life", type=int, default=0, help="number of this life of the worker")
parser.add_argument("--wait-at", type=json.loads, default={}, help="the other's life to wait for before a step")
options = parser.parse_args()
folder = Path(os.environ["LSGD_RUN_DIR"])

torch.manual_seed(int(os.environ["LSGD_LOCAL_RANK"]))
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
worker = lsgd.wrap(model, optimizer, steps=options.steps)
(folder / f"life-{options.life}").touch()
parts = [LinearLR(optimizer, 0.1, total_iters=10), CosineAnnealingLR(optimizer, options.steps - 10)]
scheduler = SequentialLR(optimizer, parts, [10])
if not options.untold:
    worker.follow(scheduler)
rates = []
for step in range(worker.step, options.steps):
    give_up_at = time.monotonic() + 600.0
    while str(step) in options.wait_at and not (folder / f"life-{options.wait_at[str(step)]}").exists():
        assert time.monotonic() < give_up_at, "the other worker does not come"
        worker.status()
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    rates.append((step, optimizer.param_groups[0]["lr"]))
    optimizer.step()
    scheduler.step()
    worker.report(loss)
    if step == options.die_at:
        os.kill(os.getpid(), signal.SIGKILL)
worker.finish()
(folder / f"{worker.name.replace('/', '-')}.json").write_text(json.dumps(rates))
