"""One run of benchmarks/network: a method on all hosts of a testbed."""

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.methods import OURS, PERIODIC
from benchmarks.network.meter import LIMITED, MEASURED, STEPPING
from benchmarks.testbed import LINKS, Testbed
from benchmarks.testbed.launch import Process, await_all, launch_all, start
from benchmarks.workloads import LAYERS
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

DEADLINE_S = 4 * 3600.0
MORE_STEPS = 8  # after those that count, so that a worker which is slower than the others sees the end of these
SILENCE_S = 3600.0  # of servers whose messages wait behind models, at 10 Mbit/s
EXCHANGE_S = 60.0  # longest that a step of an exchange may take, besides the models that it may have to send
MODELS_IN_AN_EXCHANGE = 8


@dataclass(frozen=True)
class Settings:
    """What all runs have in common.

    Args:
        width: of the model's 16 layers.
        compute_ms: for which a step sleeps.
        period: steps between exchanges, for the methods that have one.
        periods: that count.
        steps: that count, for the methods that exchange in each one.
        lookahead: iterations that lsgd's workers ask for ahead.
    """

    width: int
    compute_ms: float
    period: int
    periods: int
    steps: int
    lookahead: int = 1

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.width**2 * LAYERS

    def steps_of(self, method: str) -> tuple[int, int]:
        """Return how many steps of a method come first, and how many count.

        The groups are formed in the first one, and a delayed transfer has arrived after half a period.
        """
        if method in PERIODIC:
            return max(3, 5 * self.period // 8 + 1), self.periods * self.period
        return 3, self.steps


@dataclass(frozen=True)
class Result:
    """One run: means over the hosts, for one step.

    Args:
        step_s: its time.
        compute_s: that of a step alone.
        wait_s: waiting for the answer of the servers.
        sent_nbytes: what a host sent, headers of the segments included, not of each packet.
        needed_nbytes: the same by the algorithm's formula; 0 where there is none.
        busiest_nbytes: what the busiest host sent and received.
        busiest_packets: packets of the busiest host, both ways; up to 64 KiB of one connection count as one.
    """

    step_s: float
    compute_s: float
    wait_s: float
    sent_nbytes: float
    needed_nbytes: float
    busiest_nbytes: float
    busiest_packets: float

    def __str__(self) -> str:
        return f"{self.step_s * 1e3:.1f} ms a step"


@dataclass(frozen=True)
class Run:
    """What is to be run, and the Python that it runs in."""

    link: str
    method: str
    python: str
    settings: Settings

    @property
    def arguments(self) -> list[str]:
        """Arguments of every process."""
        skip, steps = self.settings.steps_of(self.method)
        size = [f"--width={self.settings.width}", f"--sleep-s={self.settings.compute_ms / 1e3}"]
        return [*size, f"--skip={skip}", f"--steps={steps}"]


def run_hosts(testbed: Testbed, run: Run) -> list[dict[str, Any]]:
    """Run a method on all hosts and return what each has measured.

    Raises:
        RunFailedError: a host failed.
    """
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as name:
        folder = Path(name)
        folders = [folder / host.name for host in testbed.hosts]
        processes = (start_ours if run.method in OURS else start_baseline)(testbed, run, folder)
        limit = limit_while_stepping(testbed, LINKS[run.link][0], folders)
        what = f"{run.method} on {len(testbed.hosts)} nodes, {run.link},"
        await_all(processes, what, DEADLINE_S, lambda: next(limit, None))
        return [json.loads((folder / MEASURED).read_text()) for folder in folders]


def limit_while_stepping(testbed: Testbed, rate_mbit: float | None, folders: Sequence[Path]) -> Iterator[None]:
    """Limit the network from the first step on, and until all is measured; to be called every now and then.

    Args:
        testbed: without a limit now.
        rate_mbit: the limit.
        folders: of the processes.
    """
    while not all((folder / STEPPING).exists() for folder in folders):
        yield
    testbed.set_rate(rate_mbit)
    for folder in folders:
        (folder / LIMITED).touch()
    while not all((folder / MEASURED).exists() for folder in folders):
        yield
    testbed.set_rate(None)


def start_ours(testbed: Testbed, run: Run, folder: Path) -> list[Process]:
    """Start the launchers of one of lsgd's methods; what is measured goes below ``folder``."""
    script = [run.python, "-m", "benchmarks.network.worker", *run.arguments]
    plan = plan_of(run, len(testbed.hosts))
    return launch_all(testbed.hosts, plan, folder, lambda host: [*script, f"--folder={folder / host.name}"])


def start_baseline(testbed: Testbed, run: Run, folder: Path) -> list[Process]:
    """Start the processes of a baseline; what is measured goes to the same place."""
    script = [run.python, "-m", "benchmarks.network.baseline", *run.arguments, f"--method={run.method}"]
    script += [f"--period={run.settings.period}", "--addresses", *(host.address for host in testbed.hosts)]
    return [start([*script, f"--rank={host.index}", f"--folder={folder / host.name}"], host) for host in testbed.hosts]


def plan_of(run: Run, nodes: int) -> Plan:
    """Return the plan of one of lsgd's methods; no deadline in it is too short for the link."""
    settings, rate_mbit = run.settings, LINKS[run.link][0]
    model_s = 4 * settings.numel * 8 / (rate_mbit * 1e6) if rate_mbit else 0.0
    steps = sum(settings.steps_of(run.method)) + (MORE_STEPS if run.method in PERIODIC else 1)
    limits = RunSettings(
        workers=nodes,
        iterations=nodes * steps,
        exchange_timeout_s=EXCHANGE_S + MODELS_IN_AN_EXCHANGE * model_s,
        server_timeout_s=SILENCE_S,
        lease_s=SILENCE_S,
        lookahead=settings.lookahead,
    )
    return Plan(limits, (Phase(OURS[run.method](settings.period)),))


def measure(testbed: Testbed, run: Run) -> Result:
    """Run a method once."""
    nodes, settings = len(testbed.hosts), run.settings
    found = run_hosts(testbed, run)

    def mean(name: str) -> float:
        return statistics.mean(float(one[name]) for one in found)

    steps, needed = mean("position"), 0.0
    if run.method in OURS:
        needed = OURS[run.method](settings.period).sent_nbytes(settings.numel, nodes)
    return Result(
        mean("at_s") / steps,
        mean("compute_s"),
        mean("waited_s") / steps,
        mean("sent_nbytes") / steps,
        needed,
        max(one["sent_nbytes"] + one["received_nbytes"] for one in found) / steps,
        max(one["packets"] for one in found) / steps,
    )
