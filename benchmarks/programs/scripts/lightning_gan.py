"""A GAN in Lightning: manual optimization of two optimizers, with a checkpoint each epoch.

Needs: lightning
Steps: 200
Figure: distance of digits
Variables: LSGD_ITERATIONS=200
Remark: Steps are batches, each with a step of either network. With several optimizers the length has to be in the plan
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lsgd.integrations.lightning import LsgdCallback  # lsgd

STEPS, LATENT = int(sys.argv[1]), 16


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()
        )
        self.critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def training_step(self, batch, _):
        (real,) = batch
        of_generator, of_critic = self.optimizers()
        fake = self.generator(torch.randn(len(real), LATENT))
        self.toggle_optimizer(of_critic)
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        wanted = F.softplus(-self.critic(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(wanted)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log_dict({"critic": loss, "generator": wanted})

    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters(), 2e-3, (0.5, 0.9)) for each in (self.generator, self.critic)]


lightning.seed_everything(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
model = Gan()
lsgd = LsgdCallback()  # lsgd
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=-1,  # lsgd: max_steps=2 * STEPS,
    enable_progress_bar=False,
    callbacks=[
        lsgd,  # lsgd
        ModelCheckpoint("checkpoints", save_last=True),
    ],
)
trainer.fit(model, DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True))
if lsgd.first:  # lsgd
    trainer.save_checkpoint("gan.ckpt")
    model.eval()
    with torch.no_grad():
        fake = model.generator(torch.randn(2048, LATENT, generator=torch.Generator().manual_seed(1)))
    means = (fake.mean(0) - images.mean(0)).square().sum()
    print(f"distance of digits: {means + (fake.T.cov() - images.T.cov()).square().sum().sqrt():.4f}")
