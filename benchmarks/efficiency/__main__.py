"""Step efficiency under faults: ``python -m benchmarks.efficiency``. Linux.

Two nodes of two workers each are started by ``lsgd launch`` on this machine. A step is a timed sleep, so two cores
suffice. Every so many seconds a worker, the global server, or a node with all that is on it is killed (SIGKILL); node 0
has the global server. Launchers start processes again as they do for everybody, and a killed launcher is started again
after a second. Or node 1 is frozen for 8 s (SIGSTOP).

Efficiency: iterations that the servers counted, over those of an undisturbed training of the same time. Participation:
members of a global round over all workers, the mean over the rounds.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.efficiency.run import KINDS, Measured, Run
from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from benchmarks.testbed.launch import RunFailedError

COLUMNS = ("killed", "every s", "kills", "iterations", "efficiency", "participation")


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.efficiency", __doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each training (default: 600)")
    parser.add_argument("--every-s", type=float, nargs="+", default=[30.0, 20.0, 10.0], help="time between two kills")
    parser.add_argument("--kill", nargs="+", choices=KINDS, default=KINDS, help="what is struck")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of a worker (default: 100)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--folder", type=Path, help="a new folder for logs, kept (default: a temporary one)")
    return parser.parse_args()


def row(what: str, every_s: float, measured: Measured, calm: Measured) -> list[str]:
    """Return a row of the table."""
    rates = measured.iterations / measured.seconds, calm.iterations / calm.seconds
    figures = [str(measured.kills), f"{measured.iterations:,}", f"{rates[0] / rates[1]:.3f}"]
    return [what or "nothing", f"{every_s:g}" if what else "", *figures, f"{measured.participation:.3f}"]


def main() -> int:
    """Measure, and print the table."""
    options = options_of()
    machine = about("benchmarks.efficiency")
    print(heading(machine), flush=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="lsgd-efficiency-"))
    cases = [("", 0.0), *((what, every_s) for what in options.kill for every_s in options.every_s)]
    measured: list[Measured] = []
    rows: list[list[str]] = []
    try:
        for what, every_s in cases:
            with Run(folder / f"{what.replace(' ', '') or 'undisturbed'}-{every_s:g}", options.step_ms / 1e3) as run:
                measured.append(run.measure(options.seconds, what, every_s))
            rows.append(row(what, every_s, measured[-1], measured[0]))
            print(f"{dict(zip(COLUMNS, rows[-1], strict=True))}: {measured[-1].end}", flush=True)
    except RunFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(COLUMNS, rows)}", flush=True)
    write_json(options.json, machine, measured, cases=cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
