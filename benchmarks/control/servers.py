"""What real servers cost: the requests that one answers, and what workers wait for answers."""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.control.simulation import WORKERS_PER_NODE, percentile
from benchmarks.testbed.launch import ROOT
from lsgd.algorithms.leader import LeaderSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

STEP_S = 0.05
NEVER = 1 << 30  # a period that no run gets to the end of
START_WITHIN_S = 20.0
POLL_PERIOD_S = 0.01
LOAD_NODES = 2


@dataclass(frozen=True)
class Requests:
    """What one global server answered on one core."""

    workers: int
    requests_per_s: float
    server_cpu_us: float
    server_cpu_share: float

    columns: ClassVar = ("workers", "requests/s", "server's CPU, µs a request", "of its core")

    def cells(self) -> Sequence[str]:
        """Return it as a line of the table."""
        cpu = f"{self.server_cpu_us:.1f}"
        return (str(self.workers), f"{self.requests_per_s:,.0f}", cpu, f"{self.server_cpu_share:.0%}")


@dataclass(frozen=True)
class Beside:
    """What one global server answered without and with subscribers of its stream of events, or standbys."""

    workers: int
    beside: str
    requests_per_s: float
    requests_per_s_with: float
    ratio: float
    cpu_ratio: float

    columns: ClassVar = ("workers", "beside", "requests/s without", "with", "ratio", "ratio by the server's CPU")

    def cells(self) -> Sequence[str]:
        """Return it as a line of the table."""
        rates = (f"{self.requests_per_s:,.0f}", f"{self.requests_per_s_with:,.0f}")
        return (str(self.workers), self.beside, *rates, f"{self.ratio:.3f}", f"{self.cpu_ratio:.3f}")


@dataclass(frozen=True)
class Waits:
    """What workers waited between iterations; ``asked_by`` tells whether the client's thread is a part of it."""

    asked_by: str
    lookahead: int
    workers: int
    iterations: int
    p50_ms: float
    p99_ms: float
    waiting_share: float

    columns: ClassVar = (
        *("asked by", "lookahead", "workers", "iterations", "p50 ms", "p99 ms"),
        f"waiting share of {STEP_S * 1e3:g} ms",
    )

    def cells(self) -> Sequence[str]:
        """Return it as a line of the table."""
        counted = (str(self.lookahead), str(self.workers), str(self.iterations))
        return (
            self.asked_by,
            *counted,
            f"{self.p50_ms:.2f}",
            f"{self.p99_ms:.2f}",
            f"{self.waiting_share:.2%}",
        )


@contextlib.contextmanager
def server(folder: Path, name: str, arguments: Sequence[str], core: int | None = None) -> Iterator[tuple[int, str]]:
    """Run ``lsgd-server``, on one core if wanted; the value is its process and the address it listens on.

    Raises:
        RuntimeError: it does not listen within 20 s; the message has what it said.
    """
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "lsgd.server", *arguments]
    pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, preexec_fn=pin)
    try:
        deadline = time.monotonic() + START_WITHIN_S
        while not (found := re.search(r"server(?: of node\d+)? on (\S+),", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the {name} server does not listen:\n{log.read_text()}")
            time.sleep(POLL_PERIOD_S)
        yield process.pid, found[1]
    finally:
        process.kill()
        process.wait()


def global_server(
    folder: Path, workers: int, core: int | None = None
) -> contextlib.AbstractContextManager[tuple[int, str]]:
    """Run a global server whose run starts with so many workers, and has one round: the first."""
    algorithm = LeaderSettings(period=NEVER, local_period=NEVER)
    plan = folder / "plan.toml"
    plan.write_text(Plan(RunSettings(workers=workers), (Phase(algorithm),)).to_toml())
    return server(folder, "global", ["--global", "--listen", "tcp://127.0.0.1:0", "--plan", str(plan)], core)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3); /proc has hundredths only


def measure_beside(workers_per_node: int, seconds: float, turns: int, *, subscribers: int = 0) -> Beside:
    """Load a server with and without subscribers of its stream of events, or two standbys, in turns."""

    def beside() -> Requests:
        return measure_requests(workers_per_node, seconds, subscribers, standbys=not subscribers)

    found = [(measure_requests(workers_per_node, seconds), beside()) for _ in range(turns)]
    alone, both = zip(*found, strict=True)
    return Beside(
        alone[0].workers,
        f"{subscribers} subscribers" if subscribers else f"{LOAD_NODES} standbys",
        statistics.median(one.requests_per_s for one in alone),
        statistics.median(one.requests_per_s for one in both),
        statistics.median(b.requests_per_s / a.requests_per_s for a, b in found),
        statistics.median(a.server_cpu_us / b.server_cpu_us for a, b in found),
    )


def measure_requests(
    workers_per_node: int, seconds: float, subscribers: int = 0, *, standbys: bool = False
) -> Requests:
    """Load a server on the first core from the other cores, or from all if there is one only.

    ``standbys``: whether the two nodes that load it get copies of its journal, too.
    """
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[1:] or cores)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lsgd-benchmark-")))
        workers = LOAD_NODES * workers_per_node
        pid, address = stack.enter_context(global_server(folder, workers, cores[0]))
        if subscribers:
            reading = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.control.subscribers", address, str(subscribers)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, others),
            )
            stack.enter_context(reading)
            stack.callback(reading.kill)
            if not reading.stdout or reading.stdout.readline() != "started\n":
                raise RuntimeError("the subscribers did not start; their error is above")
        loads = []
        for node in range(1, LOAD_NODES + 1):  # node 0 has the server
            arguments = [address, str(node), str(workers_per_node), str(seconds)] + ["--standby"] * standbys
            load = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.control.load", *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, others),
            )
            loads.append(stack.enter_context(load))
            stack.callback(load.kill)
        lines = [load.stdout.readline() for load in loads if load.stdout]
        if lines != ["started\n"] * LOAD_NODES:
            raise RuntimeError("the load did not start; its error is above")
        before_s = cpu_s(pid)
        found = [json.loads(load.communicate()[0]) for load in loads]
        used_s = cpu_s(pid) - before_s
    answered = sum(one["requests"] for one in found)
    lasted_s = max(one["seconds"] for one in found)
    return Requests(workers, answered / lasted_s, used_s / answered * 1e6, used_s / lasted_s)


def measure_waits(nodes: int, seconds: float, lookahead: int) -> Iterator[Waits]:
    """Let eight workers iterate on each of some nodes, all on this machine."""
    workers = nodes * WORKERS_PER_NODE
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lsgd-benchmark-", dir="/tmp")))
        _, global_address = stack.enter_context(global_server(folder, workers))
        processes = []
        for node in range(nodes):
            listen = f"ipc://{folder}/node{node}.sock"
            arguments = ["--local", "--node", str(node), "--listen", listen, "--connect", global_address]
            _, address = stack.enter_context(server(folder, f"node{node}", arguments))
            first = 1 if node == 0 else 0
            rest = WORKERS_PER_NODE - first
            processes.append(start_workers(address, node, first, rest, seconds, lookahead))
            if node == 0:
                processes.append(start_workers(address, node, 0, 1, seconds, lookahead, "--channel"))
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        found = [json.loads(process.communicate()[0] or "null") for process in processes]
    if None in found:
        raise RuntimeError("a worker failed; its error is above")
    by_channel = found.pop(1)
    by_sockets = [seconds for one in found for seconds in one]
    for name, waits_s in (("the client's Channel", by_channel), ("a bare socket", by_sockets)):
        wait_s = statistics.mean(waits_s)
        yield Waits(
            name,
            lookahead,
            workers,
            len(waits_s),
            percentile(waits_s, 0.5) * 1e3,
            percentile(waits_s, 0.99) * 1e3,
            wait_s / (STEP_S + wait_s),
        )


def start_workers(
    address: str, node: int, first: int, workers: int, seconds: float, lookahead: int, *flags: str
) -> subprocess.Popen[str]:
    """Start a process of workers of one node."""
    arguments = [address, str(node), str(first), str(workers), str(STEP_S), str(seconds)]
    arguments += ["--lookahead", str(lookahead), *flags]
    command = [sys.executable, "-m", "benchmarks.control.worker", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
