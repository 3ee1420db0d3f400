"""Everything that a model and a loop can be at once, exchanged between two workers.

Several dtypes, frozen and tied weights, channels_last, batch-norm, a module compiled, two optimizers, gradient
accumulation, data from other processes. Writes to ``<name>.pt`` what the test looks at.
"""

import copy
import itertools

import torch
from torch import nn

from lsgd.client import Worker


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.norm(self.conv(x)).mean((2, 3)))
        x = self.wide(self.low(x.bfloat16()).double()).float()
        return self.decode(torch.tanh(self.encode(x)))


model = Odd().to(memory_format=torch.channels_last)
compiled = torch.compile(model, backend="aot_eager")
first = torch.optim.Adam(
    [
        {"params": [*model.conv.parameters(), *model.norm.parameters()]},
        {"params": model.low.parameters(), "lr": 1e-2},
    ]
)
second = torch.optim.SGD([*model.wide.parameters(), *model.encode.parameters()], lr=0.02, momentum=0.9)
inputs = torch.randn(192, 3, 6, 6, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.mean((2, 3)).repeat(1, 2)[:, :4])
turns = itertools.count(1)

with Worker.join(model, [first, second]) as worker:
    loader = worker.loader(data, batch_size=12, num_workers=2)
    micro_batches = 0
    while not worker.stopped:
        for x, y in worker.batches(loader):
            micro_batches += 1
            loss = nn.functional.mse_loss(compiled(x.contiguous(memory_format=torch.channels_last)), y)
            (loss / 2).backward()
            if next(turns) % 2 == 0:
                first.step()
                second.step()
                model.zero_grad()
            worker.report(loss)
    assert worker.run_dir is not None
    torch.save(
        {
            "state": model.state_dict(),
            "leader": worker.leader_state_dict(),
            "copy": copy.deepcopy(model).state_dict(),
            "tied": model.decode.weight is model.encode.weight,
            "channels_last": model.conv.weight.is_contiguous(memory_format=torch.channels_last),
            "iterations": worker.iterations,
            "micro_batches": micro_batches,
            "leader_name": worker.status()["leaders"][-1]["worker"],
            "distance": worker.consensus_distance,
        },
        worker.run_dir / f"{worker.name.replace('/', '-')}.pt",
    )
    torch.save(model.frozen.state_dict(), worker.run_dir / "submodule.pt")
