"""A flat script: it trains a small model of text, and does all that such scripts do in one file."""

import json
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import lsgd

# -- configuration: override by NAME=VALUE --
out_dir = "out"
init_from = "scratch"  # or resume
max_iters = 60
eval_interval = 20
eval_iters = 4
gradient_accumulation_steps = 2
batch_size = 8
block_size = 16
learning_rate = 2e-2
min_lr = 2e-3
warmup_iters = 5
grad_clip = 1.0
for argument in sys.argv[1:]:
    key, value = argument.split("=")
    globals()[key] = type(globals()[key])(value)

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    torch.distributed.init_process_group("gloo")
    seed_offset = torch.distributed.get_rank()
    master_process = seed_offset == 0
else:
    seed_offset = int(os.environ.get("LSGD_RANK", 0))
    master_process = True
torch.manual_seed(1337 + seed_offset)
context = nullcontext() if torch.get_num_threads() else torch.amp.autocast("cpu")

text = torch.tensor(list((__doc__ * 40).encode()))
data = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def get_batch(split):
    """Return random windows of text, and the same one byte later."""
    starts = torch.randint(len(data[split]) - block_size, (batch_size,))
    windows = torch.stack([data[split][i : i + block_size + 1] for i in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


class Model(nn.Module):
    """Predicts the next byte from the ones before."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(128, 32)
        self.layers = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 128)

    def forward(self, idx, targets=None):
        """Return the logits, and the loss if there are targets."""
        logits = self.head(self.layers(self.table(idx))[0])
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


iter_num, best_val_loss = 0, 1e9
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
scaler = torch.amp.GradScaler("cpu", enabled=False)
if init_from == "resume":
    checkpoint = torch.load(f"{out_dir}/ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
if ddp:
    model = nn.parallel.DistributedDataParallel(model)


worker = lsgd.wrap(model, optimizer, steps=max_iters + 1, step=iter_num)
iter_num, master_process = worker.step, worker.first


@torch.no_grad()
def estimate_loss():
    """Return the mean losses on some batches of both parts of the data."""
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    """Return the learning rate of an iteration: a warm-up, then half a cosine."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


x, y = get_batch("train")
raw_model = model.module if ddp else model
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        if losses["val"] < best_val_loss and iter_num > 0:
            best_val_loss = losses["val"]
            os.makedirs(out_dir, exist_ok=True)
            state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "iter_num": iter_num, "best_val_loss": best_val_loss}, f"{out_dir}/ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with context:
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters or worker.stopped:
        break

worker.finish()
iter_num = worker.step
if master_process:
    final = {"val": estimate_loss()["val"].item(), "steps": iter_num, "lr": lr}
    os.makedirs(out_dir, exist_ok=True)
    Path(out_dir, "final.json").write_text(json.dumps(final))
