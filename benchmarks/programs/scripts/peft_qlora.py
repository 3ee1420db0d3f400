"""QLoRA's shape: a base in 4 bit by bitsandbytes, frozen, with LoRA adapters that train, and gradient checkpointing.

Needs: peft transformers bitsandbytes
Steps: 60
"""

import sys
import sysconfig
from pathlib import Path

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

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
for block in base.model.layers:  # as from_pretrained does with a BitsAndBytesConfig, which wants files
    for part in (block.self_attn, block.mlp):
        for name, layer in [*part.named_children()]:
            if isinstance(layer, nn.Linear):
                small = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
                small.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                setattr(part, name, small.to("cpu"))
wanted = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["lm_head"])
model = get_peft_model(base, wanted)
model.enable_input_require_grads()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
loader = DataLoader(TensorDataset(windows[256:]), batch_size=8, shuffle=True)
worker = lsgd.wrap(model, optimizer, steps=STEPS)  # lsgd
loader = worker.shard(loader)  # lsgd
step = 0
step = worker.step  # lsgd
model.train()
while step < STEPS and not worker.stopped:  # lsgd: while step < STEPS:
    for (ids,) in loader:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == STEPS:
            break

worker.finish()  # lsgd
if worker.first:  # lsgd
    model.save_pretrained("adapters")
    model.eval()
    with torch.no_grad():
        print(f"held-out loss: {model(input_ids=windows[:256], labels=windows[:256]).loss.item():.4f}")
