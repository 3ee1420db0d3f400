"""accelerate: prepare, accumulate, clip, a scheduler of transformers, gathered metrics.

Needs: accelerate transformers
Steps: 80
"""

import sys
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from lsgd.integrations.accelerate import LsgdLoop  # lsgd

STEPS, CONTEXT = int(sys.argv[1]), 64
set_seed(0)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in sources)[: 1 << 19]
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, CONTEXT)
windows = windows[torch.randperm(len(windows))]
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_scheduler("cosine", optimizer, STEPS // 10, STEPS)
loader = DataLoader(TensorDataset(windows[256:]), batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
with LsgdLoop(accelerator, model, optimizer, loader) as lsgd:  # lsgd
    lsgd.worker.steps = STEPS  # lsgd
    step = 0
    step = lsgd.worker.step  # lsgd
    while step < STEPS and not lsgd.stopped:  # lsgd: while step < STEPS:
        for (ids,) in lsgd.batches():  # lsgd: for (ids,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            lsgd.report(loss)  # lsgd
            step += accelerator.sync_gradients
            if step == STEPS:
                break

if lsgd.worker.first:  # lsgd
    accelerator.unwrap_model(model).save_pretrained("llama")
    model.eval()
    with torch.no_grad():
        print(f"held-out loss: {model(input_ids=windows[:256], labels=windows[:256]).loss.item():.4f}")
