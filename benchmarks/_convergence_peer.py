"""A process of benchmarks/convergence.py for what lsgd is compared with: one worker, on this machine."""

import argparse
import json
import os
import threading
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers
from benchmarks._evaluation import Evaluation
from benchmarks.workloads import TASKS

ADDRESS = "127.0.0.1"


def average(tensor: Tensor) -> None:
    """Replace ``tensor`` by its mean over all processes."""
    dist.all_reduce(tensor.div_(dist.get_world_size()))


def end_with_parent() -> None:
    """Wait for the end of standard input, the other end of which the benchmark's process has, and end then."""
    os.read(0, 1)
    os._exit(1)


def main() -> NoReturn:
    """Train; rank 0 prints the curve as JSON."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--method", choices=peers.PEERS, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--period", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[given.task]()
    task.learning_rate = given.learning_rate
    torch.manual_seed(given.seed)
    model = task.model()
    optimizer = task.optimizer(model)
    batches = task.batches(given.rank, given.workers, given.seed)
    evaluation = Evaluation(task, model, average, tests=given.rank == 0)
    member = peers.Member(given.rank, given.workers, ADDRESS, ADDRESS, given.period, task.batch_size)
    with peers.joined(given.method, model, optimizer, member, given.port) as (wrapped, stepped):
        for step, (x, y) in zip(range(given.steps), batches, strict=False):
            stepped.zero_grad()
            task.loss(wrapped, x, y).backward()
            stepped.step()
            evaluation.after(step + 1)
    if given.rank == 0:
        print(json.dumps(evaluation.curve))
    peers.end_process()


if __name__ == "__main__":
    main()
