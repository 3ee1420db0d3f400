"""A stream of Hugging Face datasets: files of JSON, shuffled in a buffer, tokenized as they come.

Needs: datasets
Steps: 120
Remark: After a resume datasets fills its shuffle buffer anew, so batches differ
"""

import json
import sys
from pydoc_data.topics import topics

import torch
from datasets import load_dataset
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lsgd  # lsgd

STEPS, CONTEXT = int(sys.argv[1]), 48
texts = [part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > CONTEXT]
held_out, texts = texts[::20], [part for number, part in enumerate(texts) if number % 20]
for number in range(4):
    with open(f"text-{number}.jsonl", "w") as file:
        file.writelines(json.dumps({"text": part}) + "\n" for part in texts[number::4])


def tensor(part):
    return torch.tensor(list(part.encode()[: CONTEXT + 1].ljust(CONTEXT + 1)), dtype=torch.long)


stream = load_dataset("json", data_files="text-*.jsonl", split="train", streaming=True, cache_dir="cache")
stream = stream.shuffle(seed=0, buffer_size=200)
loader = DataLoader(stream, batch_size=16, collate_fn=lambda rows: torch.stack([tensor(row["text"]) for row in rows]))
torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.rnn, self.logits = nn.Embedding(256, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 256)

    def forward(self, x):
        return F.cross_entropy(self.logits(self.rnn(self.token(x[:, :-1]))[0]).flatten(0, 1), x[:, 1:].flatten())


model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for x in loader:
        loss = model(x)
        worker.report(loss)  # lsgd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    torch.save(model.state_dict(), "model.pt")
    with torch.no_grad():
        print(f"held-out loss: {model(torch.stack([tensor(part) for part in held_out])).item():.4f}")
