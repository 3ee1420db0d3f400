"""Train a tiny GPT-2 on the standard library's sources, byte by byte, with Hugging Face's Trainer."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lsgd.client import muon
from lsgd.integrations.transformers import LsgdCallback

CONTEXT = 64

sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in sources)[: 1 << 20]
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // CONTEXT * CONTEXT]
data = TensorDataset(windows.view(-1, CONTEXT))


def batch(samples):
    """Return the model's inputs and labels: it predicts each byte from those before it."""
    inputs = torch.stack([window for (window,) in samples])
    return {"input_ids": inputs, "labels": inputs}


torch.manual_seed(0)
shape = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **shape))
arguments = TrainingArguments(
    output_dir="transformers-run",
    max_steps=400,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    warmup_steps=20,
    logging_steps=20,
    save_strategy="no",
)
lsgd = LsgdCallback()
optimizers = (muon(model, lr=6e-3), None)  # the Trainer makes the schedule
trainer = Trainer(model, arguments, train_dataset=data, data_collator=batch, callbacks=[lsgd], optimizers=optimizers)
trainer.train()
if lsgd.first:
    trainer.save_model("transformers-model")
