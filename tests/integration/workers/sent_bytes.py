"""A model of 1001 parameters a row, and the bytes that have left this machine's ``eth0`` after each step.

Writes a line for each step to ``sent<rank>`` in a folder: the algorithm and its settings, and the bytes. In an
island the head does, and each process writes the bytes that it has sent itself to ``own<rank>.<process>``.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.testbed.interface import sent_with_headers_nbytes
from lsgd.client import Worker
from lsgd.plan.plan import table_of


def under_way_nbytes() -> int:
    """Return what this machine's sockets have yet to send, or to hear of that it has arrived."""
    sockets = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(int(socket.split()[4].partition(":")[0], 16) for socket in sockets)


def sent_nbytes() -> int:
    """Return the bytes that this machine has sent, with the headers of every packet, when none is under way."""
    deadline = time.monotonic() + 100
    while left := under_way_nbytes():
        assert time.monotonic() < deadline, f"{left} bytes are under way"
        time.sleep(0.0005)
    return sent_with_headers_nbytes()


folder, rows = Path(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Linear(1000, rows)
if "LSGD_ISLAND" in os.environ:
    from torch.distributed.fsdp import fully_shard  # it takes a second

    torch.distributed.init_process_group("gloo")
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = torch.utils.data.TensorDataset(torch.randn(60, 1000))
lines = []

with Worker.join(model, optimizer) as worker:
    loader = worker.loader(data, batch_size=4)
    while not worker.stopped:
        for (x,) in worker.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
            lines.append(json.dumps([table_of(worker.algorithm), sent_nbytes()]))
    if "LSGD_ISLAND" in os.environ:
        own = folder / f"own{worker.rank}.{torch.distributed.get_rank()}"
        own.write_text(str(worker.timings.sent_nbytes))
if worker.is_head:
    (folder / f"sent{worker.rank}").write_text("\n".join(lines))
