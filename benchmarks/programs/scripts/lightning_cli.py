"""Lightning's command line: a DataModule, options as words, accumulation and a validation each epoch.

Needs: lightning jsonargparse
Steps: 80
"""

import sys

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lsgd.integrations.lightning import LsgdCallback  # lsgd


class Digits(lightning.LightningModule):
    def __init__(self, width: int = 64, rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))

    def training_step(self, batch, _):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)


class Data(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(0)
        self.train, self.val = torch.utils.data.random_split(data, [0.8, 0.2], generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=128)


lsgd = LsgdCallback()  # lsgd
cli = LightningCLI(
    Digits,
    Data,
    run=False,
    save_config_callback=None,  # lsgd
    seed_everything_default=0,
    trainer_defaults={
        "callbacks": [lsgd],  # lsgd
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "logger": False,
    },
    args=["--trainer.max_steps", sys.argv[1], "--trainer.accumulate_grad_batches", "2", "--data.batch_size", "16"],
)
cli.trainer.fit(cli.model, cli.datamodule)
if lsgd.first:  # lsgd
    cli.trainer.save_checkpoint("digits.ckpt")
(found,) = cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
print(f"held-out loss: {found['val_loss']:.4f}")
