"""How long a newcomer waits: ``python -m benchmarks.first_steps [--commit COMMIT] [--json FILE]``.

A commit of this checkout is cloned into a new folder, and the example is trained there as README says it, by
``bash scripts/train.sh 0``: first with empty caches of pip and uv, then in a second clone with what the first one has
left in them. Each line that it prints is shown with its second, so that one sees what takes the time.

Processor seconds are those of all processes until then: they tell more than seconds where something else runs, too.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table

ROOT = Path(__file__).parents[1]
FOREIGN = ("PIP_CACHE_DIR", "UV_CACHE_DIR", "PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables of whoever starts this that a newcomer does not have."""
COMMAND = ("bash", "scripts/train.sh", "0")
DEADLINE_S, LOOK_S = 1800.0, 0.05


@dataclass
class Waited:
    """Seconds from the clone on, and processor seconds until the environment was there, and until the first step."""

    caches: str
    environment_s: float = 0.0
    environment_processor_s: float = 0.0
    first_step_s: float = 0.0
    first_step_processor_s: float = 0.0
    end_s: float = 0.0

    def cells(self) -> list[str]:
        """Return a line of the table."""
        return [self.caches, *(f"{x:.0f}" for x in list(asdict(self).values())[1:])]


COLUMNS = (
    *("caches", "s to the environment", "processor s to it", "s to the first step", "processor s to it"),
    "s to the end",
)


def wait(caches: str, cached: Path, folder: Path, commit: str) -> Waited:
    """Clone a commit into the folder, train there, and return how long what took.

    Raises:
        subprocess.CalledProcessError: the training failed, for the reason that it printed.
        subprocess.TimeoutExpired: it took longer than half an hour.
    """
    waited, begun = Waited(caches), time.monotonic()
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    subprocess.run(["git", "-C", folder, "checkout", "--quiet", commit], check=True)
    environ = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environ |= {"XDG_CACHE_HOME": str(cached), "RUN_NAME": "first"}
    metrics = folder / "runs/first/metrics.jsonl"
    with (
        subprocess.Popen(COMMAND, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ)
        unfinished, is_open = b"", True
        while is_open:
            selector.select(LOOK_S)
            now = time.monotonic() - begun
            if now > DEADLINE_S:
                process.terminate()
                raise subprocess.TimeoutExpired(COMMAND, now)
            if not waited.first_step_s and _steps(metrics):
                waited.first_step_s, waited.first_step_processor_s = now, _processor_s(process.pid)
            data = process.stdout.read()
            is_open = data != b""
            *lines, unfinished = (unfinished + (data or b"")).split(b"\n")
            for line in lines:
                if line.startswith(b"[launch]") and not waited.environment_s:
                    waited.environment_s = now
                    waited.environment_processor_s = _processor_s(process.pid)
                print(f"{now:7.1f}  {line.decode(errors='replace')}", flush=True)
        status = process.wait()
    waited.end_s = time.monotonic() - begun
    if status:
        raise subprocess.CalledProcessError(status, COMMAND)
    return waited


def _processor_s(pid: int) -> float:
    """Return the processor seconds of a process, of those below it, and of those below it that have ended."""
    spent = 0.0
    for each in [own := psutil.Process(pid), *own.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            spent += sum(each.cpu_times()[:4])
    return spent


def _steps(metrics: Path) -> int:
    """Return how many steps the first rounds of a run have counted, or 0 before there are any."""
    with metrics.open() if metrics.exists() else open(os.devnull) as file:
        return max((json.loads(line)["count"] for line in file.readlines()[:3] if line.endswith("\n")), default=0)


def main() -> int:
    """Measure both, and print a Markdown table."""
    parser = argument_parser("benchmarks.first_steps", __doc__)
    parser.add_argument("--commit", default="HEAD", help="of this checkout; the last one unless given")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    machine = about("benchmarks.first_steps")
    named = ["git", "-C", str(ROOT), "rev-parse", "--short", options.commit]
    commit = subprocess.run(named, check=True, capture_output=True, text=True).stdout.strip()
    print(heading({**machine, "commit": commit}), flush=True)
    with tempfile.TemporaryDirectory() as work:
        results = [wait(caches, Path(work, "caches"), Path(work, caches), commit) for caches in ("empty", "filled")]
    print(f"\n{table(COLUMNS, [result.cells() for result in results])}")
    write_json(options.json, machine, results, commit=commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
