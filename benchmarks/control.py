"""What the servers cost: ``python -m benchmarks.control [--quick] [--only PART] [--json FILE]``.

Three parts:

- ``requests``: one real global server on one core, and processes on the others that speak as local servers do and ask
  for iterations as fast as they are granted.
- ``waits``: a real global server, real local servers and 64 workers that iterate in 50 ms; what they wait between two
  iterations. Without lookahead that is the way of a request from the worker to its node's server, to the global one
  and back. One of the workers asks through the client's own Channel, in a process of its own: what it waits is what a
  training loop waits.
- ``simulation``: the real coordinator in virtual time (benchmarks/_control_simulation.py) with 10 to 10,000 workers,
  eight on a node, Leader SGD with a period of 64, stragglers and failures.
- ``growth``: the same with 100 workers and neither stragglers nor failures, over five periods of 16 to 1,024 iterations
  each: the messages of a worker in a period, for several lookaheads.
"""

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
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._about import about, argument_parser, heading, table
from benchmarks._control_simulation import WORKERS_PER_NODE, Simulation, percentile
from lsgd.algorithms.leader import LeaderSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

ROOT = Path(__file__).parents[1]
PARTS = ("requests", "waits", "simulation", "growth")
STEP_S = 0.05
NEVER = 1 << 30  # a period that no run gets to the end of
START_WITHIN_S = 20.0
POLL_PERIOD_S = 0.01
LOAD_NODES = 2
GROWTH_WORKERS, GROWTH_ROUNDS = 100, 5


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        load_workers: workers on each of the nodes that load the server, one run each.
        seconds: length of a measurement with real processes.
        nodes: of the workers that wait, eight on each.
        lookaheads: of theirs.
        simulated: numbers of workers in virtual time.
        iterations: of each of them.
        failures: of them.
        periods: of which the messages are counted.
    """

    load_workers: Sequence[int] = (1, 8, 64)
    seconds: float = 10.0
    nodes: int = 8
    lookaheads: Sequence[int] = (0, 1, 16)
    simulated: Sequence[int] = (10, 100, 1000, 10_000)
    iterations: int = 192
    failures: int = 5
    periods: Sequence[int] = (16, 64, 256, 1024)


QUICK = Size(
    (32,), 3.0, lookaheads=(0, 1), simulated=(10, 100, 1000), iterations=128, failures=3, periods=(16, 64)
)
SMOKE = Size((4,), 0.5, 1, lookaheads=(0, 1), simulated=(10, 40), iterations=128, failures=2, periods=(16,))


@dataclass(frozen=True)
class Requests:
    """What one global server answered on one core."""

    workers: int
    requests_per_s: float
    server_cpu_us: float
    server_cpu_share: float


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


@dataclass(frozen=True)
class Simulated:
    """What the coordinator computed for a whole run."""

    workers: int
    nodes: int
    iterations: int
    killed: int
    rounds_global: int
    rounds_local: int
    decision_p50_us: float
    decision_p99_us: float
    decision_mean_us: float
    tick_mean_us: float
    opening_decided_s: float
    opening_encoded_s: float
    opening_longest_s: float
    global_round_mb: float
    same_members_round_mb: float
    local_round_mb: float
    messages_per_iteration: float


@dataclass(frozen=True)
class Growth:
    """What a worker said and heard in a period."""

    lookahead: int
    period: int
    messages_per_period: float
    virtual_seconds_per_iteration: float


Result = Requests | Waits | Simulated | Growth


# -- real servers --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(
    folder: Path, name: str, arguments: Sequence[str], core: int | None = None
) -> Iterator[tuple[int, str]]:
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
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_requests(workers_per_node: int, seconds: float) -> Requests:
    """Load a server on the first core from the other cores, or from all if there is one only."""
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[1:] or cores)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lsgd-benchmark-")))
        workers = LOAD_NODES * workers_per_node
        pid, address = stack.enter_context(global_server(folder, workers, cores[0]))
        loads = []
        for node in range(LOAD_NODES):
            arguments = [address, str(node), str(workers_per_node), str(seconds)]
            load = subprocess.Popen(
                [sys.executable, "-m", "benchmarks._control_load", *arguments],
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
    command = [sys.executable, "-m", "benchmarks._control_worker", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


# -- virtual time --------------------------------------------------------------------------------------------------


def simulate(workers: int, iterations: int, failures: int) -> Simulated:
    """Run the coordinator in virtual time."""
    simulation = Simulation(workers, iterations, failures)
    counts = simulation.run()
    local, of_all = counts.round_nbytes["local"], counts.round_nbytes["global"]
    made = simulation.state.ledger.count
    return Simulated(
        workers=workers,
        nodes=-(-workers // WORKERS_PER_NODE),
        iterations=made,
        killed=counts.killed,
        rounds_global=len(of_all),
        rounds_local=len(local),
        decision_p50_us=percentile(counts.decisions_s, 0.5) * 1e6,
        decision_p99_us=percentile(counts.decisions_s, 0.99) * 1e6,
        decision_mean_us=statistics.mean(counts.decisions_s) * 1e6,
        tick_mean_us=statistics.mean(counts.ticks_s) * 1e6,
        opening_decided_s=statistics.median(decided_s for decided_s, _ in counts.openings_s),
        opening_encoded_s=statistics.median(encoded_s for _, encoded_s in counts.openings_s),
        opening_longest_s=max(map(sum, counts.openings_s)),
        global_round_mb=max(of_all) / 1e6,
        same_members_round_mb=min(of_all) / 1e6,
        local_round_mb=max(local, default=0) / 1e6,
        messages_per_iteration=(counts.upward + counts.downward) / made,
    )


def measure_growth(period: int, lookahead: int) -> Growth:
    """Count the messages of a run of five periods in virtual time."""
    iterations = GROWTH_ROUNDS * period
    simulation = Simulation(
        GROWTH_WORKERS, iterations, 0, period=period, local_period=period, lookahead=lookahead, stragglers=0.0
    )
    counts = simulation.run()
    said = counts.upward - counts.heartbeats + counts.downward
    return Growth(lookahead, period, said / GROWTH_WORKERS / GROWTH_ROUNDS, simulation.now / iterations)


# -- tables --------------------------------------------------------------------------------------------------------

COLUMNS = {
    Requests: ("workers", "requests/s", "server's CPU, µs a request", "of its core"),
    Waits: (
        "asked by",
        "lookahead",
        "workers",
        "iterations",
        "p50 ms",
        "p99 ms",
        f"waiting share of {STEP_S * 1e3:g} ms",
    ),
    Simulated: (
        *("workers", "nodes", "iterations", "killed", "global rounds", "local rounds"),
        *("decision µs: median", "99 %", "mean", "tick µs"),
        *("a round opens: s deciding", "encoding", "longest"),
        *("MB a global round", "of the same members", "MB a local round", "messages an iteration"),
    ),
    Growth: (
        "lookahead",
        "period",
        "messages of a worker in a period",
        "for each iteration",
        "ms an iteration",
    ),
}


def row(result: Result) -> Sequence[str]:
    """Return a result as a line of its table."""
    match result:
        case Requests(workers, rate, us, share):
            return (str(workers), f"{rate:,.0f}", f"{us:.1f}", f"{share:.0%}")
        case Waits(name, lookahead, workers, iterations, p50, p99, share):
            counted = (str(lookahead), str(workers), str(iterations))
            return (name, *counted, f"{p50:.2f}", f"{p99:.2f}", f"{share:.2%}")
        case Growth(lookahead, period, messages, seconds):
            each = f"{messages / period:.2f}"
            return (str(lookahead), str(period), f"{messages:.1f}", each, f"{seconds * 1e3:.1f}")
    return (
        *(f"{result.workers:,}", f"{result.nodes:,}", f"{result.iterations:,}", str(result.killed)),
        *(str(result.rounds_global), f"{result.rounds_local:,}"),
        *(f"{result.decision_p50_us:.1f}", f"{result.decision_p99_us:.1f}", f"{result.decision_mean_us:.1f}"),
        *(f"{result.tick_mean_us:.0f}", f"{result.opening_decided_s:.3f}"),
        *(f"{result.opening_encoded_s:.3f}", f"{result.opening_longest_s:.3f}"),
        *(f"{result.global_round_mb:.3f}", f"{result.same_members_round_mb:.3f}"),
        f"{result.local_round_mb:.3f}",
        f"{result.messages_per_iteration:.2f}",
    )


def measure(part: str, size: Size) -> Iterator[Result]:
    """Yield the results of one part as they are there."""
    if part == "requests":
        for workers in size.load_workers:
            yield measure_requests(workers, size.seconds)
    elif part == "waits":
        for lookahead in size.lookaheads:
            yield from measure_waits(size.nodes, size.seconds, lookahead)
    elif part == "simulation":
        for workers in size.simulated:
            yield simulate(workers, size.iterations, size.failures)
    else:
        for lookahead in (0, 1, 16, 256):
            for period in size.periods:
                yield measure_growth(period, lookahead)


def main() -> int:
    """Measure every part, and print a Markdown table for each."""
    parser = argument_parser("benchmarks.control", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="shorter, and with up to 1,000 simulated workers"
    )
    parser.add_argument("--smoke", action="store_true", help="only show that it works: seconds, few workers")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be repeated")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of simulated workers")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    size = SMOKE if options.smoke else QUICK if options.quick else Size()
    if options.workers:
        size = Size(**{**asdict(size), "simulated": options.workers})

    machine = about("benchmarks.control")
    print(heading(machine), flush=True)
    found: dict[str, list[Result]] = {}
    for part in options.only or PARTS:
        found[part] = list(measure(part, size))
        print(
            f"\n{table(COLUMNS[type(found[part][0])], [row(result) for result in found[part]])}", flush=True
        )
    if options.json:
        results = [{"part": part, **asdict(result)} for part, of_part in found.items() for result in of_part]
        options.json.write_text(json.dumps({**machine, "results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
