"""Leader SGD's learning rate and pull: ``python -m benchmarks.sweep [--quick] [--json FILE]``.

Four simulated workers on two nodes (lsgd.testing.simulation, the real LeaderSGD) train an MLP on handwritten
digits, with 3
learning rates and 3 strengths; a strength is that of both pulls and of both proximal terms. Leaders are elected by the
mean loss of the last batches, as the coordinator does it; all workers are equally fast. A seed chooses the split of the
data, the first model and the batches, and is the same for all settings, so that these are compared in pairs.

What is measured is the average of the four models: its test error over the last two global periods, and the iterations
of a worker until its loss on all training images is below an early and a late target. The rule to be examined: a
smaller strength has the lower final error, a larger one is faster.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import standard_error, table
from lsgd.algorithms.leader import LeaderSettings
from lsgd.flat import FlatParameters
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, simulate

NODE_SIZES = (2, 2)
LEARNING_RATES = (0.02, 0.06, 0.2)
STRENGTHS = (0.02, 0.1, 0.5)
PERIOD, LOCAL_PERIOD = 64, 16
ITERATIONS, QUICK_ITERATIONS = 1024, 128  # of each worker
SEEDS, QUICK_SEEDS = 8, 1
TARGET_LOSSES = (0.5, 0.1)  # an early and a late one
BATCH_SIZE, MOMENTUM, TEST_IMAGES = 32, 0.9, 360
EVALUATE_EVERY, LAST_EVALUATIONS = 8, 16


@dataclass(frozen=True)
class Data:
    """Images to train and to test on, and their labels."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Outcome:
    """One training: the last test errors of the average, and when its loss was below each target."""

    test_error: float
    iterations_to_targets: tuple[int | None, ...]  # None if never


@dataclass(frozen=True)
class Result:
    """All trainings with one pair of settings, in the order of the seeds."""

    learning_rate: float
    strength: float
    outcomes: tuple[Outcome, ...]


def split(seed: int) -> Data:
    """Return the digits, split at random."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return Data(x[train], y[train], x[test], y[test])


def network() -> nn.Sequential:
    """Return the MLP."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(settings: LeaderSettings, learning_rate: float, iterations: int, seed: int) -> Outcome:
    """Train four workers."""
    torch.manual_seed(seed)
    data, start = split(seed), network().state_dict()

    def member(group: SimulatedGroup) -> Outcome:
        model, mean = network(), network()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
        worker = SimulatedWorker.of_model(group, settings, model, optimizer)
        batches = shuffled(group.rank, len(data.y), seed)
        reached_at: list[int | None] = [None for _ in TARGET_LOSSES]
        errors = []
        for iteration in range(1, iterations + 1):
            batch = next(batches)
            worker.step(partial(loss_of, model, data.x[batch], data.y[batch]))
            if iteration % EVALUATE_EVERY == 0:
                loss, error = evaluate(worker, mean, data)
                errors.append(error)
                for index, target in enumerate(TARGET_LOSSES):
                    if reached_at[index] is None and loss < target:
                        reached_at[index] = iteration
        return Outcome(statistics.mean(errors[-LAST_EVALUATIONS:]), tuple(reached_at))

    return simulate(NODE_SIZES, member)[0]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of images and their labels."""
    return cross_entropy(model(x), y)


@torch.no_grad()
def evaluate(worker: SimulatedWorker, mean: nn.Module, data: Data) -> tuple[float, float]:
    """Return the training loss and the test error of the average of all models, which ``mean`` becomes on rank 0."""
    flat = worker.parameters[0].clone()
    worker.average(flat)
    if worker.group.rank:
        return math.nan, math.nan
    FlatParameters(mean).buffers[0].copy_(flat)
    wrong = mean(data.test_x).argmax(1) != data.test_y
    return float(loss_of(mean, data.x, data.y)), float(wrong.float().mean())


def shuffled(rank: int, count: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of the worker's shard, without end."""
    generator = torch.Generator().manual_seed(seed * sum(NODE_SIZES) + rank)
    shard = torch.arange(rank, count, sum(NODE_SIZES))
    while True:
        order = shard[torch.randperm(len(shard), generator=generator)]
        yield from order.split(BATCH_SIZE)


def sweep(iterations: int, seeds: int) -> Iterator[Result]:
    """Yield the result of each pair of settings."""
    for learning_rate in LEARNING_RATES:
        for strength in STRENGTHS:
            settings = LeaderSettings(
                period=PERIOD,
                local_period=LOCAL_PERIOD,
                pull_global=strength,
                pull_local=strength,
                proximal_global=strength,
                proximal_local=strength,
                election="loss",
            )
            outcomes = tuple(train(settings, learning_rate, iterations, seed) for seed in range(seeds))
            yield Result(learning_rate, strength, outcomes)


def row(result: Result, against: Result) -> Sequence[str]:
    """Return a result as a line of the table; ``against`` has the smallest strength at the same learning rate."""
    errors = [outcome.test_error for outcome in result.outcomes]
    all_reached = zip(*(outcome.iterations_to_targets for outcome in result.outcomes), strict=True)
    reached = [[iterations or math.inf for iterations in of_target] for of_target in all_reached]
    changes = [
        (one.test_error - other.test_error) * 100 for one, other in zip(result.outcomes, against.outcomes, strict=True)
    ]
    return (
        f"{result.learning_rate:g}",
        f"{result.strength:g}",
        f"{statistics.mean(errors):.2%}",
        "" if result is against else f"{statistics.mean(changes):+.2f} ± {standard_error(changes):.2f}",
        *(f"{statistics.median_low(of_target):g}" for of_target in reached),
        f"{sum(map(math.isfinite, reached[-1]))} of {len(reached[-1])}",
    )


def main() -> int:
    """Train with every pair of settings, and print a Markdown table."""
    parser = argument_parser("benchmarks.sweep", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ITERATIONS} iterations of a worker, {QUICK_SEEDS} seed"
    )
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of each worker")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    iterations, seeds = options.iterations, options.seeds
    if options.quick:
        iterations, seeds = QUICK_ITERATIONS, QUICK_SEEDS

    torch.set_num_threads(1)
    machine = about("benchmarks.sweep")
    print(heading(machine) + "\n", flush=True)
    results = list(sweep(iterations, seeds))
    columns = ["learning rate", "strength", "test error", "points over the smallest strength's"]
    columns += [*(f"iterations to a loss of {target:g}" for target in TARGET_LOSSES), "reached that"]
    first = {r.learning_rate: r for r in reversed(results)}
    print(table(columns, [row(result, first[result.learning_rate]) for result in results]))
    write_json(options.json, machine, results, iterations=iterations, seeds=seeds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
