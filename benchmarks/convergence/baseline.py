"""A process of benchmarks/convergence for what lsgd is compared with: one worker, on this machine."""

import argparse
import json
import os
import threading
from dataclasses import asdict
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.baselines.joining import add_arguments, end_process, joined
from benchmarks.convergence.evaluation import Evaluation
from benchmarks.workloads import OPTIMIZERS, SHARDS, TASKS


def average(tensor: Tensor) -> None:
    """Replace ``tensor`` by its mean over all processes."""
    dist.all_reduce(tensor.div_(dist.get_world_size()))


def end_with_parent() -> None:
    """Wait for the end of standard input, the other end of which the benchmark's process has, and end then."""
    os.read(0, 1)
    os._exit(1)


def main() -> NoReturn:
    """Train; rank 0 prints the curve and the final score as JSON."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, required=True)
    add_arguments(parser)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--shards", choices=SHARDS, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="task")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[given.task]()
    task.learning_rate, task.shards, task.chosen_optimizer = given.learning_rate, given.shards, given.optimizer
    torch.manual_seed(given.seed)
    model = task.model()
    optimizer = task.make_optimizer(model)
    batches = task.batches(given.rank, len(given.addresses), given.seed)
    evaluation = Evaluation(task, model, average, tests=given.rank == 0)
    with joined(given, model, optimizer, task.batch_size, given.port) as (wrapped, stepped):
        for step, (x, y) in zip(range(given.steps), batches, strict=False):
            task.set_learning_rate(optimizer, (step + 0.5) / given.steps)
            stepped.zero_grad()
            task.loss(wrapped, x, y).backward()
            stepped.step()
            evaluation.after(step + 1)
        final = evaluation.end()
    if final:
        print(json.dumps({"curve": evaluation.curve, "final": asdict(final)}))
    end_process()


if __name__ == "__main__":
    main()
