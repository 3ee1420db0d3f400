"""A small regression, trained as a user would, with switches for what a test is about.

Writes a line for each step to ``<name>.steps``, and at the end what it knows to ``<name>.json``.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from lsgd.client import Worker
from lsgd.client.control import joining

parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.0, help="seconds in every turn")
parser.add_argument("--behind", nargs=2, default=("", 0), help="and until this file has so many steps more, or none")
parser.add_argument("--nap-at", type=int, default=0, help="nap in this iteration")
parser.add_argument("--pause-at", type=int, default=0, help="pause for a nap after this iteration")
parser.add_argument("--nap", type=float, default=0.0, help="for so many seconds")
parser.add_argument("--until", type=Path, help="and until this file is there")
parser.add_argument("--fail-at", type=int, default=0, help="raise in this iteration, after the step")
parser.add_argument("--break-at", type=int, default=0, help="leave the loop in this iteration, before the step")
parser.add_argument("--width", type=int, default=16, help="of the model")
parser.add_argument("--nan", action="store_true", help="report losses that are not numbers")
parser.add_argument("--same-data", action="store_true", help="draw from the whole dataset, seeded alike")
parser.add_argument("--torch-version", default="", help="claim to have this one")
parser.add_argument("--protocol", type=int, default=joining.PROTOCOL, help="claim to speak this version")
options = parser.parse_args()

joining.PROTOCOL = options.protocol
if options.torch_version:
    torch.__version__ = options.torch_version
torch.manual_seed(time.monotonic_ns())
model = nn.Sequential(nn.Linear(8, options.width), nn.BatchNorm1d(options.width), nn.Linear(options.width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def plain_loader() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=generator)


times: list[float] = []
rates: list[float] = []
naps: list[tuple[float, float]] = []


def nap() -> None:
    started_at = time.monotonic()
    print("naps", flush=True)
    time.sleep(options.nap)
    while options.until and not options.until.exists():
        time.sleep(0.02)
    naps.append((started_at, time.monotonic()))


def ahead() -> int:
    """Return how many steps the worker that this one is to be behind has made."""
    path = Path(options.behind[0])
    return len(path.read_text().split()) if path.is_file() else 0


def rest() -> None:
    """Sleep, and again while that worker makes steps, but not yet enough of them."""
    first = before = ahead()
    time.sleep(options.sleep)
    while before < (now := ahead()) < first + int(options.behind[1]):
        before = now
        time.sleep(options.sleep)


with Worker.join(model, optimizer) as worker:
    assert worker.run_dir is not None
    path = worker.run_dir / worker.name.replace("/", "-")
    loader = plain_loader() if options.same_data else worker.loader(data, batch_size=16)
    if worker.plan.run.iterations or worker.plan.run.seconds:
        worker.schedule(optimizer, "linear")
    with path.with_suffix(".steps").open("w", buffering=1) as steps:
        broken = False
        while not worker.stopped and not broken:
            for x, y in worker.batches(loader):
                iteration = worker.iterations + 1
                if iteration == options.break_at:
                    broken = True
                    break
                if iteration == options.nap_at:
                    nap()
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                times.append(time.monotonic())
                rates.append(optimizer.param_groups[0]["lr"])
                steps.write(f"{iteration}\n")
                worker.report(float("nan") if options.nan else loss)
                if iteration == options.fail_at:
                    raise RuntimeError("the data is bad")
                if iteration == options.pause_at:
                    with worker.pause():
                        nap()
                rest()
    status = worker.status() if worker.rank == 0 else None

result = {
    "rank": worker.rank,
    "world_size": worker.world_size,
    "iterations": worker.iterations,
    "stopped": worker.stopped,
    "progress": worker.progress,
    "distance": worker.consensus_distance,
    "times": times,
    "naps": naps,
    "rates": rates,
    "status": status,
    "loss": nn.functional.mse_loss(model.eval()(inputs), data.tensors[1]).item(),
    "model": {n: x.flatten().tolist() for n, x in model.state_dict().items() if x.is_floating_point()},
}
path.with_suffix(".json").write_text(json.dumps(result))
