"""FSDP2 inside a machine: each worker is an island of two processes that share one sharded model.

Steps: 60
Alone: -m torch.distributed.run --standalone --nproc-per-node=2
Launch: --processes-per-worker 2
Remark: A check takes each worker as one process
"""

import os
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsgd  # lsgd

STEPS, CONTEXT, WIDTH = int(sys.argv[1]), 64, 64
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)  # without torchrun
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in sources)[: 1 << 19]
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, CONTEXT)
windows = windows[torch.randperm(len(windows))]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.logits = nn.Linear(WIDTH, 256)

    def forward(self, x):
        h = self.token(x[:, :-1]) + self.place.weight[:-1]
        for layer in self.layers:
            h = layer(h, nn.Transformer.generate_square_subsequent_mask(CONTEXT - 1), is_causal=True)
        return F.cross_entropy(self.logits(h).flatten(0, 1), x[:, 1:].flatten())


model = Decoder()
for part in (*model.layers, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(windows[256:]), batch_size=8, shuffle=True)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (ids,) in loader:
        loss = model(ids)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
with torch.no_grad():
    loss = model(windows[:256]).item()
whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
if dist.get_rank() == 0 and worker.first:  # lsgd: if dist.get_rank() == 0:
    torch.save(whole, "model.pt")
    print(f"held-out loss: {loss:.4f}")
dist.destroy_process_group()
