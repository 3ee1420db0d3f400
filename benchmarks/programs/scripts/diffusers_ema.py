"""diffusers: a UNet that learns to remove noise, by accelerate, with an EMA of the weights that is what is saved.

Needs: diffusers accelerate
Steps: 40
"""

import sys

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS = int(sys.argv[1])
torch.manual_seed(0)
images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
loader = DataLoader(TensorDataset(images[256:]), batch_size=16, shuffle=True, drop_last=True)
unet = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
noises = DDPMScheduler(num_train_timesteps=100)
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
ema = EMAModel(unet.parameters(), decay=0.95, use_ema_warmup=True)
worker = lsgd.wrap(unet, optimizer, steps=STEPS, extra={"ema": ema})  # lsgd
loader = worker.shard(loader)  # lsgd
worker.follow(schedule)  # lsgd


def loss_of(clean, generator=None):
    noise = torch.randn(clean.shape, generator=generator)
    times = torch.randint(0, 100, (len(clean),), generator=generator)
    return F.mse_loss(unet(noises.add_noise(clean, noise, times), times).sample, noise)


step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (clean,) in loader:
        loss = loss_of(clean)
        worker.report(loss)  # lsgd
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.step(unet.parameters())
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    unet.save_pretrained("unet")
    ema.copy_to(unet.parameters())
    unet.save_pretrained("unet_ema")
    unet.eval()
    with torch.no_grad():
        print(f"held-out loss: {loss_of(images[:256], torch.Generator().manual_seed(0)).item():.4f}")
