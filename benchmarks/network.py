"""Step times on slow wires: ``python -m benchmarks.network [--quick] [--json FILE]``. Linux, root.

Every method trains a wide MLP of 25 million parameters (W3) on hosts of the laboratory (benchmarks/lab.py), lsgd's own
with the real servers, ``lsgd launch`` and Worker. Bytes are real. Compute is timed: the layers sleep, beside real
passes on a small batch, because a few cores cannot keep all hosts busy.

The steps that count are whole periods, after those in which groups are formed; methods without a period exchange in
each step. The wire has its limit from the first step to the last of these: the whole models that travel before and
after would take minutes at 10 Mbit/s, and are not measured. With several repeats the methods take turns, and the ratio
to DistributedDataParallel is the median over the turns of the ratio of two runs of one turn. Results are written as
they come; what the file has is not run again.

With ``--latencies`` it measures how many messages follow one another in a step: a model of 4,096 parameters without
sleep, on a wire where a message is under way for 25 ms.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._about import about, argument_parser, heading
from benchmarks._launch import RunFailedError, await_all, launch, start
from benchmarks._meter import LIMITED, MEASURED, STEPPING
from benchmarks._network_tables import latency_table, step_table
from benchmarks._results import Results
from benchmarks.lab import Lab, LabError
from benchmarks.methods import ALL, OURS, PERIODIC, add_peer_python, interpreters_of, settings_of
from benchmarks.workloads import LAYERS, WIDTH
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

LINKS: Mapping[str, tuple[float | None, float]] = {
    "unlimited": (None, 0.0),
    "1gbit": (1000.0, 0.0),
    "100mbit": (100.0, 0.0),
    "10mbit": (10.0, 0.0),
    "100mbit-5ms": (100.0, 5.0),
    "100mbit-25ms": (100.0, 25.0),
}
"""Rate in Mbit/s (None: no limit) and one-way latency in ms."""

NODES = (2, 3, 4)
METHODS = tuple(method for method in ALL if method != "leader-strong")  # which sends what leader does
QUICK_METHODS = ("ddp", "ddp-powersgd1", "post-local-sgd", "leader-8bit", "bytegrad", "decentralized")
LATENCY_METHODS = ("ddp", "allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "leader")
LATENCY_LINK = "100mbit-25ms"
DEADLINE_S = 4 * 3600.0
MORE_STEPS = (
    8  # after those that count, so that a worker which is slower than the others sees the end of these
)
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


FULL = Settings(WIDTH, compute_ms=100.0, period=64, periods=1, steps=2)
QUICK = Settings(width=320, compute_ms=20.0, period=16, periods=2, steps=8)
LATENCY = Settings(width=16, compute_ms=0.0, period=1, periods=20, steps=20)


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

    nodes: int
    link: str
    method: str
    repeat: int
    step_s: float
    compute_s: float
    wait_s: float
    sent_nbytes: float
    needed_nbytes: float
    busiest_nbytes: float
    busiest_packets: float


@dataclass(frozen=True)
class Run:
    """What is to be run, and the Python that it runs in."""

    link: str
    method: str
    repeat: int
    python: str
    settings: Settings

    @property
    def arguments(self) -> list[str]:
        """Arguments of every process."""
        skip, steps = self.settings.steps_of(self.method)
        size = [f"--width={self.settings.width}", f"--sleep-s={self.settings.compute_ms / 1e3}"]
        return [*size, f"--skip={skip}", f"--steps={steps}"]


def run_hosts(lab: Lab, run: Run) -> list[dict[str, Any]]:
    """Run a method on all hosts and return what each has measured.

    Raises:
        RunFailedError: a host failed.
    """
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as name:
        folder = Path(name)
        folders = [folder / host.name for host in lab.hosts]
        processes = (start_ours if run.method in OURS else start_peer)(lab, run, folder)
        limit = limit_while_stepping(lab, LINKS[run.link][0], folders)
        what = f"{run.method} on {len(lab.hosts)} nodes, {run.link},"
        await_all(processes, what, DEADLINE_S, lambda: next(limit, None))
        return [json.loads((folder / MEASURED).read_text()) for folder in folders]


def limit_while_stepping(lab: Lab, rate_mbit: float | None, folders: Sequence[Path]) -> Iterator[None]:
    """Limit the wire from the first step on, and until all is measured; to be called every now and then.

    Args:
        lab: whose wire it is; without a limit now.
        rate_mbit: the limit.
        folders: of the processes.
    """
    while not all((folder / STEPPING).exists() for folder in folders):
        yield
    lab.set_rate(rate_mbit)
    for folder in folders:
        (folder / LIMITED).touch()
    while not all((folder / MEASURED).exists() for folder in folders):
        yield
    lab.set_rate(None)


def start_ours(lab: Lab, run: Run, folder: Path) -> "list[subprocess.Popen[str]]":
    """Start the launchers of one of lsgd's methods; what is measured goes below ``folder``."""
    plan = folder / "plan.toml"
    plan.write_text(plan_of(run, len(lab.hosts)).to_toml())
    script = [run.python, "-m", "benchmarks._network_worker", *run.arguments]
    return [
        launch(host, lab.hosts, plan, folder, [*script, f"--folder={folder / host.name}"])
        for host in lab.hosts
    ]


def start_peer(lab: Lab, run: Run, folder: Path) -> "list[subprocess.Popen[str]]":
    """Start the processes of a peer; what is measured goes to the same place."""
    script = [run.python, "-m", "benchmarks._network_peer", *run.arguments, f"--method={run.method}"]
    script += [f"--period={run.settings.period}", "--addresses", *(host.address for host in lab.hosts)]
    return [
        start(host, [*script, f"--rank={host.index}", f"--folder={folder / host.name}"]) for host in lab.hosts
    ]


def plan_of(run: Run, nodes: int) -> Plan:
    """Return the plan of one of lsgd's methods; no deadline in it is too short for the wire."""
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
    return Plan(limits, (Phase(settings_of(run.method, settings.period)),))


def measure(lab: Lab, run: Run) -> Result:
    """Run a method once."""
    nodes, settings = len(lab.hosts), run.settings
    found = run_hosts(lab, run)

    def mean(name: str) -> float:
        return statistics.mean(one[name] for one in found)

    steps, needed = mean("position"), 0.0
    if run.method in OURS:
        needed = settings_of(run.method, settings.period).sent_nbytes(settings.numel, nodes)
    return Result(
        nodes,
        run.link,
        run.method,
        run.repeat,
        mean("at_s") / steps,
        mean("compute_s"),
        mean("waited_s") / steps,
        mean("sent_nbytes") / steps,
        needed,
        max(one["sent_nbytes"] + one["received_nbytes"] for one in found) / steps,
        max(one["packets"] for one in found) / steps,
    )


def measure_all(
    options: argparse.Namespace, settings: Settings, pythons: Mapping[str, str], results: Results
) -> Iterator[str]:
    """Make the runs that have no result yet; yield what failed."""
    turns = itertools.product(options.nodes, options.links, range(options.repeats), pythons.items())
    for nodes, link, repeat, (method, python) in turns:
        if results.has(nodes=nodes, link=link, method=method, repeat=repeat):
            continue
        try:
            with Lab(nodes, delay_ms=LINKS[link][1]) as lab:
                result = measure(lab, Run(link, method, repeat, python, settings))
        except RunFailedError as error:
            print(error, file=sys.stderr, flush=True)
            yield f"{method} on {nodes} nodes, {link}"
            continue
        results.add(asdict(result))
        print(f"{nodes} nodes, {link}, {method}: {result.step_s * 1e3:.1f} ms a step", flush=True)


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.network", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a small model, six methods, 100 Mbit/s, two nodes"
    )
    parser.add_argument("--latencies", action="store_true", help="count the messages that follow one another")
    parser.add_argument("--methods", nargs="+", choices=ALL, help="which ones")
    parser.add_argument("--links", nargs="+", choices=LINKS, help="which ones")
    parser.add_argument("--nodes", type=int, nargs="+", help="how many, one run each")
    parser.add_argument("--repeats", type=int, default=1, help="turns of all methods")
    parser.add_argument("--compute-ms", type=float, help="for which a step sleeps")
    parser.add_argument(
        "--period", type=int, help="steps between exchanges, for the methods that have a period"
    )
    parser.add_argument("--periods", type=int, help="that count")
    parser.add_argument("--steps", type=int, help="that count, for the methods that exchange in each one")
    parser.add_argument("--lookahead", type=int, help="iterations that lsgd's workers ask for ahead")
    add_peer_python(parser)
    parser.add_argument(
        "--json", type=Path, help="write the results to this file as they come, and go on with those"
    )
    options = parser.parse_args()
    if options.latencies:
        options.links, options.methods = options.links or [LATENCY_LINK], options.methods or LATENCY_METHODS
    elif options.quick:
        options.links, options.methods = options.links or ["100mbit"], options.methods or QUICK_METHODS
        options.nodes = options.nodes or [2]
    options.links, options.methods = options.links or list(LINKS), options.methods or METHODS
    options.nodes = options.nodes or list(NODES)
    return options


def main() -> int:
    """Measure every method on every wire, and print a Markdown table for each wire."""
    options = options_of()
    settings = LATENCY if options.latencies else QUICK if options.quick else FULL
    given = {
        name: getattr(options, name) for name in ("compute_ms", "period", "periods", "steps", "lookahead")
    }
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    pythons = interpreters_of(options.methods, options.peer_python)
    machine = about("benchmarks.network")
    try:
        results = Results(options.json, machine, {**asdict(settings), "parameters": settings.numel})
        print(heading(machine) + "\n", flush=True)
        failed = list(measure_all(options, settings, pythons, results))
    except (LabError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wanted = [row for row in results.rows if row["method"] in options.methods]
    print("\n" + (latency_table(wanted, LINKS) if options.latencies else step_table(wanted)))
    missing = [method for method in options.methods if method not in pythons]
    if missing:
        print(f"\nnot installed: {', '.join(missing)}")
    if failed:
        print(f"\nfailed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
