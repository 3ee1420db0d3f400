"""A flat script like nanoGPT's train.py: torch.compile, accumulation, its own schedule, evaluation and saves.

Steps: 80
"""

import math
import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lsgd  # lsgd

max_iters = int(sys.argv[1])
eval_interval, eval_iters, batch_size, block_size, accumulation = 20, 4, 8, 64, 2
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, max_iters // 10
out_dir, master_process, iter_num, best = "out", True, 0, 1e9

seed_offset = int(os.environ.get("LSGD_RANK", 0))  # lsgd: seed_offset = 0
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)[: 1 << 20]), dtype=torch.uint8)
parts = {"train": data[: -(1 << 16)], "val": data[-(1 << 16) :]}


def get_batch(split):
    ix = torch.randint(len(parts[split]) - block_size - 1, (batch_size,))
    x = torch.stack([parts[split][i : i + block_size] for i in ix]).long()
    y = torch.stack([parts[split][i + 1 : i + 1 + block_size] for i in ix]).long()
    return x, y


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width=64, layers=2, heads=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
raw_model = model
model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [torch.stack([model(*get_batch("val"))[1] for _ in range(eval_iters)]).mean()]
    model.train()
    return losses[0].item()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


worker = lsgd.wrap(model, optimizer, steps=max_iters, step=iter_num)  # lsgd
iter_num, master_process = worker.step, worker.first  # lsgd
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and iter_num:
        val = estimate_loss()
        if master_process:
            print(f"step {iter_num}: val loss {val:.4f}")
        if val < best and master_process:
            best = val
            torch.save({"model": raw_model.state_dict(), "iter_num": iter_num}, f"{out_dir}/ckpt.pt")
    if iter_num >= max_iters or worker.stopped:  # lsgd: if iter_num >= max_iters:
        break
    for _ in range(accumulation):
        _, loss = model(*get_batch("train"))
        (loss / accumulation).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

worker.finish()  # lsgd
iter_num = worker.step  # lsgd
if master_process:
    torch.save({"model": raw_model.state_dict(), "iter_num": iter_num}, f"{out_dir}/ckpt.pt")
    torch.manual_seed(0)
    eval_iters = 40
    print(f"held-out loss: {estimate_loss():.4f}")
