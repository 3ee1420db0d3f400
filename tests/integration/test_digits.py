"""The example on one machine: the exchange makes the average of the workers good, and nothing else does."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .running import FORKS, lost

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/digits.py"

NO_EXCHANGE = """
iterations = 320

[algorithm]
name = "leader"
period = 1000000
local_period = 1000000
pull_global = 0.0
pull_local = 0.0
proximal_global = 0.0
proximal_local = 0.0
"""


def train(plan: Path, run_dir: Path, script: Path = EXAMPLE, workers: int = 2, **settings: str) -> str:
    """Train an example on this machine and return what it showed."""
    options = ["--node", "0", "--port", "0", "--workers", str(workers), "--device", "cpu", "--plan", plan]
    launch = [sys.executable, "-m", "lsgd.client", "launch", *options, "--run-dir", run_dir]
    command = [*launch, "--", sys.executable, script]
    done = FORKS.popen(command, cwd=run_dir.parent, env={**os.environ, **settings})
    output, _ = done.communicate()
    assert done.returncode == 0, output
    return output


def result_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text()) | json.loads((run_dir / "accuracy.json").read_text())


def test_the_example_shows_its_progress_every_five_seconds(report, monkeypatch, capsys) -> None:
    now_s = [100.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    progress = report.Progress(SimpleNamespace(rank=0, progress=0.25))
    for now_s[0] in (104.0, 105.0, 106.0):
        progress.show(torch.tensor(0.5))
    assert capsys.readouterr().out == " 25%, loss 0.5000, 5 s\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_leader_sgd_reaches_the_accuracy_that_no_exchange_does_not(digits, report, tmp_path: Path) -> None:
    plan = tmp_path / "no_exchange.toml"
    plan.write_text(NO_EXCHANGE)
    plan_of_example = EXAMPLE.with_suffix(".toml")
    settings = {"LSGD_ALGORITHM": "leader", "LSGD_ITERATIONS": "320", "LSGD_PERIOD": "16", "DRAWS": "1"}
    output = train(plan_of_example, tmp_path / "exchange", **settings)
    train(plan, tmp_path / "none", workers=4)

    result, alone = result_of(tmp_path / "exchange"), result_of(tmp_path / "none")
    assert result["test_accuracy"] >= 0.97
    assert alone["test_accuracy"] < 0.90  # 0.36 to 0.50 in four trainings; with three workers once 0.94
    assert alone["leader_accuracy"] >= 0.95  # each of them has learned; only their average has not
    assert result["relative_distance_before_last_average"] < alone["relative_distance_before_last_average"]

    runs = ((result, 320, 2, tmp_path / "exchange"), (alone, 320, 4, tmp_path / "none"))
    for run, iterations, workers, folder in runs:
        taken_off = lost((folder / "global.log").read_text())
        assert run["count"] == sum(member["done"] for member in run["members"]) - taken_off == iterations
        assert (len(run["members"]), run["nodes"], run["rounds_local"]) == (workers, 1, 0)
    # One when the generation begins, one for each 16 iterations of a worker, and the last one.
    assert 320 // 32 <= result["rounds_global"] <= 320 // 32 + 3
    assert alone["rounds_global"] == 2
    assert sum(member["times_leader"] for member in result["members"]) == result["rounds_global"]

    assert "of the average" in output
    files = {path.name for path in (tmp_path / "exchange").iterdir()}
    assert {"result.json", "accuracy.json", "model.safetensors", "curve.png", "plan.toml", "node0-worker0.log"} <= files
    model = digits.network()
    model.load_state_dict(load_file(tmp_path / "exchange" / "model.safetensors"))
    assert report.accuracy(model, digits.datasets()[1]) == result["test_accuracy"]


@pytest.mark.slow
def test_the_plain_script_with_its_few_lines_trains_and_saves(digits, report, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("iterations = 800\n")
    train(plan, tmp_path / "run", ROOT / "examples/plain_lsgd.py")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model.load_state_dict(state)
    assert report.accuracy(torch.nn.Sequential(torch.nn.Flatten(), model), digits.datasets()[1]) > 0.95
    nbytes = sum(x.nbytes for x in state.values())
    assert (tmp_path / "model.pt").stat().st_size < nbytes + 10_000  # each value once, whatever buffer it is a view of
