"""Train a tiny transformer on the standard library's sources, byte by byte, with Lightning's Trainer."""

import sysconfig
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsgd.client import muon
from lsgd.integrations.lightning import LsgdCallback

CONTEXT, WIDTH = 64, 64

sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in sources)[: 1 << 20]
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // CONTEXT * CONTEXT]
data = TensorDataset(windows.view(-1, CONTEXT))


class Bytes(lightning.LightningModule):
    """Predicts each byte from those before it."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def training_step(self, batch):
        """Return the loss."""
        (x,) = batch
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        y = self.head(self.blocks(self.bytes(x) + self.places.weight, mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer. The run sets its learning rate once training starts."""
        return muon(self, lr=6e-3)

    def on_train_start(self):
        """Set the learning rate's schedule."""
        lsgd.worker.schedule(self.optimizers(), "wsd", warmup=0.05)


torch.manual_seed(0)
model = Bytes()
lsgd = LsgdCallback()
trainer = lightning.Trainer(
    max_steps=400, accelerator="cpu", callbacks=[lsgd], logger=False, enable_checkpointing=False
)
trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
if lsgd.first:
    trainer.save_checkpoint("lightning-model.ckpt")
