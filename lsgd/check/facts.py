"""What the recorder has noted, as the judges read it.

A fact is a dict. All have ``kind``, ``t`` (seconds on the machine's clock), ``made`` (steps of the first optimizer so
far) and ``over`` (whether the run has ended for this worker). The kinds:

- ``process``, ``join``: the process, and what it joined with.
- ``pass``, ``batch``, ``pass_ends``: a pass over a DataLoader, and what it yields.
- ``input``: what the model was called with. ``step``: a step of a joined optimizer, as it begins.
- ``moved``: weights that neither a step nor a round has changed; ``undone``: the same, put back before the next step.
- ``call``, ``back``, ``raised``: a call of the worker, and how it ended; ``read``: a property that the script has read.
- ``file``, ``seed``, ``scheduler``, ``warning``: what the script writes and seeds, its schedulers, and what lsgd says.
- ``at``: the line of the script at work. ``end``, ``exit``: the model after the run, and at the end of the process.
- ``stage``: the process joins again, for another training; what follows is not noted.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Fact = dict[str, Any]

STEPS_PAST_LOOP = 40
"""So many steps more than twice its own length are no rest of a pass: the loop has another end, or none."""


@dataclass
class Life:
    """The facts of one process that has joined, in their order."""

    facts: list[Fact]

    def of(self, *kinds: str) -> list[Fact]:
        """Return the facts of some kinds."""
        return [fact for fact in self.facts if fact["kind"] in kinds]

    def last(self, *kinds: str) -> Fact | None:
        """Return the last fact of some kinds; None: there is none."""
        return next(iter(reversed(self.of(*kinds))), None)

    @property
    def joined(self) -> Fact | None:
        """The fact of its join; None: it has not joined."""
        return next((fact for fact in self.facts if fact["kind"] == "join"), None)

    @property
    def worker(self) -> str:
        """The worker's name; empty before the join."""
        return "" if self.joined is None else str(self.joined["worker"])

    @property
    def goes_on(self) -> bool:
        """Whether its process trains again after this training."""
        return self.last("stage") is not None

    @property
    def made(self) -> int:
        """Steps of the first optimizer in the run, the last of which may be under way."""
        return sum(fact["optimizer"] == 0 and not fact["over"] for fact in self.of("step"))

    @property
    def loop(self) -> int:
        """Length of the script's own loop; 0: it has none."""
        return int(max((fact["steps"] for fact in self.of("step", "end", "exit")), default=0))

    @property
    def is_endless(self) -> bool:
        """Whether its loop has gone on past its own length."""
        return self.loop > 0 and self.made >= 2 * self.loop + STEPS_PAST_LOOP

    @property
    def moving(self) -> list[Fact]:
        """The facts that show that it does something."""
        return [fact for fact in self.facts if fact["kind"] != "at"]

    @cached_property
    def trains_on(self) -> set[int]:
        """The numbers of the loaders between two batches of which a step was made."""
        found, last, stepped = set[int](), dict[tuple[int, int], int](), 0
        for fact in self.facts:
            if fact["kind"] == "step":
                stepped += 1
            elif fact["kind"] in ("batch", "pass_ends"):
                key = fact["loader"], fact["number"]
                if key in last and stepped > last[key]:
                    found.add(fact["loader"])
                last[key] = stepped
        return found

    @property
    def taught(self) -> Iterator["Taught"]:
        """The steps of the first optimizer in the run, each with the batches since the one before."""
        batches: list[Fact] = []
        inputs: list[str] = []
        for fact in self.facts:
            if fact["kind"] == "batch" and fact["loader"] in self.trains_on:
                batches.append(fact)
            elif fact["kind"] == "input":
                inputs.append(fact["digest"])
            elif fact["kind"] == "step" and fact["optimizer"] == 0 and not fact["over"]:
                yield Taught(fact, batches, inputs)
                batches, inputs = [], []


@dataclass
class Taught:
    """A step, with the batches that were drawn and the inputs of the model since the one before."""

    step: Fact
    batches: list[Fact]
    inputs: list[str]

    @property
    def data(self) -> list[Any]:
        """What it has learned from, to compare: rows where batches have numbers, else digests."""
        if self.batches:
            return [fact["rows"] if fact["rows"] is not None else fact["digest"] for fact in self.batches]
        return self.inputs


@dataclass
class Run:
    """One run of the script.

    Args:
        name: of the run, in the words of the report.
        workers: how many.
        lives: of all processes that have joined, by the time of their join.
        status: exit code of the launcher; None: it was ended.
        stopped: whether the check has stopped it; ``killed``: the worker that it has killed.
        waits: what it waited for when nothing moved any more; empty: it has ended by itself.
        logs: the last lines of each worker's output.
        folder: where the script ran.
    """

    name: str
    workers: int
    lives: list[Life] = field(default_factory=list)
    status: int | None = None
    stopped: bool = False
    killed: str = ""
    waits: str = ""
    logs: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def by_worker(self) -> dict[str, list[Life]]:
        """The lives of each worker, in order."""
        found: dict[str, list[Life]] = {}
        for life in self.lives:
            found.setdefault(life.worker, []).append(life)
        return found

    @property
    def firsts(self) -> list[Life]:
        """The first life of each worker."""
        return [lives[0] for _, lives in sorted(self.by_worker.items())]


class Reader:
    """Reads the facts in a folder, again and again, each line once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[int, list[Fact]]] = {}  # of each file: up to where, and what

    def lives(self) -> list[Life]:
        """Return the lives of those who have joined."""
        for path in self._folder.glob("*.jsonl"):
            self._follow(path)
        lives = [Life(list(facts)) for _, facts in self._read.values()]
        joined = [life for life in lives if life.joined is not None]
        return sorted(joined, key=lambda life: float(life.facts[0]["t"]))

    @property
    def processes(self) -> int:
        """How many have begun to join."""
        return len([*self._folder.glob("*.jsonl")])

    def _follow(self, path: Path) -> None:
        begin, facts = self._read.setdefault(path, (0, []))
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be being written
        facts += [json.loads(line) for line in whole.splitlines()]
        self._read[path] = begin + len(whole), facts
