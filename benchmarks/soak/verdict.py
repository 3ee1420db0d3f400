"""What benchmarks/soak has seen, what of it breaks a promise, and its tables."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report.tables import table

ACCURACY_MARGIN = 0.01
YOUNGEST = 0.9
"""Share of the run's iterations, by each worker, that its final model must have in it."""

GROWTH = 8
"""Descriptors that a process may have more in the last third of its life than in the first."""

FEWEST_SAMPLES = 6
TAIL_LINES = 12

_OVER = re.compile(r"the run is over: .*; (\d+) iterations")
_TOKEN = re.compile(r"LSGD_TOKEN=\S+")
_CRASH = re.compile(r"\S+ was killed by SIG(?!KILL)\w+")
_PREFIX = re.compile(r"\[([^\]]+)\] ")
SEEN = {
    "processes started again": r"restarting it (in|now)",
    "workers evicted": r" leaves: nothing was heard from it",
    "rounds failed": r"round \d+ failed: ",
    "generations": r" generation \d+: \d+ workers",
    "reads from a journal": r"of the journal .*, with",
}
"""What is counted in the launchers' output."""


@dataclass(frozen=True)
class Outcome:
    """A burst of faults: when, what happened, for how long the count stood still at most, and how soon all was well.

    Args:
        at_s: since the beginning of the run.
        faults: as a text and a target each.
        stalled_s: longest time without one more iteration.
        recovered_s: from the end of the last fault until all workers train; None: not in time.
    """

    at_s: float
    faults: tuple[tuple[str, str, float], ...]
    stalled_s: float
    recovered_s: float | None


@dataclass
class Record:
    """What one training has left.

    Args:
        workers: of the run.
        limit: iterations that it was to make; 0 while that is not known.
        seconds: that it took.
        codes: exit code of each launcher, None for one that did not end.
        output: of each launcher.
        runs: identities that the global server said the run has.
        made: steps that all worker processes have written down.
        results: of the workers that came to the end.
        late: workers that were killed so near the end that they need not have come to it.
        descriptors: of each process (name and id), how many it had at each time when all was well.
        left: processes and files that should be gone.
        outcomes: of the bursts.
        trouble: promises that were broken on the way.
    """

    workers: int
    limit: int = 0
    seconds: float = 0.0
    codes: dict[str, int | None] = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    made: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)
    late: int = 0
    descriptors: dict[str, list[int]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def count(self) -> int | None:
        """Iterations that the global server counted, by its last word."""
        found = _OVER.findall("\n".join(self.output.values()))
        return int(found[-1]) if found else None

    @property
    def accuracy(self) -> float | None:
        """Of the final model."""
        return min((result["accuracy"] for result in self.results), default=None)

    @property
    def age(self) -> float | None:
        """Of the final model, in steps of one worker."""
        return min((result["age"] for result in self.results), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return it without the output."""
        names = ("workers", "limit", "seconds", "codes", "runs", "made", "results", "left", "trouble")
        figures = {name: getattr(self, name) for name in names}
        grown = {name: (of_one[0], of_one[-1]) for name, of_one in self.descriptors.items() if of_one}
        outcomes = [vars(outcome) for outcome in self.outcomes]
        return {**figures, "count": self.count, "seen": seen(self), "descriptors": grown, "bursts": outcomes}


def verdict(record: Record, undisturbed_accuracy: float | None) -> list[str]:
    """Return the promises that a training has broken, in words."""
    if record.trouble:  # the training was ended there
        return [*record.trouble, *_crashes(record)]
    broken = _crashes(record)
    for name, code in record.codes.items():
        if code:
            broken.append(f"the launcher of {name} has ended with exit code {code}")
        elif code is None:
            broken.append(f"the launcher of {name} has not ended")
    if len(record.runs) > 1:
        broken.append(f"a new run began: {', '.join(record.runs)}")
    if record.count != record.limit:
        broken.append(f"the run has counted {record.count} iterations, and was to make {record.limit}")
    if record.count is not None and record.made < record.count:
        broken.append(f"the workers have made {record.made} steps, fewer than the run has counted")
    if len(record.results) < record.workers - record.late:
        broken.append(f"{len(record.results)} of {record.workers} workers came to the end")
    if len({result["digest"] for result in record.results}) > 1:
        models = ", ".join(f"{result['worker']} {result['digest']}" for result in record.results)
        broken.append(f"the workers end with different models: {models}")
    return broken + _model_is_bad(record, undisturbed_accuracy) + record.left + _growing(record.descriptors)


def seen(record: Record) -> dict[str, int]:
    """Return how often the run said what :data:`SEEN` is about."""
    text = "\n".join(record.output.values())
    return {name: len(re.findall(pattern, text)) for name, pattern in SEEN.items()}


def fault_table(outcomes: Iterable[Outcome]) -> str:
    """Return a table of the faults: how many, and what came of those that had no other beside them."""
    count: dict[str, int] = {}
    alone: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        for what, _, _ in outcome.faults:
            count[what] = count.get(what, 0) + 1
            if len(outcome.faults) == 1:
                alone.setdefault(what, []).append(outcome)
    rows = []
    for what in sorted(count):
        of_one = alone.get(what, [])
        stalled = [outcome.stalled_s for outcome in of_one]
        back = [outcome.recovered_s for outcome in of_one if outcome.recovered_s is not None]
        rows.append([what, str(count[what]), str(len(of_one)), _median_and_most(stalled), _median_and_most(back)])
    columns = (
        "fault",
        "times",
        "alone",
        "no iteration for s, median (most)",
        "all back after s, median (most)",
    )
    return table(columns, rows)


def story(record: Record, events: Sequence[str]) -> str:
    """Return what happened in which order, and the last lines of each process."""
    lines = ["The time line:", *events]
    for name, output in sorted(record.output.items()):
        for process, said in sorted(_by_process(_TOKEN.sub("LSGD_TOKEN=...", output)).items()):
            lines += ["", f"The last lines of {process}, from the launcher of {name}:", *said[-TAIL_LINES:]]
    return "\n".join(lines)


def _crashes(record: Record) -> list[str]:
    """Return what ended by a signal that is not the faults' own."""
    found = {crash for text in record.output.values() for crash in _CRASH.findall(text)}
    return [f"a process crashed: {crash}" for crash in sorted(found)]


def _model_is_bad(record: Record, undisturbed_accuracy: float | None) -> list[str]:
    broken = []
    if record.accuracy is not None and undisturbed_accuracy is not None:
        if not record.accuracy >= undisturbed_accuracy - ACCURACY_MARGIN:
            broken.append(
                f"the accuracy is {record.accuracy:.4f}, that of an undisturbed run {undisturbed_accuracy:.4f}"
            )
    if record.age is not None and not record.age >= YOUNGEST * record.limit / record.workers:
        broken.append(
            f"the final model has {record.age:.0f} steps of a worker in it, and {record.limit / record.workers:.0f} "
            f"were made: a model was thrown away"
        )
    return broken


def _growing(descriptors: Mapping[str, Sequence[int]]) -> list[str]:
    broken = []
    for name, counts in descriptors.items():
        third = len(counts) // 3
        if len(counts) >= FEWEST_SAMPLES and min(counts[-third:]) > min(counts[:third]) + GROWTH:
            broken.append(f"the descriptors of {name} have grown from {min(counts[:third])} to {min(counts[-third:])}")
    return broken


def _median_and_most(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else ""


def _by_process(output: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        prefix = _PREFIX.match(line)
        found.setdefault(prefix[1] if prefix else "the launcher itself", []).append(line)
    return found
