"""Tests with the oldest and the newest versions that pyproject.toml allows: ``python -m benchmarks.versions``.

For each Python (``--pythons``) and each end, uv installs lsgd with the libraries of its integrations into
build/versions, and pytest runs there, lane by lane (``--lanes``): the tests of each library, and ``fast``, those of the
first lane that depend on torch.
Only what lsgd itself requires is old or new; what these packages require in turn is the newest that they allow, and the
programs for the tests are those of constraints.txt. What ran with which versions goes to a file (``--json``), and from
there into README's table (``python -m benchmarks.tables``). It is run once for each release; what the file has of other
Pythons and ends stays in it, so they may run one by one.

The newest torch, and old ones, come with CUDA's libraries, some gigabytes for each environment.
``UV_TORCH_BACKEND=cpu`` before the command takes the builds for CPUs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from benchmarks.report.about import about, argument_parser, heading, write_json

ROOT = Path(__file__).parents[1]
MADE = ROOT / "build" / "versions"
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
LIBRARIES = ("accelerate", "lightning", "ray", "transformers")
TOOLS = ("coverage", "greenlet", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
LANES = {
    **{name: (f"tests/integration/test_{name}.py",) for name in LIBRARIES},
    "fast": ("-m", "not (slow or alone)", "tests/lsgd", "tests/client", "tests/kernels", "tests/integrations"),
}
"""What pytest runs."""
TOLD = ("torch", "numpy", *LIBRARIES)
"""Packages whose versions are written down."""


@dataclass
class Ran:
    """What came of the tests of one environment."""

    which: str
    python: str
    versions: dict[str, str]
    lanes: list[str] = field(default_factory=list)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    date: str = field(default_factory=lambda: date.today().isoformat())
    failures: list[str] = field(default_factory=list)

    def add(self, lane: str, report: Path) -> None:
        """Count the tests of a lane, from its report of pytest's."""
        self.lanes.append(lane)
        for case in ET.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                self.failed += 1
                self.failures.append(f"{case.get('classname', '')}::{case.get('name', '')}")
            elif "skipped" in kinds:
                self.skipped += 1
            else:
                self.passed += 1


def install(python: str, which: str) -> Path:
    """Install lsgd and its libraries with the oldest or the newest versions, and return that environment's Python.

    Raises:
        subprocess.CalledProcessError: uv has no such versions, for the reason that it printed.
    """
    uv = [sys.executable, "-m", "uv"]
    home = MADE / f"{which}-{_release(python)}"
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([*uv, "venv", "--quiet", "--python", python, home], check=True)
    made = str(home / "bin" / "python")
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))
    tools = [f"{name}=={pins[name]}" for name in TOOLS]
    wanted = [f".[examples,{','.join(LIBRARIES)}]", *tools]
    command = [*uv, "pip", "install", "--quiet", "--python", made, "--resolution", RESOLUTIONS[which]]
    subprocess.run([*command, "--editable", *wanted], check=True, cwd=ROOT)
    return Path(made)


def _release(python: str) -> str:
    """Return the version of a Python."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def versions_of(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of these packages in an environment."""
    code = "import sys, importlib.metadata as m\nfor name in sys.argv[1:]: print(m.version(name))"
    done = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def run(python: Path, which: str, lanes: Sequence[str], jobs: int) -> Iterator[Ran]:
    """Run these lanes, and yield what has come of them after each."""
    ran = Ran(which, _release(str(python)), versions_of(python, TOLD))
    print(f"\n{which}: Python {ran.python}, {_listed(ran.versions)}", flush=True)
    # Another version may warn of what comes; that is no failure of this one.
    common = ["-q", "-p", "no:cacheprovider", "--override-ini=filterwarnings=default", f"--numprocesses={jobs}"]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    for lane in lanes:
        begun = time.monotonic()
        report = python.parents[1] / f"{lane}.xml"
        command = [str(python), "-m", "pytest", *common, "--dist=loadfile", f"--junitxml={report}", *LANES[lane]]
        subprocess.run(command, cwd=ROOT, env=environ)
        ran.add(lane, report)
        ran.seconds += round(time.monotonic() - begun)
        yield ran


def others(path: Path | None, results: Sequence[Ran]) -> list[Ran]:
    """Return what a file has of other Pythons and ends than these."""
    rows = json.loads(path.read_text())["results"] if path is not None and path.exists() else []
    here = {(ran.which, ran.python) for ran in results}
    return [ran for ran in (Ran(**row) for row in rows) if (ran.which, ran.python) not in here]


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def summary_of(row: Mapping[str, object]) -> str:
    """Return how many passed, failed and were skipped."""
    return f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"


def main() -> int:
    """Test with each Python at each end."""
    parser = argument_parser("benchmarks.versions", __doc__)
    parser.add_argument("--ends", nargs="+", choices=RESOLUTIONS, default=list(RESOLUTIONS), help="both unless given")
    parser.add_argument("--pythons", nargs="+", default=[sys.executable], help="this one unless given")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES), help="what runs; all unless given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tests at a time")
    parser.add_argument("--json", type=Path, help="write what ran to this file")
    options = parser.parse_args()
    machine = about("benchmarks.versions")
    print(heading(machine), flush=True)
    results: list[Ran] = []
    for which in options.ends:
        for python in options.pythons:
            before = list(results)
            for ran in run(install(python, which), which, options.lanes, options.jobs):
                results = [*before, ran]
                write_json(options.json, machine, [*others(options.json, results), *results])
    for ran in results:
        print(f"{ran.which}, Python {ran.python}, torch {ran.versions['torch']}: {summary_of(vars(ran))}")
        print("".join(f"    failed: {name}\n" for name in ran.failures), end="")
    return 1 if any(ran.failed for ran in results) else 0


if __name__ == "__main__":
    sys.exit(main())
