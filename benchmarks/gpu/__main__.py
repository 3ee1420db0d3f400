"""All that lsgd does on a GPU, in one command: ``bash scripts/gpu.sh [WHEELS] [--device cpu]``.

Five parts run one after the other: the kernels' tests, the kernels' speed, every algorithm with two workers on the GPU,
a GPT-2 between two hosts, NCCL. Each has a limit of its time, and a failure keeps nothing else from running. At the end
there is one table, in gpu.md, and one JSON file, in a folder (``--out``); gpu.log beside them has what failed programs
said. The exit code is 0 if nothing failed: not all that was needed may have been there, and the table says so.

``--device cpu`` runs the same in small; what cannot run without a GPU is in the table as "needs a GPU".
``--keep`` puts the results in the documentation: benchmarks/results/gpu.json, the page gpu.md there, and README's table
of what is supported.
"""

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import digits, gpt, kernels, nccl, tables
from benchmarks.gpu.cases import Case, Done, Part, Setup, carry_out
from benchmarks.report.about import about, argument_parser, write_json
from benchmarks.tables import RESULTS, write_pages
from benchmarks.testbed.launch import ROOT
from lsgd.client.control.identity import versions

PARTS: Mapping[int, Callable[[Setup], Part]] = {
    1: kernels.tests_part,
    2: kernels.speed_part,
    3: digits.part,
    4: gpt.part,
    5: nccl.part,
}
ALL_S = 465.0
"""All parts together, on a GPU; a part that is late leaves later ones KEPT_S each."""

KEPT_S = 25.0
INTERRUPTED = 130
SLOWER = 10.0
"""So many times as long may it take on a CPU."""


class Run:
    """Carries out parts, says how it goes, and keeps what was found after each case."""

    def __init__(self, setup: Setup, out: Path) -> None:
        self._setup, self._out = setup, out
        self._machine = machine(setup)
        print(tables.machine_of(self._machine), flush=True)
        self._began_s = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        self._log = out / "gpu.log"
        self._log.write_text("")

    def carry_out(self, parts: Sequence[Part]) -> None:
        """Run all parts within the time of all."""
        times = SLOWER if self._setup.small else 1.0
        for index, part in enumerate(parts):
            later_s = KEPT_S * (len(parts) - index - 1)
            left_s = (ALL_S - later_s) * times - (time.monotonic() - self._began_s)
            limited = replace(part, limit_s=round(max(0.0, min(part.limit_s * times, left_s))))
            print(f"\npart {part.number}, {part.name}: at most {limited.limit_s:.0f} s", flush=True)
            began_s = time.monotonic()
            carry_out(limited, self._setup, self._note, self._tell)
            print(f"  part {part.number} took {time.monotonic() - began_s:.0f} s", flush=True)

    def end(self) -> int:
        """Print the table and what came of all, and return the exit code."""
        came = f"{tables.summary_of(self._rows)}; it took {self._seconds():.0f} s"
        files = f"{self._out}: gpu.md has this table, gpu.json the figures, gpu.log what failed programs said"
        print(f"\n{tables.table_of(self._rows)}\n\n{came}\n{files}", flush=True)
        return int(any(row["result"] == "failed" for row in self._rows))

    def _note(self, done: Done) -> None:
        row = {"part": done.part, **asdict(done.finding), "seconds": round(done.seconds, 1)}
        self._rows.append(row)
        told = [str(row[name]) for name in ("measured", "why") if row[name]]
        print(f"  {row['result']:11}  {row['what']}" + (f": {'; '.join(told)}" if told else ""), flush=True)
        self._keep()

    def _tell(self, story: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{story}\n")

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s

    def _keep(self) -> None:
        found = {**self._machine, "seconds": round(self._seconds(), 1)}
        write_json(self._out / "gpu.json", found, self._rows)
        text = f"{tables.about_of({**found, 'results': self._rows})}\n\n{tables.table_of(self._rows)}\n"
        (self._out / "gpu.md").write_text(f"# lsgd on {found['gpu'] or 'a CPU, in small'}\n\n{text}")


def machine(setup: Setup) -> dict[str, Any]:
    """Return what runs it, and when."""
    found = about("benchmarks.gpu")
    command = found.pop("command").replace("python -m benchmarks.gpu", "bash scripts/gpu.sh")
    own = {name: found.pop(name) for name in ("python", "torch")}
    gpu = "" if setup.small else torch.cuda.get_device_name(0)
    others = {name: release for name, release in versions().items() if release and name not in own}
    return {**found, "command": command, "device": setup.device, "gpu": gpu, "versions": {**own, **others}}


def main() -> int:
    """Run all parts, or some."""
    parser = argument_parser("benchmarks.gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", type=int, nargs="+", choices=PARTS, help="only these")
    parser.add_argument("--only", type=re.compile, help="only what this regular expression matches, of those")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder for table, figures and log")
    parser.add_argument("--keep", action="store_true", help="put the results in the documentation")
    options = parser.parse_args()
    if options.keep and (options.parts or options.only):
        parser.error("the documentation has whole runs: --keep goes without --parts and --only")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} finds no GPU here (nvidia-smi lists those that the driver finds); "
            "--device cpu runs what needs none, in small",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lsgd-gpu-") as folder:
        setup = Setup(options.device, Path(folder))
        run = Run(setup, options.out)
        try:
            run.carry_out([_only(PARTS[number](setup), options.only) for number in options.parts or PARTS])
        except KeyboardInterrupt:
            run.end()
            return INTERRUPTED
        code = run.end()
    if options.keep:
        shutil.copy(options.out / "gpu.json", RESULTS)
        write_pages()
    return code


def _only(part: Part, chosen: re.Pattern[str] | None) -> Part:
    def fits(case: Case) -> bool:
        return chosen is None or chosen.search(case.what) is not None

    return replace(part, cases=[case for case in part.cases if fits(case)])


if __name__ == "__main__":
    sys.exit(main())
