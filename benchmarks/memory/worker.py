"""The training script of benchmarks/memory: it notes the memory of its process before each iteration.

Writes to the file that is named a line for each: the algorithm and its settings, the bytes that are resident, and the
most that were since the line before; both less what was resident with the model and its gradients before the join.
"""

import argparse
import ctypes
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from lsgd.client import Worker
from lsgd.plan.plan import table_of

PARTS = 50
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt: from how many bytes on an allocation has pages of its own, which are given back with it."""


class Parts(nn.Module):
    """So many parameters in parts, whose gradients take no memory beside them."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(numel // PARTS) for _ in range(PARTS))

    def forward(self) -> Tensor:
        """Return a loss."""
        total: Tensor = torch.stack([part.mean() for part in self.parts]).sum()
        return total


def resident_nbytes() -> tuple[int, int]:
    """Return the bytes of this process in memory now, and the most since :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    return kib["VmRSS"] << 10, kib["VmHWM"] << 10


def forget_peak() -> None:
    """Have the kernel begin anew with the most memory that this process has had."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Train, and note the memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("numel", type=int)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    model = Parts(given.numel)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: Tensor = model()
        loss.backward()
        optimizer.step()
        return loss

    step()
    before, _ = resident_nbytes()
    lines = []
    with Worker.join(model, optimizer, same_data=True) as worker:
        while not worker.stopped:
            for _ in worker.batches(range(1 << 20)):
                now, peak = resident_nbytes()
                lines.append(json.dumps([table_of(worker.algorithm), now - before, peak - before]))
                forget_peak()
                worker.report(step())
    given.file.with_suffix(f".{worker.rank}").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
