"""Train a tiny Llama on the standard library's sources, byte by byte, in a custom loop with accelerate."""

import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lsgd.client import muon
from lsgd.integrations.accelerate import LsgdLoop

CONTEXT, WIDTH = 64, 64

sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in sources)[: 1 << 20]
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) // CONTEXT * CONTEXT]
data = TensorDataset(windows.view(-1, CONTEXT))

torch.manual_seed(0)
shape = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **shape))
optimizer = muon(model, lr=6e-3)
loader = DataLoader(data, batch_size=16, shuffle=True)

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with LsgdLoop(accelerator, model, optimizer, loader) as lsgd:
    lsgd.worker.schedule(optimizer, "wsd", warmup=0.05)
    while not lsgd.stopped:
        for (x,) in lsgd.batches():
            with accelerator.accumulate(model):
                loss = model(input_ids=x, labels=x).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            lsgd.report(loss)
if lsgd.worker.first:
    model.save_pretrained("accelerate-model")
