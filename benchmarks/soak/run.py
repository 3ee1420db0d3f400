"""One training of benchmarks/soak, from the launch of its nodes to what they have left."""

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.faults import Injector
from benchmarks.soak.nodes import Node, Watch, await_end, call, descriptors, send
from benchmarks.soak.schedule import Burst, schedule
from benchmarks.soak.verdict import YOUNGEST, Outcome, Record
from benchmarks.testbed import Testbed, TestbedError

RATE_MBIT = 100.0
NO_LIMIT = 10**9
TAIL = 3000
"""Iterations of the end, in which the learning rate goes down to zero."""

SAVE_S = 8.0
"""How long the workers take to save at the end, so that one which is killed then is back before they are done."""

CHECKPOINT_EVERY = 20

SLACK = 128
"""Steps by which the oldest model may become younger: rounds average the ages."""

STARTS_WITHIN_S = 180.0
RECOVERS_WITHIN_S = 180.0
ENDS_WITHIN_S = 240.0
GONE_WITHIN_S = 10.0
SET_WITHIN_S = 60.0
STALE_S = 3.0
PERIOD_S = 0.1
PROGRESS = 60  # iterations that show that the run trains


@dataclass(frozen=True)
class Settings:
    """What a training is like.

    Args:
        nodes: machines.
        workers: on each.
        minutes: of training, before its end begins.
        seed: of the faults.
        faults: which ones; empty: none.
        sleep_s: of a worker after each step.
    """

    nodes: int
    workers: int
    minutes: float
    seed: int
    faults: tuple[str, ...]
    sleep_s: float


def train(settings: Settings, folder: Path, say: Callable[[str], None]) -> Record:
    """Train with these faults on a testbed of its own; return what was seen. ``say`` takes the story's lines.

    Raises:
        TestbedError: the testbed or a command in it failed.
    """
    folder.mkdir(parents=True)
    with Testbed(settings.nodes + 1, rate_mbit=RATE_MBIT) as testbed, contextlib.ExitStack() as closing:
        run = _Run(settings, testbed, folder, say, closing)
        try:
            run.start()
            run.disturb()
            run.finish()
        finally:
            run.gather()
        return run.record


class _Run:
    """The training while it is on."""

    def __init__(
        self,
        settings: Settings,
        testbed: Testbed,
        folder: Path,
        say: Callable[[str], None],
        closing: contextlib.ExitStack,
    ) -> None:
        self.record = Record(settings.nodes * settings.workers)
        self._settings, self._folder, self._tell = settings, folder, say
        self._begun_at = time.monotonic()
        self._results = folder / "results"
        self._results.mkdir()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
        self._environ = {**environ, "OMP_NUM_THREADS": "1", "LSGD_VERBOSE": "1", "LSGD_KEYS": str(folder / "keys")}
        self._nodes = [Node(host, folder, settings.workers) for host in testbed.hosts[:-1]]
        self._injector = Injector(self._nodes, testbed.hosts[-1], self._environ, self._say)
        self._closing = closing
        self._watches: list[Watch] = []
        self._state: dict[str, Any] = {}
        self._heard_at = self._grew_at = time.monotonic()
        self._stalled_s = 0.0
        self._oldest = 0.0
        self._ending = False

    def start(self) -> None:
        """Launch the nodes, and see all workers train."""
        plan = self._folder / "plan.toml"
        limits = {
            "workers": self.record.workers,
            "iterations": NO_LIMIT,
            "checkpoint_every": CHECKPOINT_EVERY,
        }
        plan.write_text("".join(f"{name} = {value}\n" for name, value in limits.items()))
        command = [sys.executable, "-m", "benchmarks.soak.worker", "--results", str(self._results)]
        command += ["--sleep-s", str(self._settings.sleep_s)]
        command += ["--save-s", str(SAVE_S if self._settings.faults else 0.0)]
        for node in self._nodes:
            node.launch(len(self._nodes), self._nodes[0].host.address, plan, self._environ, *command)
            self._watches.append(Watch(node, self._folder, self._environ))
            self._closing.callback(self._watches[-1].close)
        if self._until(self._trains(), STARTS_WITHIN_S) is None:
            if not self.record.trouble:
                self._break(f"the run has not begun within {STARTS_WITHIN_S:g} s")
            return
        self._say("all workers train")

    def disturb(self) -> None:
        """Inject faults until the time is over, each burst when all is well again after the one before."""
        if self.record.trouble:
            return
        ends_at = time.monotonic() + self._settings.minutes * 60
        for burst in self._bursts():
            if time.monotonic() > ends_at or self.record.trouble:
                return
            if not burst.faults:
                self._until(lambda: False, burst.pause_s)
                return
            begun_at = time.monotonic()
            self._stalled_s, self._grew_at = 0.0, begun_at
            happened = self._injector.burst(burst, self._sense)
            over_at = time.monotonic()
            healthy_at = self._until(self._trains(), RECOVERS_WITHIN_S)
            recovered_s = None if healthy_at is None else healthy_at - over_at
            faults = tuple((fault.what, fault.target, fault.seconds) for fault in happened)
            self.record.outcomes.append(Outcome(begun_at - self._begun_at, faults, self._stalled_s, recovered_s))
            if self.record.trouble:
                return
            if recovered_s is None:
                what = "; ".join(map(str, happened))
                self._break(f"not all workers train {RECOVERS_WITHIN_S:g} s after: {what}: {self._status()}")
                return
            self._say(f"all workers train, {recovered_s:.1f} s later; no iteration for {self._stalled_s:.1f} s")
            self._until(lambda: False, burst.pause_s)
            self._sample()

    def finish(self) -> None:
        """Let the run end at a limit that is near, and kill a worker while it saves."""
        if self.record.trouble or not self._set_limit():
            return
        if self._settings.faults and self._until(self._saves, ENDS_WITHIN_S):
            self._kill_one()
        await_end([node.launcher for node in self._nodes if node.launcher], ENDS_WITHIN_S)
        self._say("the launchers have ended")

    def _saves(self) -> bool:
        return len(list(self._results.glob("*.saving"))) == self.record.workers

    def _kill_one(self) -> None:
        processes = {name: pid for node in self._nodes for name, pid in node.processes().items()}
        name = random.Random(self._settings.seed).choice([name for name in processes if "/worker" in name])
        if send(processes[name], signal.SIGKILL):
            self.record.late = 1
            self._say(f"kill worker: {name}, while it saves")

    def gather(self) -> None:
        """Take in what the training has left."""
        self._injector.end_all()
        for watch in self._watches:
            watch.close()
        record = self.record
        record.seconds = time.monotonic() - self._begun_at
        if not record.trouble:
            record.codes = {node.name: node.launcher.poll() for node in self._nodes if node.launcher}
        if record.codes and None not in record.codes.values():
            deadline = time.monotonic() + GONE_WITHIN_S
            while (left := self._left()) and time.monotonic() < deadline:
                time.sleep(PERIOD_S)
            record.left = left
        for node in self._nodes:
            node.keep()
            if node.output.exists():
                record.output[node.name] = node.output.read_text(errors="replace")
        record.made = sum(path.read_bytes().count(b"\n") for path in self._results.glob("*.steps"))
        record.results = [json.loads(path.read_text()) for path in sorted(self._results.glob("*.json"))]

    def _left(self) -> list[str]:
        return [what for node in self._nodes for what in node.left()]

    def _bursts(self) -> Iterator[Burst]:
        settings = self._settings
        if settings.faults:
            return schedule(settings.seed, settings.faults, settings.nodes, settings.workers)
        return iter([Burst((), settings.minutes * 60)])

    # -- what the run says ---------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return int(self._state.get("count", 0))

    def _sense(self) -> bool:
        """Take in what the run says; return whether all is as it should be. Takes a tenth of a second.

        Of several parts of the run, the one in the latest term counts.
        """
        time.sleep(PERIOD_S)
        now = time.monotonic()
        for state in (state for watch in self._watches for state in watch.read()):
            if state["term"] < self._state.get("term", 0):
                continue
            if state["count"] > self._count:
                self._grew_at = now
            if state["run"] not in self.record.runs:
                self.record.runs.append(state["run"])
                if len(self.record.runs) > 1:
                    self._break(f"a new run began: {self._status()}")
            self._state, self._heard_at = state, now
        self._stalled_s = max(self._stalled_s, now - self._grew_at)
        for node in self._nodes:
            if node.launcher and (code := node.launcher.poll()) is not None and not self._ending:
                self._break(f"the launcher of {node.name} has ended with exit code {code} in the middle of the run")
        return not self.record.trouble

    def _trains(self) -> Callable[[], bool]:
        """Return what tells whether all workers are in the run, and each has made steps since now."""
        before: dict[str, Path] = {}
        sizes: dict[str, int] = {}
        count: list[int] = []

        def true() -> bool:
            members = self._state.get("members", [])
            alive = {m["worker"] for m in members if m["state"] in ("held", "live")}
            newest = _newest(self._results)
            whole = len(alive) == len(newest) == self.record.workers
            if not whole or time.monotonic() - self._heard_at > STALE_S:
                count.clear()
                return False
            if not count or newest != before:
                count[:] = [self._count]
                before.update(newest)
                sizes.update({name: path.stat().st_size for name, path in newest.items()})
                return False
            all_step = all(path.stat().st_size > sizes[name] for name, path in newest.items())
            return all_step and self._count >= count[0] + PROGRESS

        return true

    def _status(self) -> str:
        members = ", ".join(f"{m['worker']} {m['state']}" for m in self._state.get("members", []))
        silent_s = time.monotonic() - self._heard_at
        return f"heard {silent_s:.1f} s ago: {self._count} iterations, {self._state.get('reason')}; {members}"

    def _until(self, true: Callable[[], bool], within_s: float) -> float | None:
        """Return the time when something is true, None when it is not in time or something else went wrong."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self._sense():
            if true():
                return time.monotonic()
        return None

    def _set_limit(self) -> bool:
        """Tell the run when to end, as an operator does; return whether it has heard."""
        limit, nodes = self._count + TAIL, itertools.cycle(self._nodes)
        command = [sys.executable, "-m", "lsgd.client", "set", f"iterations={limit}", "--run"]
        deadline = time.monotonic() + SET_WITHIN_S
        self._ending = True
        while True:
            try:
                node = next(nodes)
                call(node.host, [*command, str(node.run_dir)], cwd=str(Path.cwd()), env=self._environ)
                break
            except TestbedError as error:
                if time.monotonic() > deadline:
                    self._break(str(error))
                    return False
        self.record.limit = limit
        self._say(f"the run is to end after {limit} iterations")
        return True

    def _sample(self) -> None:
        """Note the descriptors of all processes, and look whether the model is still what was trained."""
        for node in self._nodes:
            processes = node.processes()
            serves = ", serves" if f"{node.name}/global" in processes else ""  # then a launcher has more children
            for name, pid in processes.items():
                if count := descriptors(pid):
                    self.record.descriptors.setdefault(f"{name} (process {pid}{serves})", []).append(count)
        age = max(_ages(self._results), default=0.0)
        if age < YOUNGEST * self._oldest - SLACK:
            self._break(f"the model is {age:.0f} steps old, and was {self._oldest:.0f}: it was thrown away")
        self._oldest = max(self._oldest, age)

    def _say(self, text: str) -> None:
        self._tell(f"[{time.monotonic() - self._begun_at:7.1f} s, {self._count:7d} iterations] {text}")

    def _break(self, text: str) -> None:
        if text not in self.record.trouble:
            self.record.trouble.append(text)
            self._say(f"BROKEN: {text}")


def _newest(folder: Path) -> dict[str, Path]:
    """Return for each worker the file of steps of its newest process."""
    return {path.name.rsplit("-", 2)[0]: path for path in sorted(folder.glob("*.steps"))}


def _ages(folder: Path) -> list[float]:
    """Return the age of each worker's model, as its newest process has written it down last."""
    lasts = [path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2] for path in _newest(folder).values()]
    return [float(last.split()[1]) for last in lasts if last]
