"""A GAN: two networks, two optimizers, five steps of the critic for each of the generator, an averaged generator.

Steps: 400
Figure: distance of digits
Remark: The distance is between the means and covariances of real and generated images
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS, CRITIC, LATENT = int(sys.argv[1]), 5, 16
torch.manual_seed(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True)
generator = nn.Sequential(
    *(nn.Linear(LATENT, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()),
    *(nn.Linear(128, 64), nn.Tanh()),
)
critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
averaged = torch.optim.swa_utils.AveragedModel(
    generator, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95), use_buffers=True
)
both = nn.ModuleDict({"generator": generator, "critic": critic})  # lsgd
worker = lsgd.wrap(both, [of_generator, of_critic], steps=STEPS, extra={"averaged": averaged})  # lsgd
loader = worker.shard(loader)  # lsgd


def penalty(real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return 10 * (gradient.norm(dim=1) - 1).square().mean()


step = 0
step = worker.step  # lsgd
made = 0
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (real,) in loader:
        fake = generator(torch.randn(len(real), LATENT)).detach()
        loss = critic(fake).mean() - critic(real).mean() + penalty(real, fake)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        made += 1
        if made % CRITIC:
            continue
        loss = -critic(generator(torch.randn(64, LATENT))).mean()
        of_generator.zero_grad()
        loss.backward()
        worker.report(loss)  # lsgd
        of_generator.step()
        averaged.update_parameters(generator)
        step += 1
        step = worker.step  # lsgd
        if step >= STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save({"generator": generator.state_dict(), "averaged": averaged.state_dict()}, "gan.pt")
    averaged.eval()
    with torch.no_grad():
        fake = averaged(torch.randn(2048, LATENT, generator=torch.Generator().manual_seed(1)))
    means = (fake.mean(0) - images.mean(0)).square().sum()
    print(f"distance of digits: {means + (fake.T.cov() - images.T.cov()).square().sum().sqrt():.4f}")
