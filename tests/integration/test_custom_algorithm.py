"""A package of one file that brings an algorithm of its own, installed by pip, without a network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lsgd.protocol.events import WorkerChanged
from tests import golden

from .running import LIGHT, SCRIPTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "custom_algorithm"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed package; pip works on a copy, for it leaves files in what it builds from."""
    folder = tmp_path_factory.mktemp("custom")
    source = shutil.copytree(PACKAGE, folder / "source")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def with_path(site: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join([str(site), LIGHT["PYTHONPATH"], str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }


def lsgd(site: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "lsgd.client", *arguments]
    done = subprocess.run(command, env=with_path(site), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_one_file():
    assert sorted(path.name for path in PACKAGE.iterdir() if path.suffix != ".pyc" and path.is_file()) == [
        "lsgd_soft.py",
        "pyproject.toml",
    ]


def test_it_is_listed_with_its_settings_and_bytes(installed):
    listed = lsgd(installed, "algorithms", "--parameters", "1000000", "--workers", "2")
    (line,) = (line for line in listed.splitlines() if line.startswith("soft "))
    assert line.split()[1] == "0.250" and line.endswith("models move toward their mean every period")
    assert "softness" in lsgd(installed, "algorithms", "soft")
    shown = lsgd(installed, "config", "show", "--algorithm", "soft", "--softness", "0.2")
    assert ["algorithm.softness", "0.2", "flag", "--softness"] in [line.split() for line in shown.splitlines()]


def test_settings_of_it_load_no_torch(installed):
    code = (
        "import sys; from lsgd.plan.plan import assemble; t = {'algorithm': {'name': 'soft'}};"
        "print(assemble(t, origin='').plan.packages(), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=with_path(installed), capture_output=True, text=True, check=True)
    assert done.stdout == "['lsgd-soft==0.1.0'] False\n"


@pytest.mark.slow
def test_it_trains_through_the_servers(installed, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('iterations = 200\n[algorithm]\nname = "soft"\nperiod = 4\n')
    lsgd(
        *(installed, "launch", "--workers", "2", "--device", "cpu", "--port", "0"),
        *("--plan", str(plan), "--run-dir", str(tmp_path / "run")),
        *("--", sys.executable, str(SCRIPTS / "train.py")),
    )
    results = [json.loads((tmp_path / "run" / f"node0-worker{i}.json").read_text()) for i in (0, 1)]
    assert results[0]["model"] == results[1]["model"] and results[0]["status"]["algorithm"] == "soft"
    assert results[0]["status"]["rounds_global"] > 20
    assert results[0]["loss"] < 4, "it predicts a sum of eight normal numbers, whose variance is 8"


def test_a_worker_without_it_is_refused_with_the_line_that_mends_it(installed, cluster):
    """It leaves at once: the servers wait for another one."""
    path = with_path(installed)["PYTHONPATH"]
    arguments = ["--algorithm", "soft", "--workers", "1", "--iterations", "8"]
    server = cluster.fresh_server("global", "--global", "--listen", "tcp://127.0.0.1:0", *arguments, PYTHONPATH=path)
    cluster.address = server.says(r"global server on (\S+),")[1]
    cluster.start_local()
    worker = cluster.worker("train")
    assert worker.wait() != 0
    assert golden.text("plan.cannot_take_part") in worker.output
    assert golden.text("plan.soft_unknown") in worker.output
    assert worker.output.rstrip().endswith(golden.text("plan.install_soft"))
    cluster.tells(WorkerChanged, worker="node0/worker0", state="left", code="failed")
