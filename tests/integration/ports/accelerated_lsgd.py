"""A script with accelerate: accumulation, a schedule over all steps, evaluation after each epoch, saving at the end."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsgd

out_dir, num_train_epochs, batch_size, accumulation = sys.argv[1], int(sys.argv[2]), 16, 2


class Model(nn.Module):
    """Predicts the next number of a line of numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, input_ids, labels):
        """Return an object with the loss."""
        logits = self.layers(input_ids)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def lines(number, seed):
    """Return lines in which each number is three more than the one before."""
    starts = torch.randint(16, (number, 1), generator=torch.Generator().manual_seed(seed))
    made = (starts + 3 * torch.arange(9)) % 16
    return TensorDataset(made[:, :-1], made[:, 1:])


accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
torch.manual_seed(0)
model = Model()
train_dataloader = DataLoader(lines(960, 1), shuffle=True, batch_size=batch_size)
eval_dataloader = DataLoader(lines(160, 2), batch_size=batch_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
worker = lsgd.wrap(model.to(accelerator.device), optimizer)
train_dataloader = worker.shard(train_dataloader)

num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accumulation)
max_train_steps = num_train_epochs * num_update_steps_per_epoch
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max_train_steps)
worker.follow(lr_scheduler)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accumulation)
max_train_steps = num_train_epochs * num_update_steps_per_epoch

completed_steps = 0
for epoch in range(num_train_epochs):
    model.train()
    total_loss = 0
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            outputs = model(*batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
        if completed_steps >= max_train_steps:
            break
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(*batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(batch_size)))
    eval_loss = torch.mean(torch.cat(losses)).item()
    print(f"epoch {epoch}: perplexity {math.exp(eval_loss)}, train loss {total_loss.item() / len(train_dataloader)}")
    if worker.stopped:
        break

worker.finish()
accelerator.wait_for_everyone()
unwrapped_model = accelerator.unwrap_model(model)
if accelerator.is_main_process and worker.first:
    accelerator.save(unwrapped_model.state_dict(), f"{out_dir}/model.pt")
    final = {"val": eval_loss, "steps": worker.step, "lr": lr_scheduler.get_last_lr()[0]}
    Path(out_dir, "final.json").write_text(json.dumps(final))
