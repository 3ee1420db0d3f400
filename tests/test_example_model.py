"""The examples: data and network of digits.py, and the two plain scripts with their diff."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from .integration.running import LIGHT

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


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


def test_the_diff_in_the_docs_is_the_real_one() -> None:
    names = ("examples/plain.py", "examples/plain_lsgd.py")
    plain, ours = ((ROOT / name).read_text().splitlines() for name in names)
    real = list(difflib.unified_diff(plain, ours, *names, lineterm=""))
    (shown,) = re.findall(r"```diff\n(.*?)\n```", (ROOT / "docs/start/examples.md").read_text(), re.DOTALL)
    assert shown.splitlines() == real


@pytest.mark.slow
def test_the_plain_script_learns(digits, tmp_path: Path) -> None:
    environ = {**os.environ, **LIGHT, "OMP_NUM_THREADS": "1"}
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
