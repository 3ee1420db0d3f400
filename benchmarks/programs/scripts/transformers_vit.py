"""transformers' Trainer: a vision transformer in bfloat16, with accumulation and gradient checkpointing.

Needs: transformers accelerate
Steps: 80
"""

import sys

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from lsgd.integrations.transformers import LsgdCallback  # lsgd

STEPS = int(sys.argv[1])
set_seed(0)
digits = load_digits()
rows = [
    {"pixel_values": torch.tensor(image, dtype=torch.float32)[None] / 8 - 1, "labels": int(label)}
    for image, label in zip(digits.images, digits.target, strict=True)
]
config = ViTConfig(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
)
arguments = TrainingArguments(
    output_dir="vit",
    max_steps=STEPS,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    bf16=True,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    eval_strategy="steps",
    eval_steps=20,
    save_strategy="no",
    logging_steps=10,
    use_cpu=True,
    report_to=[],
)
lsgd = LsgdCallback()  # lsgd
trainer = Trainer(
    model=ViTForImageClassification(config),
    args=arguments,
    train_dataset=rows[297:],
    eval_dataset=rows[:297],
    callbacks=[lsgd],  # lsgd
)
trainer.train()
if lsgd.first:  # lsgd
    trainer.model.save_pretrained("vit/final")
    print(f"held-out loss: {trainer.evaluate()['eval_loss']:.4f}")
