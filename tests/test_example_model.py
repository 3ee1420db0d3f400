"""The examples: data, network, picture and table of digits.py, and the two plain scripts with their diff."""

import difflib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def election(round: int, scope: str, node: int, worker: str, count: int) -> dict[str, Any]:
    losses = {"node0/worker0": 1 / (count + 1), "node0/worker1": 2 / (count + 1)}
    return {
        "round": round,
        "scope": scope,
        "node": node,
        "worker": worker,
        "count": count,
        "seconds": count / 100,
        "losses": losses,
    }


@pytest.fixture
def status() -> dict[str, Any]:
    """State of a run of two workers: one led its first half, the other its second."""
    members = [
        {
            "worker": f"node0/worker{i}",
            "node": 0,
            "rank": i,
            "done": 500 - 100 * i,
            "loss": 0.25,
            "times_leader": i,
        }
        for i in range(2)
    ]
    leaders = [
        election(1, "global", -1, "node0/worker0", 0),
        election(2, "global", -1, "node0/worker1", 450),
    ]
    return {
        "run": "digits",
        "count": 900,
        "iterations": 900,
        "seconds": 12.5,
        "rounds_local": 0,
        "rounds_global": 2,
        "nodes": 1,
        "members": members,
        "leaders": leaders,
        "state": "over",
        "reason": "",
    }


def test_the_split_is_fixed_and_disjoint(digits) -> None:
    train, test = digits.datasets()
    assert (len(train), len(test)) == (1437, 360)
    assert train.tensors[0].shape == (1437, 1, 8, 8)
    again = digits.datasets()
    for one, other in zip((train, test), again, strict=True):
        assert torch.equal(one.tensors[0], other.tensors[0]) and torch.equal(one.tensors[1], other.tensors[1])
    images = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1)
    assert len(images.unique(dim=0)) == 1797  # the data has no image twice, so neither do the two parts


def test_the_network_has_batch_norm_and_ten_convolutions(digits) -> None:
    model = digits.network()
    assert sum(isinstance(layer, nn.Conv2d) for layer in model) == 10
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model) == 10
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_accuracy_is_the_share_classified_right_and_leaves_the_model_in_training(digits, report) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.eye(10)[3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return self.scores.expand(len(x), 10)

    _, test = digits.datasets()
    model = Constant()
    assert report.accuracy(model, test) == int((test.tensors[1] == 3).sum()) / 360
    assert model.training


def test_a_line_that_is_logged_while_the_bar_is_shown_stays_whole(report, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    worker = SimpleNamespace(rank=0, progress=0.5)
    with report.Progress(worker):
        print(line := "lsgd: the checkpoint of 1280 iterations is in runs/a/checkpoints", file=sys.stderr)
    assert line in shown.getvalue()


def test_the_summary_holds_what_a_reader_needs(report, status: dict[str, Any]) -> None:
    result = report.summary(status, 0.99, 0.98, 0.05)
    assert json.loads(json.dumps(result)) == result
    assert result["test_accuracy"] == 0.99 and result["leader_accuracy"] == 0.98
    assert result["iterations"] == sum(result["iterations_per_worker"].values()) == 900
    assert (result["workers"], result["nodes"]) == (2, 1)
    assert (result["rounds_local"], result["rounds_global"]) == (0, 2)
    assert result["relative_distance_before_last_average"] == 0.05
    assert result["leaders"] == status["leaders"]


def test_the_results_are_told_in_a_table_and_two_sentences(report, status: dict[str, Any]) -> None:
    result = report.summary(status, 0.9875, 0.95, None)
    text = io.StringIO()
    Console(file=text, width=80).print(report.table(result))
    cells = [re.split(r"\s*[│┃]\s*", line.strip("│ \n")) for line in text.getvalue().splitlines()]
    assert ["node0/worker0", "500", "0.2500", "0"] in cells
    assert ["node0/worker1", "400", "0.2500", "1"] in cells
    assert report.sentences(result) == (
        "900 iterations in 12.5 s, 0 local and 2 global rounds\n"
        "test accuracy: 0.9875 of the average, 0.9500 of the leader"
    )
    without_leader = report.sentences({**result, "leader_accuracy": None})
    assert without_leader.endswith("0.9875 of the average")


def test_the_picture_shows_who_led_when(chart, status: dict[str, Any], tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    chart.draw(status, tmp_path / "curve.png")
    picture = imread(tmp_path / "curve.png")[:, :, :3]
    rows = {}
    for worker in (0, 1):
        matches = (abs(picture - torch.tensor(to_rgb(chart.COLORS[worker])).numpy()) < 0.01).all(axis=2)
        rows[worker] = matches.sum(axis=1)
    height, width, _ = picture.shape
    in_band = (rows[0] > width * 0.3) & (rows[1] > width * 0.3)  # the bar below: half blue, half orange
    assert in_band.sum() > height * 0.02
    assert rows[0][: height // 2].sum() > 0 < rows[1][: height // 2].sum()  # the curves above


def test_the_picture_of_a_run_without_rounds_is_empty_but_there(chart, status: dict[str, Any], tmp_path: Path) -> None:
    from matplotlib.image import imread

    chart.draw({**status, "count": 0, "leaders": []}, tmp_path / "curve.png")
    assert imread(tmp_path / "curve.png").shape[2] == 4


def test_the_diff_in_the_docs_is_the_real_one() -> None:
    names = ("examples/plain.py", "examples/plain_lsgd.py")
    plain, ours = ((ROOT / name).read_text().splitlines() for name in names)
    real = list(difflib.unified_diff(plain, ours, *names, lineterm=""))
    (shown,) = re.findall(r"```diff\n(.*?)\n```", (ROOT / "docs/examples.md").read_text(), re.DOTALL)
    assert shown.splitlines() == real


@pytest.mark.slow
def test_the_plain_script_learns(digits, tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, EXAMPLES / "plain.py"], cwd=tmp_path, env=environ, check=True)
    assert digits_known(digits, tmp_path / "model.pt") > 0.98


def digits_known(digits: ModuleType, path: Path) -> float:
    """Return the share of all digits that the saved model of the plain scripts knows."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model.load_state_dict(torch.load(path, weights_only=True))
    train, test = digits.datasets()
    images = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1)
    labels = torch.cat([train.tensors[1], test.tensors[1]])
    return float((model(images).argmax(1) == labels).float().mean())
