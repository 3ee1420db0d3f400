"""A plain DistributedDataParallel script for torchrun: trains with a communication hook and prints what came out.

Usage: ddp_training.py HOOK..., one after the other in the same processes. A HOOK is none, quantized, feedback,
stochastic, halves (each half of the ranks trains a model of its own) or overflow: with feedback, a GradScaler, and a
gradient that is infinite on the last rank in one step. The variable STEPS has how many they make.
"""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lsgd.ddp_hook import QuantizedState, quantized_hook

STEPS = int(os.environ.get("STEPS", "100"))
BATCH, FEATURES, CLASSES = 32, 20, 5
OVERFLOW_STEP = 20


def train(hook: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES)
    labels = torch.randint(CLASSES, (4000,))
    points = centers[labels] + 1.5 * torch.randn(4000, FEATURES)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    both = [dist.new_group([*range(first, first + size // 2)]) for first in (0, size // 2)] if hook == "halves" else []
    group = both[rank // (size // 2)] if both else None
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)  # several buckets
    if hook != "none":
        rounding = "stochastic" if hook == "stochastic" else "nearest"
        state = QuantizedState(group, rounding=rounding, error_feedback=hook in ("feedback", "overflow"), block=512)
        ddp.register_comm_hook(state, quantized_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=hook == "overflow", init_scale=8.0)
    for step in range(STEPS):
        rows = torch.arange(step * size * BATCH, (step + 1) * size * BATCH) % len(points)
        mine = rows[rank::size]
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / STEPS)  # else the last steps' noise hides the methods'
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(points[mine]), labels[mine])
        if hook == "overflow" and (step, rank) == (OVERFLOW_STEP, size - 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        final_loss = float(nn.functional.cross_entropy(model(points), labels))
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digests: list[str | None] = [None] * size
    dist.all_gather_object(digests, hashlib.sha256(bits).hexdigest())
    residuals = len(state.feedback) if hook != "none" else 0
    if rank == 0:
        found = {"hook": hook, "loss": final_loss, "digests": digests, "residuals": residuals}
        print(json.dumps({**found, "scale": scaler.get_scale()}))


def main(hooks: list[str]) -> None:
    dist.init_process_group("gloo")
    for hook in hooks:
        train(hook)
    dist.destroy_process_group()
    # On a busy machine torch's own threads abort the end of the interpreter now and then, without any hook of ours too.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
