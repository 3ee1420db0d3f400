"""Data without a length, of which each worker takes its part.

Variables: LSGD_ITERATIONS=96
"""

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lsgd.client import Worker


class Numbers(IterableDataset):
    """Numbers that a generator of its own draws."""

    def __iter__(self):
        """Begin anew."""
        draws = torch.Generator().manual_seed(0)
        for _ in range(256):
            yield torch.randn(8, generator=draws)


torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Worker.join(model, optimizer) as worker:
    loader = worker.loader(Numbers(), batch_size=8)
    while not worker.stopped:
        for a in worker.batches(loader):
            loss = (model(a) - a.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    if worker.first:
        torch.save(model.state_dict(), "model.pt")
