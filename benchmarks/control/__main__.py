"""What the servers cost: ``python -m benchmarks.control [--quick] [--only PART] [--json FILE]``.

Six parts:

- ``requests``: one real global server on one core, and processes on the others that speak as local servers do and ask
  for iterations as fast as they are granted.
- ``events``: the same with and without ten subscribers of the stream of events, who read four times a second each, in
  turns.
- ``standbys``: the same with and without copies of the journal for two nodes.
- ``waits``: a real global server, real local servers and 64 workers that iterate in 50 ms; what they wait between two
  iterations. Without lookahead that is the way of a request from the worker to its node's server, to the global one
  and back. One of the workers asks through the client's own Channel, in a process of its own: what it waits is what a
  training loop waits.
- ``simulation``: the real coordinator in virtual time (benchmarks/control/simulation.py) with 10 to 10,000 workers,
  eight on a node, Leader SGD with a period of 64, stragglers and failures.
- ``growth``: the same with 100 workers and neither stragglers nor failures, over five periods of 16 to 1,024 iterations
  each: the messages of a worker in a period, for several lookaheads.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.control.servers import Beside, Requests, Waits, measure_beside, measure_requests, measure_waits
from benchmarks.control.virtual import Growth, Simulated, measure_growth, simulate
from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table

PARTS = ("requests", "events", "standbys", "waits", "simulation", "growth")
Result = Requests | Beside | Waits | Simulated | Growth


SUBSCRIBERS = 10


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        load_workers: workers on each of the nodes that load the server, one run each.
        seconds: length of a measurement with real processes.
        turns: of a measurement that is made both ways.
        nodes: of the workers that wait, eight on each.
        lookaheads: of theirs.
        simulated: numbers of workers in virtual time.
        iterations: of each of them.
        failures: of them.
        periods: of which the messages are counted.
    """

    load_workers: Sequence[int] = (1, 8, 64)
    seconds: float = 10.0
    turns: int = 5
    nodes: int = 8
    lookaheads: Sequence[int] = (0, 1, 16)
    simulated: Sequence[int] = (10, 100, 1000, 10_000)
    iterations: int = 192
    failures: int = 5
    periods: Sequence[int] = (16, 64, 256, 1024)


QUICK = Size((32,), 3.0, 3, lookaheads=(0, 1), simulated=(10, 100, 1000), iterations=128, failures=3, periods=(16, 64))
SMOKE = Size((4,), 0.5, 1, 1, lookaheads=(0, 1), simulated=(10, 40), iterations=128, failures=2, periods=(16,))


def measure(part: str, size: Size) -> Iterator[Result]:
    """Yield the results of one part as they are there."""
    if part == "requests":
        for workers in size.load_workers:
            yield measure_requests(workers, size.seconds)
    elif part == "events":
        yield measure_beside(max(size.load_workers), size.seconds, size.turns, subscribers=SUBSCRIBERS)
    elif part == "standbys":
        yield measure_beside(max(size.load_workers), size.seconds, size.turns)
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
    parser.add_argument("--quick", action="store_true", help="shorter, and with up to 1,000 simulated workers")
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
        print(f"\n{table(found[part][0].columns, [result.cells() for result in found[part]])}", flush=True)
    rows = [{"part": part, **asdict(result)} for part, of_part in found.items() for result in of_part]
    write_json(options.json, machine, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
