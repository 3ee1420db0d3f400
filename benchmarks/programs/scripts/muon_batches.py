"""A decoder with Muon in the strict loop of Worker.join and worker.batches, with a schedule by the run's progress.

Steps: 160
Variables: LSGD_ITERATIONS=160
Remark: Alone it has no schedule: lsgd's is by the progress of the run
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lsgd.client import Worker  # lsgd

STEPS, CONTEXT, WIDTH = int(sys.argv[1]), 64, 48
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
matrices = [p for p in model.layers.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if all(p is not each for each in matrices)]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3)]
loader = DataLoader(TensorDataset(windows[256:]), batch_size=8, shuffle=True)
with Worker.join(model, optimizers) as worker:  # lsgd
    for each in optimizers:  # lsgd
        worker.schedule(each, "wsd", warmup=0.05)  # lsgd
    loader = worker.shard(loader)  # lsgd
    step = 0
    while not worker.stopped:  # lsgd: while step < STEPS:
        for (ids,) in worker.batches(loader):  # lsgd: for (ids,) in loader:
            loss = model(ids)
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            for each in optimizers:
                each.step()
            worker.report(loss)  # lsgd
            step += 1
            if worker.stopped:  # lsgd: if step == STEPS:
                break
    if worker.first:  # lsgd
        torch.save(model.state_dict(), "model.pt")
        with torch.no_grad():
            print(f"held-out loss: {model(windows[:256]).item():.4f}")
