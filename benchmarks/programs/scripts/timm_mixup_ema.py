"""timm: a small network with mixup, label smoothing, timm's scheduler, and an EMA of the weights.

Needs: timm torchvision
Steps: 200
Remark: The figure is that of the averaged weights
"""

import sys

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS = int(sys.argv[1])
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
images = F.interpolate(images, scale_factor=4)
data = TensorDataset(images[297:], torch.tensor(digits.target[297:]))
loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-3, weight_decay=0.05)
averaged = ModelEmaV3(model, decay=0.8)
worker = lsgd.wrap(model, optimizer, steps=STEPS, extra={"averaged": averaged})  # lsgd
loader = worker.shard(loader)  # lsgd
schedule = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=STEPS // 10, warmup_lr_init=1e-4, t_in_epochs=False)
mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=10)
criterion = SoftTargetCrossEntropy()
step = 0
step = worker.step  # lsgd
schedule.step_update(step)
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for x, y in loader:
        x, y = mixup(x, y)
        loss = criterion(model(x), y)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        averaged.update(model, step=step)
        schedule.step_update(step)
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": averaged.module.state_dict()}, "digits.pth.tar")
    averaged.module.eval()
    with torch.no_grad():
        loss = F.cross_entropy(averaged.module(images[:297]), torch.tensor(digits.target[:297]))
    print(f"held-out loss: {loss.item():.4f}")
