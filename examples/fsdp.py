"""Train a transformer on the standard library's sources, byte by byte, with each worker's model sharded by FSDP2."""

import sysconfig
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lsgd.client as lsgd

CONTEXT, WIDTH, LAYERS = 64, 128, 4

sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)[: 1 << 20]), dtype=torch.uint8).long()
windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
data, unseen = TensorDataset(windows[64:]), windows[:64]


class Transformer(nn.Module):
    """A decoder of bytes, with 0.9 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(deepcopy(layer) for _ in range(LAYERS))
        self.logits = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of predicting each byte from those before it."""
        h = self.token(x[:, :-1]) + self.place.weight
        for layer in self.layers:
            h = layer(h, nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device), is_causal=True)
        return cross_entropy(self.logits(h).flatten(0, 1), x[:, 1:].flatten())


device = lsgd.device()
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # of this worker's processes alone
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
torch.manual_seed(0)
model = Transformer().to(device)
for part in (*model.layers, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
with lsgd.Worker.join(model, optimizer) as worker:
    worker.schedule(optimizer, warmup=0.05)
    loader = worker.loader(data, batch_size=8)
    while not worker.stopped:
        for (x,) in worker.batches(loader):
            loss = model(x.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    with torch.no_grad():
        final = model(unseen.to(device)).item()
    if worker.is_head:
        print(f"{worker.name}: loss {final:.3f} on unseen text", flush=True)
    if worker.first:
        worker.save()  # all processes of the island call it, and the head writes
dist.destroy_process_group()
