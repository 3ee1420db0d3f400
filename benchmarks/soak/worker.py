"""The training script of benchmarks/soak: digits (W1) by the small network of benchmarks/workloads.py.

The model has a buffer ``age`` that each step makes older by one. Global rounds average it and newcomers take it over,
as they do every buffer. So a model that began anew is young, however many iterations the run has counted.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.workloads import Digits
from lsgd.client import Worker

SAYS_EVERY_S = 2.0


def result_of(worker: Worker, model: nn.Module, task: Digits) -> dict[str, object]:
    """Return what the soak compares: digest, accuracy and age of the model that this worker ends with."""
    shared = [x for x in model.state_dict().values() if x.is_floating_point()]
    digest = hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in shared)).hexdigest()
    age = model.get_buffer("age").item()
    return {"worker": worker.name, "digest": digest[:16], "accuracy": task.test(model).accuracy, "age": age}


def main() -> None:
    """Train until the run ends; write a line for each step, and the result after a long time of saving."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, required=True, help="folder, on a disk that is never full")
    parser.add_argument("--sleep-s", type=float, default=0.0, help="after each step")
    parser.add_argument("--save-s", type=float, default=0.0, help="how long saving the result takes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = Digits()
    torch.manual_seed(0)
    model = task.model()
    age = torch.zeros(())
    model.register_buffer("age", age)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    with Worker.join(model, optimizer) as worker:
        worker.schedule(optimizer, "linear")
        loader = worker.loader(TensorDataset(*task.train_data), batch_size=32)
        name = f"{worker.name.replace('/', '-')}-{time.time_ns()}-{os.getpid()}"
        said_at = time.monotonic()
        with (given.results / f"{name}.steps").open("wb", buffering=0) as steps:
            while not worker.stopped:
                for x, y in worker.batches(loader):
                    loss = task.loss(model, x, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    age += 1
                    steps.write(b"%.2f %.0f\n" % (time.time(), age.item()))
                    worker.report(loss)
                    if time.monotonic() - said_at > SAYS_EVERY_S:
                        said_at = time.monotonic()
                        print(
                            f"{worker.progress:4.0%}, loss {loss.item():.4f}, age {age.item():.0f}",
                            flush=True,
                        )
                    time.sleep(given.sleep_s)
        result = json.dumps(result_of(worker, model, task))
        (given.results / f"{name}.saving").touch()
        time.sleep(given.save_s)
        (given.results / f"{name}.json").write_text(result)


if __name__ == "__main__":
    main()
