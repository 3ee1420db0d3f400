"""Parts 1 and 2: are the kernels right, and how fast are they?"""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from xml.etree import ElementTree

from benchmarks.gpu.cases import Case, Finding, NotHereError, Part, Setup, in_folder, judged
from benchmarks.testbed.launch import ROOT, await_all, start

PROCESSES = 4
SOURCES = ("tests/kernels/test_few_bits_cuda.py", "tests/kernels/test_minmax8.py")
"""Tests of all kernels."""

SANITIZED = "(kernels_make or payload_is or decoding_is or reduction_is or too_big) and not torch-on-gpu"
"""Those of them that use every kernel; under a sanitizer, all would take too long."""

SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
"""Tools of compute-sanitizer, with options: memcheck also counts calls that fail, by which torch asks what there is."""

ERRORS_EXIT = 86
"""What a sanitizer ends with that has found something."""

LEAST = {"nearest": 0.92, "stochastic": 0.85, "dequantize": 0.92, "reduce 8 members": 0.85}
"""Of a copy kernel's speed, on a GPU (blocks of 2048)."""

MEASURED = re.compile(r"(?:cuda|lsgd)(?:, blocks of 2048)?: (?P<minmax8>.+)|(?P<other>(?:levels[12]|minmax4|topk): .+)")


def tests_part(setup: Setup) -> Part:
    """Return part 1."""
    marked, host = "the tests marked gpu", "the same source, built for this CPU"
    cases = [Case(marked, partial(_test, setup, marked, [*_marked(), "-m", "gpu", *_in_parallel()]), needs_gpu=True)]
    if setup.small:
        cases.append(Case(host, partial(_test, setup, host, [*SOURCES, "-k", "host"])))
    for tool in SANITIZERS:
        cases.append(Case(_sanitized(tool), partial(_sanitize, setup, tool), needs_gpu=True))
    return Part(1, "kernels beside the references, bit by bit", 110.0, cases, at_once=1 if setup.small else 3)


def speed_part(setup: Setup) -> Part:
    """Return part 2."""
    cases = [Case("the kernels over a copy", partial(_measure, setup))]
    if setup.small:
        cases.append(Case("the CUDA kernels over a copy kernel", partial(_measure, setup), needs_gpu=True))
    return Part(2, "speed of the kernels", 40.0, cases)


def _marked() -> list[str]:
    """Return the files with tests that need a GPU; to import all tests takes longer, and more packages."""
    files = [*(ROOT / "tests").rglob("test_*.py")]
    marked = [path for path in files if path.parent.name == "kernels" or "pytest.mark.gpu" in path.read_text()]
    return sorted(str(path.relative_to(ROOT)) for path in marked)


def _in_parallel() -> list[str]:
    return ["-n", str(PROCESSES)] if find_spec("xdist") else []


def _test(
    setup: Setup, what: str, arguments: Sequence[str], left_s: float, before: Sequence[str] = ()
) -> list[Finding]:
    """Run tests, perhaps below another program; all must pass, and there must be some."""
    with in_folder(setup, what) as folder:
        report = folder / "tests.xml"
        lenient = ["-o", "filterwarnings=default"]  # other releases of CuPy and numpy may warn
        options = ["-q", *lenient, "-p", "no:cacheprovider", f"--junitxml={report}"]
        await_all([start([*before, sys.executable, "-m", "pytest", *arguments, *options])], "pytest", left_s)
        suite = ElementTree.parse(report).getroot()[0]
        skipped = int(suite.attrib["skipped"])
        run = int(suite.attrib["tests"]) - skipped
        words = f"{run} tests" + (f", {skipped} skipped" if skipped else "")
        return [judged(what, words, {"tests": run, "skipped": skipped}, "tests", 1)]


def _sanitized(tool: str) -> str:
    return f"compute-sanitizer's {tool} over every kernel"


def _sanitize(setup: Setup, tool: str, left_s: float) -> list[Finding]:
    """Run tests below compute-sanitizer."""
    paths = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    program = shutil.which("compute-sanitizer", path=paths)
    if program is None:
        raise NotHereError("compute-sanitizer is not on the PATH, nor in /usr/local/cuda/bin")
    before = [program, "--tool", tool, *SANITIZERS[tool], "--error-exitcode", str(ERRORS_EXIT)]
    tests = [*SOURCES, "-m", "gpu", "-k", SANITIZED, "--hypothesis-profile=few", "--timeout=0"]
    return _test(setup, _sanitized(tool), tests, left_s, [*before, "--target-processes", "all"])


def _measure(setup: Setup, left_s: float) -> list[Finding]:
    """Run benchmarks.kernels, and judge what has a target."""
    with in_folder(setup, "kernels") as folder:
        path = folder / "kernels.json"
        sizes = "1" if setup.small else "256"
        options = ["--device", setup.device, "--quick", "--sizes", sizes, "--repeats", "15", "--json", str(path)]
        await_all([start([sys.executable, "-m", "benchmarks.kernels", *options])], "benchmarks.kernels", left_s)
        return [found for row in json.loads(path.read_text())["results"] if (found := _speed(row, setup))]


def _speed(row: dict[str, float], setup: Setup) -> Finding | None:
    """Return the finding of one of our kernels; None for what they are compared with."""
    if (match := MEASURED.fullmatch(str(row["operation"]))) is None:
        return None
    name = match["minmax8"] or match["other"]
    figures = {key: row[key] for key in ("ratio_to_copy", "bytes_per_element", "gigabytes_per_s")}
    speed = f"{row['ratio_to_copy']:.2f} of a copy, {row['bytes_per_element']:.2f} bytes per element"
    least = None if setup.small else LEAST.get(name)
    what = f"minmax8: {name}" if match["minmax8"] else name
    return judged(what, speed, figures, "ratio_to_copy", least)
