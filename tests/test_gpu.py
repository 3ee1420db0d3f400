"""scripts/gpu.sh: its Python on a bare machine, what becomes of each case, and all of it in small without a GPU."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu import environment, gpt, gpt_worker, tables
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.cases import Case, Done, Finding, NotHereError, Part, Setup, carry_out, judged
from benchmarks.gpu.gpt_training import Meter, parser
from benchmarks.gpu.gpt_worker import Profile
from benchmarks.testbed.launch import RunFailedError

from .integration.running import FORKS, LIGHT
from .speed import scaled

ROOT = Path(__file__).parents[1]
CHOSEN = "tests marked|over a copy|`local`$|profiled|`local`.* 1gbit|Gloo, 1gbit|over Gloo, in"
"""Cases of each kind in all parts; all ten algorithms would take minutes."""


def carried_out(*cases: Case, device: str = "cuda", limit_s: float = 100.0) -> tuple[list[tuple[str, str, str]], str]:
    """Return what, how and why of each finding, and the log."""
    done: list[Done] = []
    told: list[str] = []
    carry_out(Part(1, "a part", limit_s, cases), Setup(device, Path()), done.append, told.append)
    return [(each.finding.what, each.finding.result, each.finding.why) for each in done], "\n".join(told)


class TestCases:
    def test_a_failure_keeps_no_other_case_from_running(self):
        def fail(error: Exception) -> Case:
            def run(left_s: float) -> list[Finding]:
                raise error

            return Case("fails", run)

        found, log = carried_out(
            fail(RunFailedError("it failed:\nthe story\nits last line\n")),
            fail(ZeroDivisionError("as asked for")),
            fail(NotHereError("no such program")),
            Case("is well", lambda left_s: [judged("is well", "0.9", {"speed": 0.9}, "speed", 0.8)]),
            Case("is slow", lambda left_s: [judged("is slow", "0.7", {"speed": 0.7}, "speed", 0.8)]),
        )
        assert found == [
            ("fails", "failed", "its last line"),
            ("fails", "failed", "ZeroDivisionError: as asked for"),
            ("fails", "not run", "no such program"),
            ("is well", "passed", ""),
            ("is slow", "failed", "0.7 is less than 0.8"),
        ]
        assert "the story" in log and "Traceback" in log and "no such program" not in log

    def test_without_a_gpu_or_time_a_case_does_not_begin(self):
        def run(left_s: float) -> list[Finding]:
            raise AssertionError

        assert carried_out(Case("a kernel", run, needs_gpu=True), device="cpu") == (
            [("a kernel", "needs a GPU", "")],
            "",
        )
        assert carried_out(Case("a kernel", run), limit_s=0.0)[0] == [
            ("a kernel", "failed", "the 0 s of its part were over before")
        ]

    def test_a_gpu_is_needed_by_a_line_of_each_part_in_small_and_by_no_line_of_a_gpu_s(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        for make in PARTS.values():
            small, whole = make(Setup("cpu", Path())), make(Setup("cuda", Path()))
            assert any(case.needs_gpu for case in small.cases) or small.number == 4
            assert len({case.what for case in whole.cases}) == len(whole.cases)
        whats = [case.what for case in PARTS[3](Setup("cuda", Path())).cases]
        assert sum(what.endswith("`") for what in whats) == 10
        assert any("gloo" in what for what in whats), "two processes on one GPU have no NCCL"

    def test_muon_is_not_tried_with_a_torch_that_has_none(self, monkeypatch, tmp_path):
        monkeypatch.delattr(torch.optim, "Muon")
        setup = Setup("cpu", tmp_path)
        ((_, result, why),), _ = carried_out(*(c for c in PARTS[3](setup).cases if c.what.endswith("Muon")))
        assert result == "not run" and "has no Muon" in why

    def test_each_method_has_each_link_of_gpt_for_itself(self, monkeypatch):
        monkeypatch.setattr(gpt, "_links", lambda: (gpt.LINKS_TRIED, ""))
        whats = [case.what for case in PARTS[4](Setup("cuda", Path())).cases]
        methods = ("`local` in 2 bits with delay", "`leader` in 8 bits with delay", "DistributedDataParallel over Gloo")
        assert whats[-6:] == [f"{method}, {link}" for link in gpt.LINKS_TRIED for method in methods]


ROWS = [
    {"part": 1, "what": "tests", "result": "passed", "measured": "9 tests", "wanted": "", "why": "", "seconds": 3.2},
    {
        "part": 2,
        "what": "speed",
        "result": "failed",
        "measured": "0.5",
        "wanted": "≥ 0.9",
        "why": "a|b",
        "seconds": 0.0,
    },
    {"part": 2, "what": "more", "result": "needs a GPU", "measured": "", "wanted": "", "why": "", "seconds": 0.0},
]
FOUND = {"date": "2026-12-24", "versions": {"python": "3.12.3", "torch": "2.11.0"}, "results": ROWS}


class TestTables:
    def test_a_part_has_its_lines_without_its_number(self):
        assert tables.table_of(ROWS, 2).splitlines() == [
            "| what | result | measured | wanted | seconds |",
            "|---|---|---|---|---:|",
            "| speed | **failed**: a\\|b | 0.5 | ≥ 0.9 |  |",
            "| more | **needs a GPU** |  |  |  |",
        ]
        assert tables.table_of(ROWS).splitlines()[2] == "| 1 | tests | passed | 9 tests |  | 3 |"
        assert tables.summary_of(ROWS) == "1 passed, 1 failed, 1 need a GPU"

    def test_readme_says_what_ran_and_that_nothing_ran_on_a_gpu(self):
        row = {"which": "oldest", "python": "3.11.2", "versions": {"torch": "2.6.0", "ray": "2.60.0"}}
        row |= {"lanes": ["ray", "fast"], "passed": 50, "failed": 1, "skipped": 2, "date": "2026-12-25"}
        versions = {"date": "2026-12-26", "results": [row]}
        on_cpu = tables.support_of({**FOUND, "gpu": ""}, versions)
        assert "| the oldest that `pyproject.toml` allows: Python 3.11.2, torch 2.6.0, ray 2.60.0 | " in on_cpu
        assert "tests of ray, fast: 50 passed, 1 failed, 2 skipped on 2026-12-25" in on_cpu
        assert "untested on real GPUs" in on_cpu and "torch 2.11.0, CPU: the same script in small" in on_cpu
        on_gpu = tables.support_of({**FOUND, "gpu": "NVIDIA H100"}, versions)
        assert "untested on real" not in on_gpu and "torch 2.11.0, NVIDIA H100: [scripts/gpu.sh]" in on_gpu
        assert "[1 passed, 1 failed, 1 need a GPU](benchmarks/results/gpu.md) on 2026-12-24" in on_gpu


def test_a_worker_of_gpt_is_measured_from_its_first_step_whatever_came_before(tmp_path):
    given = parser().parse_args(["--size=small", "--steps=3", "--warm-up=2", f"--notes={tmp_path}"])
    (tmp_path / "go").touch()
    meter = Meter(given, 0, 1, torch.device("cpu"))
    assert [meter.step_begins() for _ in range(4)] == [False, False, False, True]
    assert meter.all_have_measured()


def test_the_profile_counts_what_waits_in_steps_without_a_round(monkeypatch):
    """With a look at an element, which waits for a GPU, in the place of CUDA's calls."""
    monkeypatch.setattr(gpt_worker, "WAITING", {"aten::_local_scalar_dense"})
    rounds, step, x = 0, 0, torch.ones(3)
    profiled = Profile(torch.device("cpu"), lambda: rounds)
    while not profiled.step_begins():
        if step in (2, 5):
            rounds += 1
            x[0].item()
        if step in (3, 9):
            x[1].item()
        step += 1
    x[2].item()
    assert profiled.found() == {"steps": 10, "waiting": {"aten::_local_scalar_dense": 2}}
    assert DeviceType.CPU.name == "CPU"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_in_small_all_parts_run_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(tmp_path), "--only", CHOSEN]
    done = FORKS.popen(command, cwd=ROOT, env={**os.environ, **LIGHT, "OMP_NUM_THREADS": "1"})
    output, _ = done.communicate(scaled(380))
    found = json.loads((tmp_path / "gpu.json").read_text())
    results = {row["what"]: row["result"] for row in found["results"]}
    assert done.returncode == 0, output + (tmp_path / "gpu.log").read_text()
    assert {row["part"] for row in found["results"]} == {1, 2, 3, 4, 5}
    assert results["the tests marked gpu"] == "needs a GPU"
    assert results["`local`"] == results["the same over Gloo, in NCCL's place"] == "passed"
    assert (found["gpu"], found["device"]) == ("", "cpu")
    assert tables.table_of(found["results"]) in output
    assert tables.table_of(found["results"]) in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_all_parts_need_only_the_packages_that_are_brought():
    extras = environment.PROJECT["optional-dependencies"].values()
    brought = {environment.name_of(text) for text in environment.requirements()}
    lacking = {environment.name_of(text) for extra in extras for text in extra} - brought
    missing = [module for module, names in packages_distributions().items() if lacking.issuperset(names)]
    programs = ("__main__", "digits_worker", "gpt_worker", "gpt_baseline")
    modules = ", ".join(f"benchmarks.gpu.{name}" for name in programs)
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import tests.conftest, {modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestEnvironment:
    """benchmarks/gpu/environment.py and scripts/gpu.sh, in a checkout whose lsgd needs next to nothing."""

    @pytest.fixture
    def checkout(self, tmp_path) -> Path:
        root = tmp_path / "my checkout"
        (root / "scripts").mkdir(parents=True)
        package = root / "benchmarks" / "gpu"
        package.mkdir(parents=True)
        for name in ("gpu.sh", "environment.sh"):
            shutil.copy(ROOT / "scripts" / name, root / "scripts")
        shutil.copy(ROOT / "benchmarks" / "gpu" / "environment.py", package)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(
            "import sys, importlib.metadata as m, torch, probe_of_gpu_sh as p\n"
            "print(sys.argv[1:], m.version('lsgd'), p.__file__, torch.__version__, sep='\\n')\n"
        )
        (root / "pyproject.toml").write_text(
            '[project]\nname = "lsgd"\nversion = "9.9"\n'
            'dependencies = ["probe-of-gpu-sh>=2.1", "torch>=2.6"]\noptional-dependencies = {dev = [], examples = []}\n'
        )
        return root

    @staticmethod
    def wheels(folder: Path, version: str) -> Path:
        """Return a folder with a wheel that wants torch."""
        folder.mkdir()
        about = f"probe_of_gpu_sh-{version}.dist-info"
        with zipfile.ZipFile(folder / f"probe_of_gpu_sh-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("probe_of_gpu_sh.py", "")
            head = f"Metadata-Version: 2.1\nName: probe-of-gpu-sh\nVersion: {version}\nRequires-Dist: torch>=2\n"
            wheel.writestr(f"{about}/METADATA", head)
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
        return folder

    @staticmethod
    def run(root: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["/bin/bash", str(root / "scripts" / "gpu.sh"), *map(str, arguments)]
        environ = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": "", **variables}
        return subprocess.run(command, cwd=root.parent, env=environ, capture_output=True, text=True)

    @pytest.mark.slow
    def test_what_is_missing_comes_from_wheels_and_torch_stays(self, checkout, tmp_path):
        done = self.run(checkout, self.wheels(tmp_path / "whls", "2.3"), "--device", "cpu", "--parts", "5")
        assert done.returncode == 0, done.stderr
        arguments, lsgd, probe, version = done.stdout.splitlines()
        assert (arguments, lsgd, version) == ("['--device', 'cpu', '--parts', '5']", "9.9", torch.__version__)
        assert Path(probe).is_relative_to(checkout / "build" / "gpu" / "python")
        assert "for lsgd, probe-of-gpu-sh>=2.1" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (("--device", "cpu"), "lacks probe-of-gpu-sh. Give a folder of their wheels"),
            pytest.param((), "has no CuPy", marks=pytest.mark.skipif(bool(find_spec("cupy")), reason="CuPy is here")),
            (("nowhere", "--device=cpu"), "there is no folder nowhere"),
            (("--download",), "usage: gpu.sh --download"),
        ],
    )
    def test_what_is_missing_is_said(self, checkout, arguments, reason):
        done = self.run(checkout, *arguments)
        assert done.returncode == 1 and reason in done.stderr, done.stderr
        assert done.stdout == ""

    def test_a_folder_without_what_is_missing(self, checkout, tmp_path):
        done = self.run(checkout, self.wheels(tmp_path / "whls", "2.0"), "--device", "cpu")
        assert done.returncode == 1 and "pip cannot install that" in done.stderr, done.stderr

    def test_help_needs_nothing(self, checkout):
        done = self.run(checkout, "--help", PYTHON="/bin/false")
        assert done.returncode == 0 and "--parts 1 3" in done.stdout and "#" not in done.stdout

    def test_the_environment_that_train_sh_has_made_is_taken(self, checkout):
        python = checkout / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "train.sh made this" >&2\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        done = self.run(checkout, "--device", "cpu", PYTHON="")
        assert "train.sh made this" in done.stderr and "lacks probe-of-gpu-sh" in done.stderr

    def test_another_python(self, checkout):
        done = self.run(checkout, PYTHON="/bin/false")
        assert done.returncode == 1 and "/bin/false is no Python of 3.11 or newer" in done.stderr
