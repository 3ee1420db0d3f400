"""Muon or AdamW for a model that was pretrained with either: ``python -m benchmarks.finetuning [--json FILE]``.

One worker pretrains the transformer of ``text`` (benchmarks/workloads.py) on the standard library's sources, with AdamW
or with Muon. Then it is fine-tuned, all of its weights, on English: Python's own reference, which ``help()`` shows. One
topic in ten is for the test. Each optimizer gets the same learning rates, multiples of the task's, and the best one
counts. The schedule is that of the task.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import number, table
from benchmarks.workloads import Text

PRETRAINING_TIMES: Mapping[str, float] = {"task": 1.0, "muon": 4.0}
"""Multiples of the task's learning rate in the pretraining, the best of each optimizer (docs/guides/optimizers.md)."""

TIMES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)
"""Those of the fine-tuning."""

NAMES = {"task": "AdamW", "muon": "Muon"}


class English(Text):
    """:class:`Text` with the topics of Python's reference."""

    def __init__(self) -> None:
        super().__init__()
        texts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, name in enumerate(sorted(topics)):
            texts[index % 10 == 0].append(topics[name].encode())
        self._train, self._test = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in texts)


@dataclass(frozen=True)
class FineTuning:
    """One fine-tuning; optimizers are of :data:`benchmarks.workloads.OPTIMIZERS`.

    Args:
        before: loss on the test data without it.
        loss: with it.
    """

    pretrained_with: str
    optimizer: str
    learning_rate_times: float
    seed: int
    before: float
    loss: float


def train(task: Text, model: nn.Module, optimizer: str, times: float, steps: int, seed: int) -> float:
    """Train a model, and return its loss on the test data."""
    task.chosen_optimizer, task.learning_rate = optimizer, Text.learning_rate * times
    chosen = task.make_optimizer(model)
    for step, (x, y) in zip(range(steps), task.batches(0, 1, seed), strict=False):
        task.set_learning_rate(chosen, (step + 0.5) / steps)
        chosen.zero_grad()
        task.loss(model, x, y).backward()
        chosen.step()
    return task.test(model).loss


def measure(steps: tuple[int, int], times: Sequence[float], seeds: int) -> list[FineTuning]:
    """Pretrain and fine-tune with each optimizer, for so many steps."""
    found = []
    for seed, before in itertools.product(range(seeds), PRETRAINING_TIMES):
        torch.manual_seed(seed)
        model, text, english = Text().model(), Text(), English()
        train(text, model, before, PRETRAINING_TIMES[before], steps[0], seed)
        start: dict[str, Tensor] = {name: x.clone() for name, x in model.state_dict().items()}
        loss_before = english.test(model).loss
        for optimizer, rate_times in itertools.product(PRETRAINING_TIMES, times):
            model.load_state_dict(start)
            loss = train(english, model, optimizer, rate_times, steps[1], seed)
            found.append(FineTuning(before, optimizer, rate_times, seed, loss_before, loss))
            print(found[-1], flush=True)
    return found


def lines(found: Sequence[FineTuning]) -> list[list[str]]:
    """Return a line for each pretraining and optimizer: the mean losses over the seeds, the best one in bold."""
    rows = []
    for before, optimizer in itertools.product(PRETRAINING_TIMES, PRETRAINING_TIMES):
        here = [x for x in found if (x.pretrained_with, x.optimizer) == (before, optimizer)]
        rates = sorted({x.learning_rate_times for x in here})
        losses = [statistics.mean(x.loss for x in here if x.learning_rate_times == rate) for rate in rates]
        cells = [number(loss, ".3f", "none") for loss in losses]
        best = losses.index(min(losses))
        cells[best] = f"**{cells[best]}**"
        rows.append([NAMES[before], NAMES[optimizer], number(statistics.mean(x.before for x in here), ".3f"), *cells])
    return rows


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.finetuning", __doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps, two learning rates")
    parser.add_argument("--steps", type=int, nargs=2, default=(2048, 256), help="of pretraining and fine-tuning")
    parser.add_argument("--seeds", type=int, default=2, help="how many, from 0")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = (24, 16), 1
    return options


def main() -> int:
    """Print a Markdown table."""
    options = options_of()
    torch.set_num_threads(1)
    machine = about("benchmarks.finetuning")
    print(heading(machine) + "\n", flush=True)
    times = TIMES[-2:] if options.quick else TIMES
    found = measure(tuple(options.steps), times, options.seeds)
    columns = ["pretrained with", "fine-tuned with", "before", *(f"rate × {rate:g}" for rate in times)]  # noqa: RUF001
    print("\n" + table(columns, lines(found)))
    results: list[Any] = list(found)
    write_json(options.json, machine, results, steps=list(options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
