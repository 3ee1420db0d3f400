"""Who this worker is: our own variables before torchrun's before Slurm's."""

import os
import subprocess
import sys

import pytest
import torch

from lsgd import __version__
from lsgd.client.control.identity import device, ends_others, gpu_name, identify, versions
from lsgd.errors import ConfigError, RunOverError
from tests import golden

OURS, TORCHRUN, SLURM = {"LSGD_LOCAL_RANK": "1"}, {"LOCAL_RANK": "2"}, {"SLURM_LOCALID": "3"}


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, as far as counting goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("environ", "index"),
    [
        ({}, 0),
        (SLURM, 3),
        (SLURM | TORCHRUN, 2),
        (SLURM | TORCHRUN | OURS, 1),
        (SLURM | OURS, 1),
        (TORCHRUN | {"RANK": "9", "GROUP_RANK": "4", "SLURM_PROCID": "8"}, 2),
    ],
)
def test_the_number_on_the_machine(environ, index) -> None:
    assert identify(environ).index == index


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "cuda:0"),
        (TORCHRUN | SLURM, "cuda:0"),
        (SLURM, "cuda:1"),
        (OURS | TORCHRUN, "cuda:1"),
        (OURS | {"LSGD_DEVICE": "cuda:0"}, "cuda:0"),
        (OURS | {"LSGD_DEVICE": "cpu"}, "cpu"),
    ],
)
def test_the_device_on_a_machine_with_gpus(gpus, environ, expected) -> None:
    assert device(environ) == torch.device(expected)


def test_the_device_without_gpus(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device(TORCHRUN) == torch.device("cpu")
    with pytest.raises(ConfigError, match=golden.pattern("identity.no_gpu")):
        device({"LSGD_DEVICE": "cuda:1"})
    assert gpu_name(torch.device("cpu")) == ""


def test_the_local_server_and_the_run_folder(monkeypatch, tmp_path) -> None:
    identity = identify({"LSGD_LOCAL": "ipc:///x", "LSGD_RUN_DIR": str(tmp_path)})
    assert (identity.local_address, identity.run_dir) == ("ipc:///x", tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert identify({}).local_address == "ipc:///run/user/1/lsgd-local.sock"
    assert identify({}).run_dir is None


def test_every_process_has_an_incarnation_of_its_own() -> None:
    assert len({identify({}).incarnation for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"LOCAL_RANK": "one"}, golden.pattern("plan.no_integer", setting="LOCAL_RANK = 'one'")),
        ({"LSGD_LOCAL_RANK": "-1"}, "LSGD_LOCAL_RANK = '-1'"),
        ({"LSGD_DEVICE": "gpu"}, golden.pattern("identity.no_device")),
        ({"LSGD_LOCALRANK": "1"}, "LSGD_LOCALRANK is unknown.*LSGD_LOCAL_RANK"),
    ],
)
def test_a_wrong_variable_is_named(environ, message) -> None:
    with pytest.raises(ConfigError, match=message):
        device(environ)
        identify(environ)


def test_versions_are_those_that_are_installed() -> None:
    ours = versions()
    assert ours.keys() == {"lsgd", "torch", "cuda", "nccl"}
    assert ours["lsgd"] == __version__
    assert torch.__version__.startswith(ours["torch"]) and "+" not in ours["torch"]
    assert ours["cuda"] == (torch.version.cuda or "")


@pytest.mark.parametrize(
    ("environ", "ends"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, True),
        ({"SLURM_STEP_ID": "0"}, True),
        ({"SLURM_STEP_ID": "0", "LSGD_NODE": "1"}, False),  # by a launcher in a job
    ],
)
def test_who_comes_too_late_does_not_make_torchrun_end_its_neighbors(environ, ends) -> None:
    assert ends_others(environ) is ends
    late = RunOverError("the run is over", in_order=ends)
    assert late.code == late.exit_code == (0 if ends else 69)
    assert RunOverError.exit_code == 69


SPAWNS = """
import multiprocessing
from lsgd.client.control.identity import identify
print("worker", identify().index, flush=True)
if multiprocessing.parent_process() is None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
"""


def test_a_process_that_only_imports_the_script_is_no_worker(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout == "worker 0\n"
    assert golden.text("identity.imports_script") in done.stderr
