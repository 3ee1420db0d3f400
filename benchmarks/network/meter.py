"""What the processes of benchmarks/network share: the steps that they make and how these are measured."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.testbed.interface import counters
from benchmarks.workloads import TimedMLP, timed_step

BATCH_SIZE = 2
SAMPLES = 1024
ALONE_STEPS = 3

STEPPING, LIMITED, MEASURED = "stepping", "limited", "measured.json"
"""Files in a process's folder: it is about to make its first step; the links have their limit; what was measured."""

LIMITED_WITHIN_S = 120.0
POLL_PERIOD_S = 0.01


@dataclass(frozen=True)
class Mark:
    """A point between two steps; ``position`` is how many a worker has made until then."""

    position: float
    at_s: float
    waited_s: float
    sent_nbytes: int
    received_nbytes: int
    packets: int


class Meter:
    """Measures some of the steps of a process, and writes what it finds as soon as these are made.

    Args:
        given: what :func:`parser` has read.
        compute_s: the time of a step alone.
        waited_s: returns how long the process has waited for its servers so far.
    """

    def __init__(
        self, given: argparse.Namespace, compute_s: float, waited_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._folder: Path = given.folder
        self._compute_s = compute_s
        self._due = [given.skip, given.skip + given.steps]
        self._waited_s = waited_s
        self._marks: list[Mark] = []
        self._stepping = False

    def step_begins(self, position: float) -> None:
        """Note that a step begins when ``position`` steps are made: the mean over all workers where speeds differ.

        Before the first one, wait until the links have their limit.
        """
        if not self._stepping:
            self._stepping = True
            self._await_limit()
        if self._due and position >= self._due[0]:
            del self._due[0]
            passed = counters()
            packets = passed.received_packets + passed.sent_packets
            now, waited_s = time.perf_counter(), self._waited_s()
            self._marks.append(Mark(position, now, waited_s, passed.sent_nbytes, passed.received_nbytes, packets))
            if not self._due:
                first, last = map(asdict, self._marks)
                measured = {name: last[name] - first[name] for name in first}
                (self._folder / MEASURED).write_text(json.dumps({"compute_s": self._compute_s, **measured}))

    def finish(self) -> None:
        """Make sure that all was measured.

        Raises:
            RuntimeError: the steps that count were not all made.
        """
        if self._due:
            raise RuntimeError(f"the run has ended before step {self._due[0]}")

    def _await_limit(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / STEPPING).touch()
        deadline = time.monotonic() + LIMITED_WITHIN_S
        while not (self._folder / LIMITED).exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._folder / LIMITED}: not there after {LIMITED_WITHIN_S:g} s")
            time.sleep(POLL_PERIOD_S)


def parser() -> argparse.ArgumentParser:
    """Return the arguments that every process has."""
    found = argparse.ArgumentParser()
    found.add_argument("--width", type=int, required=True)
    found.add_argument("--sleep-s", type=float, required=True, help="of a step, beside what it computes")
    found.add_argument("--skip", type=int, required=True, help="steps before those that count")
    found.add_argument("--steps", type=int, required=True, help="that count")
    found.add_argument("--folder", type=Path, required=True, help="for what this process measures")
    return found


def workload(width: int, sleep_s: float) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, float]:
    """Return the model, its optimizer, data, and the seconds of a step alone (the median of three)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TimedMLP(width)
    model.sleep_s = sleep_s
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(SAMPLES, width)
    seconds = []
    for _ in range(1 + ALONE_STEPS):
        start = time.perf_counter()
        timed_step(model, optimizer, data[:BATCH_SIZE])
        seconds.append(time.perf_counter() - start)
    return model, optimizer, data, statistics.median(seconds[1:])
