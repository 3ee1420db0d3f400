"""Two networks with an optimizer each, which step in turn."""

import torch
from torch import nn

import lsgd

torch.manual_seed(0)
maker, judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Linear(2, 1)
of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
worker = lsgd.wrap(nn.ModuleDict({"maker": maker, "judge": judge}), [of_judge, of_maker], steps=32)
for _ in range(worker.step, 32):
    fake = maker(torch.randn(16, 4))
    of_judge.zero_grad()
    (judge(fake.detach()).mean() - judge(torch.randn(16, 2)).mean()).backward()
    of_judge.step()
    of_maker.zero_grad()
    (-judge(fake)).mean().backward()
    of_maker.step()
    if worker.stopped:
        break
worker.finish()
if worker.first:
    torch.save({"maker": maker.state_dict(), "judge": judge.state_dict()}, "gan.pt")
