"""Every algorithm on handwritten digits: ``python -m benchmarks.algorithms [--quick] [--json FILE] [--only NAME]``.

Each is one run of examples/digits.py with real servers: two nodes of two workers, started by ``lsgd launch`` as
on two machines, but both on this one. What counts is the test accuracy of the consensus, the average of the four
models, which without any exchange is useless. A plan is the algorithm's defaults with what PLANS says.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed.launch import await_all, free_port, launch_command, start
from lsgd.algorithms import ALGORITHMS

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"
NODES, WORKERS_PER_NODE = 2, 2
ITERATIONS, QUICK_ITERATIONS = 5000, 600
TARGET_ACCURACY, UNLEARNED_ACCURACY = 0.97, 0.90
RUN_DEADLINE_S = 900.0
NO_EXCHANGE = "no exchange"

PLANS: Mapping[str, Mapping[str, Any]] = {
    NO_EXCHANGE: {
        "name": "leader",
        "period": 1_000_000,
        "local_period": 1_000_000,
        **dict.fromkeys(("pull_global", "pull_local", "proximal_global", "proximal_local"), 0.0),
    },
    **{name: {} for name in ALGORITHMS},
    "elastic": {"period": 16},  # with 64 it reached 0.972: four workers that move by beta / 4 drift far apart
}
"""Settings of each run that are not the algorithm's defaults."""


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    case: str
    settings: Mapping[str, Any]
    test_accuracy: float
    leader_accuracy: float
    distance: float
    seconds: float
    iterations: int
    rounds_local: int
    rounds_global: int


def train(case: str, iterations: int, folder: Path) -> Result:
    """Run the example with the plan of ``case`` on all nodes, and return what came out.

    Raises:
        RunFailedError: a node failed.
    """
    plan = folder / "plan.toml"
    folder.mkdir(parents=True)
    plan.write_text(plan_text({"name": case, **PLANS[case]}, iterations))
    port = free_port()
    processes = []
    for node in range(NODES):
        place = (node, NODES, "127.0.0.1", WORKERS_PER_NODE)
        command = launch_command(*place, plan, folder / f"node{node}", port=port)
        processes.append(start([*command, "--", sys.executable, str(EXAMPLE)]))
    await_all(processes, case, RUN_DEADLINE_S)
    found: dict[str, Any] = {}
    for name in ("result.json", "accuracy.json"):
        found |= json.loads((folder / "node0" / name).read_text())
    return Result(
        case,
        PLANS[case],
        found["test_accuracy"],
        found["leader_accuracy"],
        found["relative_distance_before_last_average"],
        found["seconds"],
        found["count"],
        found["rounds_local"],
        found["rounds_global"],
    )


def plan_text(algorithm: Mapping[str, Any], iterations: int) -> str:
    """Return the plan as TOML."""
    lines = [f"iterations = {iterations}", "", "[algorithm]"]
    return "\n".join(lines + [f"{name} = {json.dumps(value)}" for name, value in algorithm.items()]) + "\n"


def run(cases: Sequence[str], iterations: int) -> Iterator[Result]:
    """Yield the result of each case as it is there."""
    with tempfile.TemporaryDirectory(prefix="lsgd-benchmark-") as folder:
        for case in cases:
            yield train(case, iterations, Path(folder) / case.replace(" ", "-"))


COLUMNS = (
    "algorithm, settings",
    "accuracy of the average",
    "of one worker",
    "models apart",
    "seconds",
    "global rounds",
    "local rounds",
)


def row(result: Result) -> list[str]:
    """Return a result as a line of the table."""
    settings = [f"{name} = {value}" for name, value in result.settings.items()]
    return [
        result.case if result.case == NO_EXCHANGE else ", ".join([result.case, *settings]),
        f"{result.test_accuracy:.4f}",
        f"{result.leader_accuracy:.4f}",
        f"{result.distance:.1e}",
        f"{result.seconds:.0f}",
        str(result.rounds_global),
        str(result.rounds_local),
    ]


def as_expected(result: Result) -> bool:
    """Return whether the exchange, and nothing but the exchange, has made the average good."""
    if result.case == NO_EXCHANGE:
        return result.test_accuracy < UNLEARNED_ACCURACY
    return result.test_accuracy >= TARGET_ACCURACY


def main() -> int:
    """Train with each algorithm, print a Markdown table, and return 1 if one of them missed what is expected."""
    parser = argument_parser("benchmarks.algorithms", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ITERATIONS} iterations each, nothing expected of them"
    )
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of all workers together, in each run")
    parser.add_argument("--only", action="append", choices=list(PLANS), help="run this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    iterations = QUICK_ITERATIONS if options.quick else options.iterations

    machine = about("benchmarks.algorithms")
    print(heading(machine), flush=True)
    results = []
    for result in run(options.only or list(PLANS), iterations):
        results.append(result)
        print(f"{result.case}: {result.test_accuracy:.4f}, {result.seconds:.0f} s", flush=True)
    print(f"\n{table(COLUMNS, [row(result) for result in results])}")
    write_json(options.json, machine, results, iterations=iterations)
    missed = [result.case for result in results if not as_expected(result)]
    if options.quick or not missed:
        return 0
    print(f"\nnot as expected: {', '.join(missed)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
