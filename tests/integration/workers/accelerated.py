"""A loop with accelerate as a worker: a line is fitted, with switches for what a test is about.

Writes to ``<name>.json`` what it knows at the end.
"""

import argparse
import json
import runpy
from os import chdir, environ
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from lsgd.integrations.accelerate import LsgdLoop

LENGTH = 96

parser = argparse.ArgumentParser()
parser.add_argument("--example", type=Path, help="run this script instead, in the run's folder")
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--local-sgd", action="store_true", help="leave accelerate's LocalSGD in the loop")
options = parser.parse_args()
folder = Path(environ["LSGD_RUN_DIR"])
drawn: list[int] = []
losses: list[float] = []
rates: list[float] = []

if options.example:
    chdir(folder)
    names = runpy.run_path(str(options.example))
    lsgd, model = names["lsgd"], names["model"]
else:
    torch.manual_seed(0)
    inputs = torch.randn(LENGTH, 4)
    loader = DataLoader(TensorDataset(torch.arange(LENGTH), inputs), batch_size=4, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.micro_batches)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if options.local_sgd:
        from accelerate.local_sgd import LocalSGD

        local_sgd = LocalSGD(accelerator, model, local_sgd_steps=3)
        local_sgd.accelerator, local_sgd.model, local_sgd.local_sgd_steps = accelerator, model, 3
        local_sgd.enabled = True  # as in several processes
    with LsgdLoop(accelerator, model, optimizer, loader) as lsgd:
        for _ in range(options.epochs):
            for index, x in lsgd.batches():
                drawn.extend(index.tolist())
                with accelerator.accumulate(model):
                    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    rates.append(optimizer.param_groups[0]["lr"])
                lsgd.report(loss)
                losses.append(loss.item())
                if options.local_sgd:
                    local_sgd.step()

result = {
    "iterations": lsgd.worker.iterations,
    "stopped": lsgd.stopped,
    "rank": lsgd.worker.rank,
    "drawn": drawn,
    "losses": losses,
    "rates": rates,
    "final": [x.flatten().tolist() for x in model.state_dict().values()],
}
(folder / f"{lsgd.worker.name.replace('/', '-')}.json").write_text(json.dumps(result))
