"""ultralytics: a YOLO classifier from its yaml on a folder of images, with its EMA, warm-up and validations.

Needs: ultralytics torchvision opencv-python-headless
Steps: 80
Remark: Its trainer is joined by a callback, and gets a DataLoader that has a length
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader
from ultralytics import YOLO

import lsgd  # lsgd

EPOCHS = max(1, int(sys.argv[1]) // 40)
EPOCHS = 2  # lsgd
digits = load_digits()
for row, (image, label) in enumerate(zip(digits.images[:740], digits.target[:740], strict=True)):
    folder = Path("digits", "train" if row >= 100 else "val", str(label))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{row}.png").exists():
        Image.fromarray(np.kron(image * 15, np.ones((4, 4))).astype("uint8")).convert("RGB").save(folder / f"{row}.png")
name = "train"
name += os.environ.get("LSGD_RANK", "")  # lsgd


def join(trainer):  # lsgd
    global worker  # lsgd
    extra = {"ema": trainer.ema.ema}  # lsgd
    worker = lsgd.wrap(trainer.model, trainer.optimizer, extra=extra)  # lsgd
    own = trainer.train_loader  # lsgd
    loader = DataLoader(own.dataset, batch_size=16, shuffle=True, collate_fn=own.collate_fn)  # lsgd
    trainer.train_loader = worker.shard(loader)  # lsgd
    worker.steps = EPOCHS * len(trainer.train_loader)  # lsgd
    trainer.start_epoch = worker.step // len(trainer.train_loader)  # lsgd
    worker.follow(trainer.scheduler, lambda: worker.step // len(trainer.train_loader))  # lsgd


def end(trainer):  # lsgd
    trainer.stop |= worker.stopped  # lsgd
    trainer.tloss = torch.zeros(()) if trainer.tloss is None else trainer.tloss  # lsgd


model = YOLO("yolo11n-cls.yaml")
model.add_callback("on_pretrain_routine_end", join)  # lsgd
model.add_callback("on_train_epoch_end", end)  # lsgd
model.train(
    data=str(Path("digits").resolve()),
    epochs=EPOCHS,
    imgsz=32,
    batch=16,
    nbs=16,
    workers=0,
    warmup_epochs=0,
    close_mosaic=0,
    optimizer="AdamW",
    lr0=5e-3,
    device="cpu",
    plots=False,
    amp=False,
    project=str(Path("yolo").resolve()),
    name=name,
    exist_ok=True,
)
worker.finish()  # lsgd
if worker.first:  # lsgd
    net = model.trainer.model.eval()
    torch.save(net.state_dict(), "final.pt")
    batches = [(batch["img"], batch["cls"]) for batch in model.trainer.test_loader]
    with torch.no_grad():
        losses = [F.nll_loss(net(x.float())[0].clamp_min(1e-9).log(), y) for x, y in batches]
    print(f"held-out loss: {torch.stack(losses).mean().item():.4f}")
