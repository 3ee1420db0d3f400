"""Lightning's Trainer with its usual callbacks: EarlyStopping, ModelCheckpoint, LearningRateMonitor, gradient clipping.

Needs: lightning
Steps: 80
Remark: Its file is Lightning's own checkpoint, whose counters of epochs and batches begin anew after a resume
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lsgd.integrations.lightning import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])


class Digits(lightning.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10)
        )

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


lightning.seed_everything(0, workers=True)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train, val = random_split(data, [0.8, 0.2])
model = Digits()
lsgd = LsgdCallback()  # lsgd
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=STEPS,
    val_check_interval=10,
    log_every_n_steps=5,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    logger=CSVLogger("logs"),
    callbacks=[
        lsgd,  # lsgd
        EarlyStopping("val_loss", patience=8),
        ModelCheckpoint(monitor="val_loss"),
        LearningRateMonitor(),
    ],
)
validation = DataLoader(val, batch_size=128)
trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), validation)
if lsgd.first:  # lsgd
    trainer.save_checkpoint("digits.ckpt")
(found,) = trainer.validate(model, validation, verbose=False)
print(f"held-out loss: {found['val_loss']:.4f}")
