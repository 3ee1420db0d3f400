"""What other distributions register: read from their metadata, and what is wrong with it is said and left out."""

import sys

import pytest

from lsgd.registry import Registry, entry_points
from lsgd.settings import AlgorithmSettings
from tests import golden

MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from lsgd.settings import AlgorithmSettings

@dataclass(frozen=True)
class Good(AlgorithmSettings):
    name: ClassVar[str] = "good"

class Leader(Good):
    name = "leader"
"""
ENTRIES = """[lsgd.algorithms]
good = thirdparty:Good
other = thirdparty:Good
leader = thirdparty:Leader
missing = thirdparty:Missing
nothing = no_such_module_anywhere:Good
number = math:pi
"""


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """With a distribution on the path whose entry points are mostly wrong."""
    (tmp_path / "thirdparty.py").write_text(MODULE)
    info = tmp_path / "third_party-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points.cache_clear()
    yield Registry("lsgd.algorithms", AlgorithmSettings, "algorithm")
    sys.modules.pop("thirdparty", None)
    entry_points.cache_clear()


def test_a_good_one_is_there_with_what_pip_installs(registry):
    assert registry["good"].__name__ == "Good" and len(registry) == 11
    assert registry.requirement("good") == "third-party==1.2"
    assert registry.requirement("leader") == registry.requirement("nobody") == ""
    assert registry.versions() == {"third-party": "1.2"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("other", golden.text("plan.name_taken")),
        ("missing", "AttributeError: "),
        ("nothing", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("number", golden.text("plan.no_settings")),
    ],
)
def test_a_bad_one_is_left_out_and_says_why(registry, caplog, name, problem):
    assert name not in registry
    assert golden.text("plan.skipped", name=f"{name!r}", problem=problem) in caplog.text
    assert registry.unknown(name).startswith(golden.text("plan.not_loaded", name=f"{name!r}", problem=problem))


def test_nobody_takes_the_name_of_one_of_ours(registry):
    assert registry["leader"].__module__ == "lsgd.algorithms.leader"


def test_an_unknown_name_gets_the_nearest_and_all(registry):
    assert registry.unknown("godo") == (golden.text("plan.unknown_algorithm"))
