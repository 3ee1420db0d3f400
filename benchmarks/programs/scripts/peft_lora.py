"""peft: LoRA adapters on a frozen language model, in a loop with a torch scheduler; the adapters alone are saved.

Needs: peft transformers
Steps: 80
"""

import sys
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup, set_seed

import lsgd  # lsgd

STEPS, CONTEXT = int(sys.argv[1]), 64
set_seed(0)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in sources)[: 1 << 19]
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, CONTEXT)
windows = windows[torch.randperm(len(windows))]
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
)
wanted = LoraConfig(
    r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
)
model = get_peft_model(base, wanted)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
loader = DataLoader(TensorDataset(windows[256:]), batch_size=16, shuffle=True)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
scheduler = get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
worker.follow(scheduler)  # lsgd
step = 0
step = worker.step  # lsgd
model.train()
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (ids,) in loader:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    model.save_pretrained("adapters")
    model.eval()
    with torch.no_grad():
        print(f"held-out loss: {model(input_ids=windows[:256], labels=windows[:256]).loss.item():.4f}")
