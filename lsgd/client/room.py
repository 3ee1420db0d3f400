"""Whether there is memory for a delay: workers that train on during an exchange keep a copy of what they exchange."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import nn

from lsgd.processors import control_groups

COPIES = 6
"""In float32, of the model: gradients, two moments, the common model, what was not sent, and the copy of a delay."""


def lack_of_room(model: nn.Module) -> str:
    """Return why the memory of the model's device has no room for a training with a delay; empty if it has."""
    trained = [p for p in model.parameters() if p.requires_grad]
    device = trained[0].device if trained else torch.device("cpu")
    needed = COPIES * sum(4 * p.numel() for p in trained)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else min(_of_host())
    if free >= needed:
        return ""
    where = device if device.type == "cuda" else "this machine"
    return (
        f'delay = "auto" stays off here: it needs a copy of the model more, with which a training of this model takes '
        f"about {needed / 1e9:.1f} GB, and {where} has {free / 1e9:.1f} GB free"
    )


def _of_host() -> Iterator[int]:
    """Yield the bytes that the machine and this process's control groups leave."""
    yield psutil.virtual_memory().available
    for group in control_groups("memory"):
        yield from left_in(group)


def left_in(group: Path) -> Iterator[int]:
    """Yield what a control group of version 2 or 1 leaves, if it has a limit."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        if (group / limit).exists() and (text := (group / limit).read_text().strip()) != "max":
            yield int(text) - int((group / used).read_text())
