"""Forty programs: ``python -m benchmarks.programs [--only NAME ...] [--list]``.

Small programs in the shape of those that people run, with the real libraries (benchmarks/programs/scripts). Each runs
alone, without lsgd's lines, and with two workers that make half of its steps each, through ``lsgd check``. All run in
an environment of their own, which the first call makes in .programs/ from requirements.txt, one after the other, on
data that packages ship or that the program makes. Nothing is downloaded while they run.

Results are written as they come, a line of JSON for each run. What has a result for the same file and the same versions
of its packages is not run again. At the end the table in docs/guides/programs.md is written from them.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.programs.environment import ROOT, make, versions
from benchmarks.programs.program import Program, programs
from benchmarks.programs.runs import ALL, PARTS, starts_itself
from benchmarks.programs.table import write
from benchmarks.report.about import argument_parser
from benchmarks.testbed.launch import RunFailedError

RESULTS = ROOT / "benchmarks" / "results" / "programs.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(options: argparse.Namespace, chosen: Sequence[Program], python: str) -> int:
    """Make the runs that have no result yet; return how many have failed."""
    failed, commit = 0, _commit()
    rows = read(options.json)
    for program, part in itertools.product(chosen, options.parts):
        left_out = starts_itself(program) if part == "check" else part == "two" and not program.says("Launch")
        if program.says("Unable") or left_out:
            continue
        found = versions(python, ["torch", *program.needs])
        key = {"program": program.name, "part": part, "script": program.digest, "versions": found}
        if missing := [name for name in program.needs if name not in found]:
            print(f"{program.name}: not installed: {', '.join(missing)}", flush=True)
            continue
        if not options.again and any(all(row[name] == value for name, value in key.items()) for row in rows):
            continue
        with ExitStack() as stack:
            if options.keep is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lsgd-programs-")))
            else:
                folder = Path(tempfile.mkdtemp(prefix=f"{program.name}-{part}-", dir=options.keep))
            try:
                result = PARTS[part](program, python, folder, *([options.points] if part == "check" else []))
            except RunFailedError as error:
                print(f"{program.name}, {part}: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
        row = {**key, **result, "date": date.today().isoformat(), "lsgd": commit}
        rows = [each for each in rows if (each["program"], each["part"]) != (program.name, part)] + [row]
        unfinished = options.json.with_name(options.json.name + ".unfinished")
        unfinished.write_text("".join(f"{json.dumps(each)}\n" for each in sorted(rows, key=_order)))
        unfinished.replace(options.json)
        print(f"{program.name}, {part}: {json.dumps(result)}", flush=True)
    return failed


def _order(row: dict[str, Any]) -> tuple[str, int]:
    return row["program"], list(PARTS).index(row["part"])


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def options_of() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argument_parser("benchmarks.programs", __doc__)
    parser.add_argument("--list", action="store_true", help="print the programs, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in programs()])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to run of each")
    parser.add_argument(
        "--points", default=ALL, help="that lsgd check judges; 2,3,4,5,8,9 takes one run instead of six"
    )
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the runs write, in folders in this one")
    parser.add_argument("--python", help="the interpreter of an environment that is there, instead of .programs/")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results, a line each")
    return parser.parse_args()


def main() -> int:
    """Run them, and write the table."""
    options = options_of()
    chosen = [each for each in programs() if options.only is None or each.name in options.only]
    if options.list:
        for each in chosen:
            print(f"{each.name:28} {each.title}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started ends, too
    failed = run(options, chosen, options.python or make())
    if options.json == RESULTS:
        write(read(RESULTS))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
