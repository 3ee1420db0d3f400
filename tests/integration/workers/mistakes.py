"""A small training loop with the mistakes that users make."""

import argparse

import torch
from torch import nn

from lsgd.client import Worker

parser = argparse.ArgumentParser()
parser.add_argument("--loss", choices=("good", "none", "nan"), default="good", help="that is reported")
options = parser.parse_args()

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

with Worker.join(model, optimizer, same_data=True) as worker:
    while worker.begin_step():
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.loss != "none":
            worker.report(loss if options.loss == "good" else float("nan"))
        worker.end_step()
