"""A network that solves Burgers' equation: second derivatives in the loss, and points that are drawn in each step.

Steps: 400
"""

import sys

import torch
from torch import nn

import lsgd  # lsgd

STEPS = int(sys.argv[1])
torch.manual_seed(0)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


model = Field()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
worker.follow(scheduler)  # lsgd


def residual(x, t):
    x, t = x.requires_grad_(), t.requires_grad_()
    u = model(x, t)
    (u_x, u_t) = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_t + u * u_x - 0.1 * u_xx).square().mean()


def boundary(x, t):
    start = (model(x, torch.zeros_like(x)) + torch.sin(torch.pi * x)).square().mean()
    return start + model(torch.ones_like(t), t).square().mean() + model(-torch.ones_like(t), t).square().mean()


first = 0
first = worker.step  # lsgd
for step in range(first, STEPS):
    loss = residual(2 * torch.rand(128, 1) - 1, torch.rand(128, 1)) + boundary(
        2 * torch.rand(64, 1) - 1, torch.rand(64, 1)
    )
    optimizer.zero_grad()
    loss.backward()
    worker.report(loss)  # lsgd
    optimizer.step()
    scheduler.step()
    if worker.stopped:  # lsgd
        break  # lsgd

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "field.pt")
    held_out = torch.Generator().manual_seed(1)
    x, t = 2 * torch.rand(2048, 1, generator=held_out) - 1, torch.rand(2048, 1, generator=held_out)
    print(f"held-out loss: {(residual(x, t) + boundary(x, t)).item():.4f}")
