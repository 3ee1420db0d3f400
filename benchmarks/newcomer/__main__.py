"""What a newcomer costs the others on a slow link: ``sudo python -m benchmarks.newcomer``. Linux, root.

Workers, one on each host of a testbed, make steps that are sleeps, and rounds with the default algorithm. Four cases:
two start with equal seeds, or with unequal ones; one of two is killed and comes back; a third comes to two. Each worker
notes when its steps begin, so it is known how long those that train stand still.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.newcomer.tables import CASES, newcomer_table
from benchmarks.report.about import about, argument_parser, heading
from benchmarks.report.results import Results
from benchmarks.testbed import Testbed, told
from benchmarks.testbed.launch import Process, RunFailedError, launch_command, start
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

WITHIN_S = 900.0
SETTLED_ROUNDS = 3
"""So many rounds come before a fault, and after the newcomer trains."""

LEAST_S = 0.5
"""A pause between two steps that is longer is a round."""

POLL_S = 0.1


@dataclass(frozen=True)
class Note:
    """A line of a worker: it has joined, or begins a step."""

    event: str
    at: float
    pid: int
    sent_nbytes: int
    received_nbytes: int


class Run:
    """Launchers on hosts of a testbed, and what their workers note.

    Args:
        seeds: of each worker's model.
    """

    def __init__(self, testbed: Testbed, folder: Path, options: argparse.Namespace, seeds: Sequence[int]) -> None:
        self._hosts, self._folder, self._options, self._seeds = testbed.hosts, folder, options, seeds
        self._plan = folder / "plan.toml"
        limits = RunSettings(workers=2, exchange_timeout_s=600.0, lease_s=60.0, checkpoint_every_s=0.0)
        self._plan.write_text(Plan(limits, (Phase(LocalSettings(period=options.period)),)).to_toml())
        self._processes: list[Process] = []
        for index in range(2):
            self.launch(index)

    def kill(self, index: int, pid: int) -> None:
        """Kill a process of a host, by its id there."""
        self._hosts[index].run(["sh", "-c", f"kill -9 {pid}"])

    def launch(self, index: int) -> None:
        """Start the launcher of a host, with one worker."""
        host = self._hosts[index]
        nodes, address = len(self._hosts), self._hosts[0].address
        command = launch_command(host.index, nodes, address, 1, self._plan, self._folder / host.name)
        numbers = self._seeds[host.index], self._options.parameters, self._options.step_s
        arguments = [str(self._path(host.index)), *map(str, numbers)]
        script = [sys.executable, "-m", "benchmarks.newcomer.worker", *arguments]
        self._processes.append(start([*command, "--insecure", "--", *script], host))

    def end(self) -> None:
        """End all launchers, and their workers with them."""
        for process in self._processes:
            process.kill()
            said, _ = process.communicate()
            if self._options.verbose:
                print(said)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.jsonl"

    def notes(self, index: int) -> list[Note]:
        """Return what the workers of a host have noted."""
        path = self._path(index)
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # being written
                found.append(Note(**json.loads(line)))
        return found

    def received(self, index: int, since: float, until: float) -> int:
        """Return the bytes that a host's worker has received by its steps after these times, in between."""
        before, after = (next(note for note in self.notes(index) if note.at >= at) for at in (since, until))
        return after.received_nbytes - before.received_nbytes

    def steps(self, index: int) -> list[float]:
        """Return when the steps of a host's workers began."""
        return [note.at for note in self.notes(index) if note.event == "step"]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition.

        Raises:
            RunFailedError: it has not come true in time, or a launcher has ended.
        """
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                said = ended[0].communicate()[0][-3000:] if ended else f"not within {WITHIN_S:g} s"
                raise RunFailedError(f"{what}: {said}")
            time.sleep(POLL_S)

    def until_rounds(self, index: int, count: int, after: float = 0.0) -> None:
        """Wait until a worker has made as many steps as there are in so many periods."""
        most = count * self._options.period
        self.until(lambda: sum(at > after for at in self.steps(index)) >= most, f"node{index}: {count} rounds")


@contextlib.contextmanager
def running(options: argparse.Namespace, seeds: Sequence[int]) -> Iterator[Run]:
    """Run on as many hosts as there are seeds."""
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as name:
        with Testbed(len(seeds), rate_mbit=options.rate_mbit, delay_ms=options.delay_ms) as testbed:
            run = Run(testbed, Path(name), options, seeds)
            try:
                yield run
            finally:
                run.end()


@dataclass(frozen=True)
class Cost:
    """What a newcomer has cost.

    Args:
        until_s: from when all have joined, or the newcomer has, until it trains.
        longest_s: longest pause of one that trains meanwhile, beyond an ordinary round; None: all start together.
        all_s: all of them together.
        ordinary_s: an ordinary round of as many workers.
        received: what the newcomer has received until then, over the size of its model; what the first worker has
            received meanwhile, in rounds, is subtracted.
        load: of the machine, in processes, just before.
    """

    until_s: float
    longest_s: float | None
    all_s: float | None
    ordinary_s: float | None
    received: float
    load: float


def pauses(steps: Sequence[float], since: float, until: float, step_s: float) -> list[float]:
    """Return how long a worker stood still between steps, wherever it made a round that ended in this time."""
    found = [after - before - step_s for before, after in pairwise(steps) if since <= after <= until]
    return [pause for pause in found if pause > LEAST_S]


def compared(steps: Sequence[float], began: float, trains: float, step_s: float) -> tuple[Sequence[float], float]:
    """Return the pauses of a worker until the newcomer trains, beyond an ordinary one after that, and the ordinary one.

    Raises:
        RunFailedError: there is no pause before that, or none after it.
    """
    meanwhile, ordinary = pauses(steps, began, trains, step_s), pauses(steps, trains, math.inf, step_s)
    if not meanwhile or not ordinary:
        when = "after" if meanwhile else "before"
        raise RunFailedError(
            f"{when} the newcomer trained, no round took the first worker {LEAST_S:g} s; try with more --parameters or "
            "a lower --rate-mbit"
        )
    usual_s = statistics.median(ordinary)
    return [pause - usual_s for pause in meanwhile], usual_s


def start_of(options: argparse.Namespace, seeds: Sequence[int]) -> Cost:
    """Return what it costs to start a run: its first round makes no exchange, so it takes what all wait for."""
    load = os.getloadavg()[0]
    with running(options, seeds) as run:
        run.until(lambda: all(run.steps(index) for index in range(2)), "both train")
        notes = [run.notes(index) for index in range(2)]
        joined = max(each[0].at for each in notes)
        firsts = [next(note for note in each if note.event == "step") for each in notes]
        received = max(first.received_nbytes for first in firsts) / (4 * options.parameters)
        return Cost(max(first.at for first in firsts) - joined, None, None, None, received, load)


def late(options: argparse.Namespace, *, restarted: bool) -> Cost:
    """Return what a restarted worker, or a new third one, costs the first one, which trains."""
    load = os.getloadavg()[0]
    with running(options, (0, 0) if restarted else (0, 0, 7)) as run:
        run.until_rounds(0, SETTLED_ROUNDS)
        began, index, before = time.monotonic(), 1 if restarted else 2, 0  # a process of the newcomer's host
        if restarted:
            before = run.notes(1)[-1].pid
            run.kill(1, before)
        else:
            run.launch(2)

        def notes() -> list[Note]:
            return [note for note in run.notes(index) if note.pid != before]

        run.until(lambda: any(note.event == "step" for note in notes()), "the newcomer trains")
        joined, first = notes()[0], next(note for note in notes() if note.event == "step")
        run.until_rounds(0, SETTLED_ROUNDS, after=first.at)
        beyond, ordinary_s = compared(run.steps(0), began, first.at + options.step_s, options.step_s)
        own, ordinary = first.received_nbytes, run.received(0, joined.at, first.at)
        received = (own - ordinary) / (4 * options.parameters)
        return Cost(first.at - joined.at, max(beyond), sum(beyond), ordinary_s, received, load)


def main() -> int:
    """Measure, and print a Markdown table."""
    parser = argument_parser("benchmarks.newcomer", __doc__)
    parser.add_argument("--rate-mbit", type=float, default=10.0, help="what each host can send (default: 10)")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="how long each packet is under way (default: 20)")
    parser.add_argument("--parameters", type=int, default=25_000_000, help="of the model (default: 25 million)")
    parser.add_argument("--period", type=int, default=64, help="steps between two rounds (default: 64)")
    parser.add_argument("--step-s", type=float, default=0.15, help="seconds of a step (default: 0.15)")
    parser.add_argument("--quick", action="store_true", help="a million parameters, 4 Mbit, and short steps")
    parser.add_argument("--verbose", action="store_true", help="print what all launchers say")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="which ones")
    parser.add_argument("--repeats", type=int, default=1, help="how often (default: once)")
    parser.add_argument("--version", default="now", help="what the measured version is called in the table")
    parser.add_argument("--json", type=Path, help="write the results to this file as they come, and go on with those")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.rate_mbit, options.period, options.step_s = 1_000_000, 4.0, 16, 0.05
    machine = about("benchmarks.newcomer")
    print(heading(machine) + "\n", flush=True)
    settings = {name: getattr(options, name) for name in ("parameters", "rate_mbit", "delay_ms", "period", "step_s")}
    try:
        results = Results(options.json, machine, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cases: dict[str, Callable[[], Cost]] = {
        "equal": lambda: start_of(options, (0, 0)),
        "unequal": lambda: start_of(options, (0, 7)),
        "restarted": lambda: late(options, restarted=True),
        "third": lambda: late(options, restarted=False),
    }
    for number in range(options.repeats):
        for case in options.cases:
            results.keep(cases[case], case, case=case, version=options.version, number=number)
    print(newcomer_table(results.rows))
    return results.end([], [])


if __name__ == "__main__":
    sys.exit(told(main))
