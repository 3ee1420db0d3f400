"""begin_step and end_step, over rows drawn by hand.

Variables: LSGD_ITERATIONS=96
"""

import torch
from torch import nn

from lsgd.client import Worker

torch.manual_seed(0)
x = torch.randn(256, 8)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Worker.join(model, optimizer) as worker:
    while worker.begin_step():
        rows = worker.rows(len(x))
        batch = x[[rows[place] for place in torch.randint(len(rows), (8,)).tolist()]]
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.end_step(loss)
    if worker.first:
        torch.save(model.state_dict(), "model.pt")
