"""A long training in which everything goes wrong: ``sudo python -m benchmarks.soak --minutes 30``. Linux, root.

Three nodes of the testbed (benchmarks/testbed), two workers each, are started by ``lsgd launch`` with keys, and learn
handwritten digits. First undisturbed and short, then for as long as is asked for, with faults that follow from a seed:
processes are killed or frozen, links are cut both ways, one way, or between one pair of nodes, disks are full, and a
stranger sends junk to every port. A burst has one to three faults; the next one comes when all workers train again, and
some seconds later. At the end a worker is killed while all of them save the result.

Promised is: the exact count of iterations; one model on all workers, with the work of all iterations in it; an accuracy
within a point of the undisturbed run's; nobody gives up; and no process, file or descriptor is left. Where one of these
is broken the story is printed: the faults, and the last lines of each process. The exit code is 1 then.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.report.about import about, argument_parser, heading
from benchmarks.soak.run import Settings, train
from benchmarks.soak.schedule import WEIGHTS, chosen
from benchmarks.soak.verdict import Record, fault_table, seen, story, verdict
from benchmarks.testbed import TestbedError

UNDISTURBED_MINUTES = 1.0


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of training with faults (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument(
        "--faults",
        nargs="+",
        default=["all"],
        help=f"all, none, kinds (kill, freeze, cut, fill, junk), or some of: {', '.join(WEIGHTS)}",
    )
    parser.add_argument("--nodes", type=int, default=3, help="2 to 9")
    parser.add_argument("--workers", type=int, default=2, help="on each node")
    parser.add_argument("--sleep-ms", type=float, default=10.0, help="of a worker after each step")
    parser.add_argument("--accuracy", type=float, help="of an undisturbed run, instead of making one first")
    parser.add_argument("--json", type=Path, help="write what was seen to this file")
    parser.add_argument("--folder", type=Path, help="a new folder for logs, kept (default: a temporary one)")
    options = parser.parse_args()
    try:
        options.faults = chosen(options.faults)
    except ValueError as error:
        parser.error(str(error))
    if not 2 <= options.nodes <= 9:
        parser.error("--nodes must be 2 to 9")
    if options.folder and options.folder.exists():
        parser.error(f"{options.folder} exists already")
    return options


def soak(options: argparse.Namespace, folder: Path) -> tuple[Record, list[str], list[str], float | None]:
    """Train undisturbed, then with faults; return the record, the broken promises, the story's lines and the accuracy.

    Raises:
        TestbedError: the testbed or a command in it failed.
    """
    events: list[str] = []

    def say(line: str) -> None:
        events.append(line)
        print(line, flush=True)

    settings = Settings(
        options.nodes, options.workers, options.minutes, options.seed, options.faults, options.sleep_ms / 1e3
    )
    accuracy = options.accuracy
    if accuracy is None and settings.faults:
        print("\nUndisturbed:", flush=True)
        calm = replace(settings, faults=(), minutes=min(settings.minutes, UNDISTURBED_MINUTES))
        record = train(calm, folder / "undisturbed", say)
        if broken := verdict(record, None):
            return record, [f"undisturbed: {promise}" for promise in broken], events, None
        accuracy = record.accuracy
        print(f"accuracy {accuracy:.4f}\n\nWith faults:", flush=True)
        events.clear()
    record = train(settings, folder / "disturbed", say)
    return record, verdict(record, accuracy), events, accuracy


def report(record: Record, broken: list[str], events: list[str], undisturbed: float | None) -> str:
    """Return what is printed at the end."""
    lines = ["", fault_table(record.outcomes), ""]
    lines += [f"{name}: {count}" for name, count in seen(record).items()]
    accuracy = "unknown" if record.accuracy is None else f"{record.accuracy:.4f}"
    beside = "" if undisturbed is None else f" ({undisturbed:.4f} undisturbed)"
    age = 0.0 if record.age is None else record.age
    lines += [
        f"iterations: {record.count} counted, {record.limit} wanted, {record.made} made",
        f"workers that came to the end: {len(record.results)} of {record.workers}, "
        f"with {len({r['digest'] for r in record.results})} model(s)",
        f"accuracy: {accuracy}{beside}; age of the model: {age:.0f} of {record.limit / record.workers:.0f} steps",
        f"left: {len(record.left)} processes or files",
        "",
    ]
    if broken:
        lines += ["BROKEN PROMISES:", *(f"- {promise}" for promise in broken), "", story(record, events)]
    else:
        lines.append("every promise was kept")
    return "\n".join(lines)


def main() -> int:
    """Soak, print what was seen, and return 0 if every promise was kept."""
    options = options_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine = about("benchmarks.soak")
    print(heading(machine), flush=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="lsgd-soak-"))
    try:
        record, broken, events, undisturbed = soak(options, folder)
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    print(report(record, broken, events, undisturbed), flush=True)
    if options.json:
        results = {
            "broken": broken,
            "undisturbed_accuracy": undisturbed,
            **record.as_json(),
            "events": events,
        }
        options.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
