"""The scripts: an environment made once, by one process at a time, and train.sh around the launcher.

The environments made here are real but small: lsgd is a package without dependencies in them.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .integration.running import LIGHT
from .needs import PROGRAMS
from .speed import scaled

ROOT = Path(__file__).parents[1]
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "lsgd"
version = "0.0.1"

[project.optional-dependencies]
dev = []
examples = []
"""
PROBE = """
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
use_environment "$@"
echo "$python"
"""
INSTALLED = """
import os, sysconfig
with open(sysconfig.get_path("purelib") + "/lsgd.pth", "w") as file:
    file.write(os.getcwd())
"""
PIN = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("setuptools=="))


class Checkout:
    """A checkout in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "my checkout"
        self.python = self.root / ".venv" / "bin" / "python"
        (self.root / "lsgd").mkdir(parents=True)
        (self.root / "lsgd" / "__init__.py").write_text("")
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        (self.root / "constraints.txt").write_text(f"{PIN}\n")
        (self.root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "environment.sh", self.root / "scripts")
        (self.root / "scripts" / "probe.sh").write_text(PROBE)

    def start(self, *extras: str, **variables: str) -> subprocess.Popen[str]:
        """Start a script that uses the environment, from another folder."""
        foreign = ("PYTHON", "PYTHONPATH", "VIRTUAL_ENV")
        environ = {name: value for name, value in os.environ.items() if name not in foreign}
        return subprocess.Popen(
            ["/bin/bash", str(self.root / "scripts" / "probe.sh"), *extras],
            cwd="/",
            env={**environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def use(self, *extras: str, **variables: str) -> str:
        """Use the environment and return what was said on the way."""
        out, err = (process := self.start(*extras, **variables)).communicate()
        assert process.returncode == 0, err
        assert out.strip() == str(self.python)
        where = [self.python, "-I", "-c", "import lsgd; print(lsgd.__file__)"]
        found = subprocess.run(where, check=True, capture_output=True, text=True, cwd="/").stdout
        assert found.strip() == str(self.root / "lsgd" / "__init__.py")
        return err

    def refuse(self, *extras: str, **variables: str) -> str:
        """Use the environment in vain and return the reason."""
        out, err = (process := self.start(*extras, **variables)).communicate()
        assert process.returncode == 1 and out == "", (process.returncode, out, err)
        return err


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def until(condition: Callable[[], object], what: str, deadline_s: float = scaled(60.0)) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


class TestEnvironment:
    """scripts/environment.sh."""

    @pytest.fixture
    def installed(self, tmp_path) -> dict[str, str]:
        """Variables with which lsgd is installed without pip, uv and an index."""
        for name, program in {"pip": "", "uv": INSTALLED}.items():
            (tmp_path / "installers" / name).mkdir(parents=True)
            (tmp_path / "installers" / name / "__init__.py").touch()
            (tmp_path / "installers" / name / "__main__.py").write_text(program)
        return {"PYTHONPATH": str(tmp_path / "installers")}

    @pytest.mark.slow
    @pytest.mark.timeout(600)  # pip downloads
    def test_is_made_once_and_follows_its_requirements(self, checkout):
        assert "installing into" in checkout.use("examples")
        assert checkout.use("examples") == ""
        made = (checkout.root / ".venv" / "pyvenv.cfg").stat().st_mtime_ns
        assert "installing into" in checkout.use("dev")
        assert checkout.use("examples") == "" == checkout.use("dev", "examples")
        (checkout.root / "constraints.txt").write_text(f"# another day\n{PIN}\n")
        assert "installing into" in checkout.use("examples")
        assert checkout.use("dev", "examples") == ""
        assert (checkout.root / ".venv" / "pyvenv.cfg").stat().st_mtime_ns == made

    @pytest.mark.slow
    def test_is_made_again_if_its_making_was_interrupted(self, checkout, installed):
        process = checkout.start()
        until(checkout.python.exists, "the environment is begun")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        (checkout.root / ".venv" / "rest").touch()
        assert "installing into" in checkout.use(**installed)
        assert not (checkout.root / ".venv" / "rest").exists()
        assert checkout.use() == ""

    @pytest.mark.slow
    def test_is_made_by_one_process_at_a_time(self, checkout, installed):
        with (checkout.root / ".venv.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = checkout.start(**installed)
            assert "waiting for another process" in process.stderr.readline()
            assert not checkout.python.exists()
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.strip() == str(checkout.python)

    @pytest.mark.slow
    def test_pip_fails(self, checkout, installed):
        """The next call begins anew."""
        reason = checkout.refuse(PIP_NO_INDEX="1")
        assert "pip failed with exit code 1" in reason and "-m pip install setuptools" in reason
        (stamp := checkout.root / ".venv" / "installed").unlink()  # as if made by hand, which stays
        (checkout.root / ".venv" / "own").touch()
        assert "pip failed with exit code 1" in checkout.refuse(PIP_NO_INDEX="1")
        assert not stamp.exists()
        assert "installing into" in checkout.use(**installed)
        assert (checkout.root / ".venv" / "own").exists()
        assert checkout.use() == ""

    @pytest.mark.parametrize(("driver", "torch"), [(False, True), (True, True), (False, False)])
    def test_the_cpu_build_of_torch_where_there_is_no_driver(self, checkout, tmp_path, driver, torch):
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in ("dirname", "grep"):
            (programs / name).symlink_to(shutil.which(name))
        for name in ["python", *["nvidia-smi"] * driver]:
            (programs / name).write_text('#!/bin/bash\necho "$@"; exit 1\n')
            (programs / name).chmod(0o755)
        (checkout.root / "constraints.txt").write_text("torch==2.13.0\n" if torch else "")
        script = 'source "$1/scripts/environment.sh"; cd "$1"; python=python install_cpu_torch'
        done = subprocess.run(
            ["/bin/bash", "-euc", script, "probe", str(checkout.root)],
            env={"PATH": str(programs)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr  # pip has failed: the install that follows takes what it finds
        wanted = "-m pip install torch==2.13.0 --no-deps --index-url https://download.pytorch.org/whl/cpu"
        assert (wanted in done.stderr) == (torch and not driver)

    def test_what_a_run_imports_is_compiled_once_whoever_forbids_it(self, checkout, tmp_path):
        """And what is not installed is left out."""
        (tmp_path / "called").touch()
        (tmp_path / "python").write_text(
            f'#!/bin/bash\necho "${{PYTHONDONTWRITEBYTECODE-unset}} $*" >> {tmp_path}/called\nexit 1\n'
        )
        (tmp_path / "python").chmod(0o755)
        script = 'source "$1/scripts/environment.sh"; python=$2 compile_imported'
        command = ["/bin/bash", "-euc", script, "probe", str(checkout.root), str(tmp_path / "python")]
        subprocess.run(command, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, check=True)
        called = (tmp_path / "called").read_text().splitlines()
        assert len(called) == 3 and all(line.startswith("unset -P -c import ") for line in called)
        assert any("torch" in line for line in called)

    @pytest.mark.parametrize(("extras", "said"), [("dev,ray", "--no-deps mosaicml-streaming==0.13.0\n"), ("ray", "")])
    def test_what_forbids_our_releases_comes_without_its_requirements(self, checkout, extras, said):
        (checkout.root / "constraints.txt").write_text("mosaicml-streaming==0.13.0\n")
        script = 'source "$1/scripts/environment.sh"; cd "$1"; install_packages() { echo "$@"; }; extras=$2; '
        command = ["/bin/bash", "-euc", f"{script} install_streaming", "probe", str(checkout.root), extras]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == said

    def test_existing_environment_is_used_as_it_is(self, checkout):
        out, err = (process := checkout.start("dev", PYTHON=sys.executable)).communicate()
        assert (process.returncode, out.strip(), err) == (0, sys.executable, "")
        assert not checkout.python.exists()

    def test_existing_environment_without_lsgd(self, checkout, tmp_path):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
        reason = checkout.refuse(PYTHON=str(tmp_path / "other" / "bin" / "python"))
        assert "cannot import lsgd" in reason and "pip install -e" in reason
        assert "is not a Python" in checkout.refuse(PYTHON="/no/such/python")

    def test_python_too_old(self, checkout, tmp_path):
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in ("dirname", "basename"):
            (programs / name).symlink_to(shutil.which(name))
        (programs / "python3").write_text('#!/bin/bash\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n')
        (programs / "python3").chmod(0o755)
        reason = checkout.refuse(PATH=str(programs))
        assert "no Python 3.11 or newer" in reason and "Python 3.9.2" in reason

    def test_python_without_venv(self, checkout, tmp_path):
        (tmp_path / "ensurepip.py").write_text("raise ImportError('ensurepip is not available')\n")
        reason = checkout.refuse(PYTHONPATH=str(tmp_path))
        assert "cannot make environments (ensurepip is not available)" in reason
        assert f"apt install python3.{sys.version_info.minor}-venv" in reason


class TestLanes:
    """scripts/test.sh, with a Python that only notes what it is called for."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
        """Run a lane and return its exit status, its output, and what was called; pytest's output is given."""
        root = tmp_path / "checkout"
        shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("lsgd", "tests"):
            (root / name).symlink_to(ROOT / name)

        def run(*arguments: str, said: str = "", **codes: int) -> tuple[int, str, str]:
            cases = "".join(f"{word}) code={code} ;;\n" for word, code in codes.items())
            (tmp_path / "said").write_text(said)
            (tmp_path / "python").write_text(
                f"#!/bin/bash\n[[ $1 == -c && $2 == *executable* ]] && echo $0; [[ $1 != -m ]] && exit 0\n"
                f'echo "$2 ${{*:3}}" >> {tmp_path}/called\ncode=0; case $2 in {cases} esac\n'
                f"[[ $2 == pytest ]] && cat {tmp_path}/said\nexit $code\n"
            )
            (tmp_path / "python").chmod(0o755)
            environ = {**os.environ, "PYTHON": str(tmp_path / "python")}
            command = ["/bin/bash", str(root / "scripts/test.sh"), *arguments]
            done = subprocess.run(command, env=environ, capture_output=True, text=True)
            return done.returncode, done.stdout, (tmp_path / "called").read_text()

        return run

    SAID = "SKIPPED [1] it lacks nft\n===== 1 failed, 20 passed, 3 skipped, 2 errors in 61.20s (0:01:01) =====\n"

    def test_the_first_lane_checks_style_and_types_and_sums_up(self, run):
        code, out, called = run(said=self.SAID)
        assert code == 0 and out.endswith("40 passed, 6 failed, 6 skipped\n") and "    [1] it lacks nft\n" in out
        assert [line.split()[0] for line in sorted(called.splitlines())] == [
            *("coverage", "mypy", "pytest", "pytest", "ruff", "ruff")
        ]
        assert " -m first or not (slow or alone) " in called

    @pytest.mark.parametrize("fails", ["ruff", "mypy", "coverage", "pytest"])
    def test_what_fails_is_said_and_the_rest_is_run(self, run, fails):
        code, out, called = run(said=self.SAID, **{fails: 1})
        assert code == 1 and out.endswith("40 passed, 6 failed, 6 skipped\n")
        assert f"test.sh: {'traced tests' if fails == 'pytest' else fails}" in out
        assert len(called.splitlines()) == 6

    def test_each_test_is_in_one_lane(self, run):
        _, _, called = run("--rest")
        assert " -m slow and not (first or alone) " in called and " -m alone and not first " in called
        assert "mypy" not in called
        code, out, called = run("--all", said=self.SAID)
        assert (code, out.splitlines()[-1]) == (0, "80 passed, 12 failed, 12 skipped")

    def test_arguments_go_to_pytest_alone(self, run):
        assert run("tests/node", "-k", "a b", pytest=5) == (5, "", "pytest tests/node -k a b\n")


@pytest.mark.slow
class TestTrain:
    """scripts/train.sh, with the real launcher, servers and workers."""

    @pytest.fixture
    def train(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
        """Run train.sh from another folder with these arguments and variables."""

        def train(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
            environ = {**os.environ, **LIGHT, "PYTHON": sys.executable, "RUN_NAME": "mine", "DEVICE": "cpu"}
            command = ["/bin/bash", str(ROOT / "scripts" / "train.sh"), *arguments]
            return subprocess.run(command, cwd=tmp_path, env={**environ, **variables}, capture_output=True, text=True)

        return train

    def test_settings_and_command(self, train, tmp_path):
        (tmp_path / "plan.toml").write_text("iterations = 30\n")
        (tmp_path / "my script.py").write_text(
            "import sys, torch\n"
            "from lsgd.client import Worker\n"
            "model = torch.nn.Linear(1, 1)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "data = torch.utils.data.TensorDataset(torch.randn(30, 1))\n"
            "with Worker.join(model, optimizer) as worker:\n"
            "    loader = worker.loader(data, batch_size=2)\n"
            "    while not worker.stopped:\n"
            "        for (x,) in worker.batches(loader):\n"
            "            model(x).square().mean().backward()\n"
            "            optimizer.step()\n"
            "print('trained', worker.world_size, sys.argv[1:])\n"
        )
        command = ("0", "--", "python", "my script.py", "an argument", "--flag")
        store = tmp_path / "a store"
        done = train(*command, NUM_WORKERS="1", PLAN="plan.toml", RESUME="0", STORE=store.as_uri())
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[node0/worker0] trained 1 ['an argument', '--flag']" in done.stdout
        run_dir = tmp_path / "runs" / "mine"  # where the user is, not in the checkout
        assert "iterations = 30" in (run_dir / "plan.toml").read_text()
        assert (run_dir / "node0-worker0.log").exists()
        shutil.rmtree(run_dir)  # another machine
        again = train(*command, NUM_WORKERS="1", RESUME="1", LSGD_ITERATIONS="40", STORE=store.as_uri())
        assert again.returncode == 0, again.stdout + again.stderr
        assert "resumes after 30 iterations" in again.stdout and "; 40 iterations" in again.stdout

    def test_wrong_use(self, train, tmp_path):
        for arguments, variables, reason in [
            (("x",), {}, "not 'x'; usage: train.sh <node_idx>"),
            (("0", "python"), {}, "usage: train.sh <node_idx>"),
            (("0", "--"), {}, "usage: train.sh <node_idx>"),
            ((), {}, "cannot tell which node this is; pass its index"),
            (("1",), {}, "there is no node 1 among 1"),
            (("0",), {"NUM_GROUPS": "2"}, "IP_ADDR="),
            (("0",), {"NUM_GROUPS": "two"}, "'two' is not a valid integer"),
            (("0",), {"NUM_WORKER": "3"}, "the variable NUM_WORKER is unknown; the settings are"),
            (("0",), {"IP_ADDRESS": "10.0.0.1"}, "the variable IP_ADDRESS is unknown"),
            (("0",), {"INSECURE": "maybe"}, "INSECURE is 1 or empty, not 'maybe'"),
        ]:
            done = train(*arguments, **variables)
            assert done.returncode != 0 and reason in done.stderr, (arguments, done.stderr)
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("first", "rest"), [(3, 0), (0, 4), (3, 4), (0, 0)])
def test_continuous_integration_goes_on_without_the_packages(tmp_path, first, rest):
    """A root whose apt-get fails, as without a network, runs all tests; it fails if some of them do."""
    for name in (".ci/run", "scripts/packages.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    lanes = f'echo "lane $*"; [[ $* ]] && exit {rest}; exit {first}\n'
    (tmp_path / "scripts/test.sh").write_text(lanes)
    for name, does in {"apt-get": 'echo "$*" >> called; exit 100', "dpkg": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", tmp_path / ".ci/run"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (first or rest, "lane \nlane --rest\n")
    if os.geteuid() == 0:
        assert (tmp_path / "called").read_text() == "--quiet=2 update\n"
        assert f"the tests that need {' '.join(PROGRAMS)} are skipped" in done.stderr
