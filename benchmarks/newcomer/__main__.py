"""What a newcomer costs on a slow link: ``sudo python -m benchmarks.newcomer``."""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.newcomer.worker import NUMEL
from benchmarks.report.tables import table
from benchmarks.testbed import Testbed, told
from benchmarks.testbed.launch import Process, RunFailedError, launch_command, start
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

WITHIN_S = 900.0
SETTLED_ROUNDS = 3
"""So many rounds come before a fault, and after the newcomer trains."""

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
        limits = RunSettings(workers=2, exchange_timeout_s=120.0, lease_s=60.0)
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
        arguments = [str(self._path(host.index)), str(self._seeds[host.index]), str(self._options.step_s)]
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

    def notes(self, index: int, pid: int = 0) -> list[Note]:
        """Return what the workers of a host have noted; with ``pid``, that process alone."""
        path = self._path(index)
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # being written
                found.append(Note(**json.loads(line)))
        return [note for note in found if not pid or note.pid == pid]

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


def gaps(steps: Sequence[float], since: float, until: float, step_s: float) -> list[float]:
    """Return how long a worker stood still between steps, where it did so for longer than a step."""
    inside = [at for at in steps if since <= at <= until]
    found = [after - before - step_s for before, after in pairwise(inside)]
    return [gap for gap in found if gap > 0.5]


def start_of(options: argparse.Namespace, seeds: Sequence[int]) -> list[str]:
    """Return how long the first round takes, from when all have joined."""
    with running(options, seeds) as run:
        run.until(lambda: all(run.steps(index) for index in range(2)), "both train")
        notes = [run.notes(index) for index in range(2)]
        joined = max(each[0].at for each in notes)
        took_s = max(next(note.at for note in each if note.event == "step") for each in notes) - joined
        received = max(next(note for note in each if note.event == "step").received_nbytes for each in notes)
        return [f"{took_s:.1f}", "", "", f"{received / (4 * NUMEL):.2f}"]


def late(options: argparse.Namespace, *, restarted: bool) -> list[str]:
    """Return what a restarted worker, or a new third one, costs those that train."""
    with running(options, (0, 0) if restarted else (0, 0, 7)) as run:
        run.until_rounds(0, SETTLED_ROUNDS)
        began, before = time.monotonic(), run.notes(1)[-1].pid
        ordinary = gaps(run.steps(0), 0.0, began, options.step_s)[1:]
        index = 1 if restarted else 2
        if restarted:
            run.kill(1, before)
        else:
            run.launch(2)
        run.until(lambda: any(n.event == "step" and n.pid != before for n in run.notes(index)), "the newcomer trains")
        notes = [note for note in run.notes(index) if note.pid != before]
        first = next(note for note in notes if note.event == "step")
        run.until_rounds(0, 1, after=first.at)
        longest = max(gaps(run.steps(0), began, first.at + options.step_s, options.step_s), default=0.0)
        usual = statistics.median(ordinary)
        took_s, received = first.at - notes[0].at, first.received_nbytes / (4 * NUMEL)
        return [f"{took_s:.1f}", f"{usual:.1f}", f"{longest - usual:+.1f}", f"{received:.2f}"]


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.newcomer", description=main.__doc__)
    parser.add_argument("--rate-mbit", type=float, default=10.0, help="what each host can send (default: 10)")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="how long each packet is under way (default: 20)")
    parser.add_argument("--period", type=int, default=64, help="steps between two rounds (default: 64)")
    parser.add_argument("--step-s", type=float, default=0.15, help="seconds of a step (default: 0.15)")
    parser.add_argument("--verbose", action="store_true", help="print what all launchers say")
    parser.add_argument("--only", nargs="*", default=["equal", "unequal", "restarted", "third"], help="cases")
    options = parser.parse_args()
    cases: dict[str, Callable[[], list[str]]] = {
        "equal": lambda: start_of(options, (0, 0)),
        "unequal": lambda: start_of(options, (0, 7)),
        "restarted": lambda: late(options, restarted=True),
        "third": lambda: late(options, restarted=False),
    }
    rows = []
    for case in options.only:
        rows.append([case, *cases[case]()])
        print(rows[-1], flush=True)
    header = ["case", "seconds until it trains", "an ordinary round, s", "longest pause more than that, s", "received"]
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
