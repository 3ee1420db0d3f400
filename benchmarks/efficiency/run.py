"""One training of benchmarks/efficiency: two nodes on this machine, and what is killed on them."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.testbed.launch import ROOT, RunFailedError, free_port, launch_command
from lsgd.errors import LsgdError
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import StatusQuery, StopRun
from lsgd.run_folder import METRICS, is_unfinished
from lsgd.watch.reader import ask

NODES, WORKERS = 2, 2
"""Nodes, and workers on each."""

KINDS = ("worker", "server", "node", "node 0", "freeze")
"""What can be struck: ``node`` is node 1, and ``freeze`` freezes it."""

STARTS_WITHIN_S, ENDS_WITHIN_S = 120.0, 60.0
NODE_AGAIN_S = 1.0
"""How long a killed node stays away, before whatever runs launchers (systemd, a scheduler) starts it again."""

FROZEN_S = 8.0
"""How long a node stands still."""

_ASK_EVERY_S = 0.2


@dataclass(frozen=True)
class Measured:
    """What a training did in its time.

    Args:
        kills: how many processes were killed.
        iterations: counted by the servers.
        participation: mean share of all workers in a global round.
        end: the last line of node 0's launcher.
    """

    kills: int
    seconds: float
    iterations: int
    participation: float
    end: str


class Run:
    """Two nodes with a launcher each, which end with the ``with`` block.

    Args:
        folder: for logs and results.
        step_s: how long a step takes.
    """

    def __init__(self, folder: Path, step_s: float) -> None:
        folder.mkdir(parents=True)
        self._folder, self._step_s = folder, step_s
        self._port = free_port()
        self._address = f"tcp://127.0.0.1:{self._port}"
        self._plan = folder / "plan.toml"
        self._plan.write_text(Plan(RunSettings(workers=NODES * WORKERS), (Phase(Plan().algorithm),)).to_toml())
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._turn = itertools.count()

    def __enter__(self) -> "Run":
        for node in range(NODES):
            self._launch(node)
        self._until(lambda: self.state()["count"] >= 100, STARTS_WITHIN_S, "the run trains")
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._launchers.values():
            launcher.kill()  # the kernel kills what it has started
            launcher.wait()

    def _launch(self, node: int, *more: str) -> None:
        command = launch_command(
            node, NODES, "127.0.0.1", WORKERS, self._plan, self._folder / f"node{node}", port=self._port
        )
        script = [sys.executable, "-m", "benchmarks.efficiency.worker", str(self._step_s)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
        with (self._folder / f"node{node}.log").open("ab") as output:
            self._launchers[node] = subprocess.Popen(
                [*command, "--insecure", *more, "--", *script],
                cwd=ROOT,
                env={**environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def state(self) -> dict[str, Any]:
        """Return what ``lsgd status --json`` prints; a count of 0 while nobody answers."""
        with contextlib.suppress(LsgdError):
            return ask(self._address, StatusQuery(0), within_s=1.0)
        return {"count": 0}

    def measure(self, seconds: float, what: str, every_s: float) -> Measured:
        """Train for a time while ``what`` is killed every so many seconds; then stop the run."""
        begun_at, before, kills = time.monotonic(), self._count(), 0
        rounds_before = len(self._rounds())
        while (now := time.monotonic()) - begun_at < seconds:
            if what and now - begun_at >= every_s * (kills + 0.5):
                kills += self._kill(what)
            self._check()
            time.sleep(_ASK_EVERY_S)
        iterations, took_s = self._count() - before, time.monotonic() - begun_at
        shares = [len(each["losses"]) / (NODES * WORKERS) for each in self._rounds()[rounds_before:]]
        return Measured(kills, took_s, iterations, sum(shares) / max(1, len(shares)), self._end())

    def _count(self) -> int:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not (count := self.state()["count"]):
            self._check()
            if time.monotonic() > deadline:
                raise RunFailedError(f"the server has not answered for {STARTS_WITHIN_S:g} s")
            time.sleep(_ASK_EVERY_S)
        return int(count)

    def _rounds(self) -> list[dict[str, Any]]:
        """Return all global rounds so far."""
        path = self._folder / "node0" / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        return [round_ for round_ in map(json.loads, lines) if round_["scope"] == "global"]

    def _kill(self, what: str) -> int:
        """Strike a worker (each in turn), the global server, or a node; return whether it was there."""
        turn = next(self._turn)
        if what in ("node", "node 0"):
            node = int(what == "node")
            self._launchers[node].kill()
            self._launchers[node].wait()
            time.sleep(NODE_AGAIN_S)
            journal = is_unfinished(self._folder / f"node{node}")
            self._launch(node, "--resume" if journal else "--resume-if-any")
            return 1
        if what == "freeze":
            self._freeze(1)
            return 1
        name = "--global" if what == "server" else f"worker{turn // NODES % WORKERS}"
        node = 0 if what == "server" else turn % NODES
        for process in self._processes(node):
            with contextlib.suppress(psutil.Error):
                rank = process.environ().get("LSGD_LOCAL_RANK")
                if name in process.cmdline() or (rank is not None and name == f"worker{rank}"):
                    process.send_signal(signal.SIGKILL)
                    return 1
        return 0

    def _freeze(self, node: int) -> None:
        """Let a node stand still, with all that runs on it."""
        launcher = psutil.Process(self._launchers[node].pid)
        frozen = [launcher, *launcher.children(recursive=True)]
        for order, then_s in ((signal.SIGSTOP, FROZEN_S), (signal.SIGCONT, 0.0)):
            for process in frozen:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(order)
            time.sleep(then_s)

    def _processes(self, node: int) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            yield from psutil.Process(self._launchers[node].pid).children()

    def _check(self) -> None:
        for node, launcher in self._launchers.items():
            if launcher.poll() is not None:
                said = (self._folder / f"node{node}.log").read_text()[-2000:]
                raise RunFailedError(f"the launcher of node{node} has ended with {launcher.returncode}:\n{said}")

    def _end(self) -> str:
        ask(self._address, StopRun("measured"))
        for launcher in self._launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(ENDS_WITHIN_S)
        return (self._folder / "node0.log").read_text().rstrip().rpartition("\n")[2]

    def _until(self, true: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            self._check()
            if time.monotonic() > deadline:
                raise RunFailedError(f"not within {within_s:g} s: {what}")
            time.sleep(_ASK_EVERY_S)
