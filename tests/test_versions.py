"""What is counted of the tests that ran with the oldest and the newest versions, and of a newcomer's first steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import first_steps
from benchmarks.report.about import write_json
from benchmarks.versions import LANES, ROOT, Ran, others

THREE = """
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_cannot_begin(broken): pass
"""


def test_a_lane_is_counted_from_what_pytest_reports(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(THREE)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_three.py"]
    subprocess.run(command, cwd=tmp_path, env=os.environ, check=False, capture_output=True)
    ran = Ran("oldest", "3.11.7", {})
    ran.add("fast", report)
    assert (ran.lanes, ran.passed, ran.failed, ran.skipped) == (["fast"], 1, 2, 1)
    assert ran.failures == ["test_three::test_fails", "test_three::test_cannot_begin"]


def test_what_ran_earlier_with_other_versions_stays_in_the_file(tmp_path: Path) -> None:
    old = [Ran("oldest", "3.11.7", {}, passed=1, date="2026-01-01"), Ran("newest", "3.12.1", {}, passed=2)]
    write_json(tmp_path / "versions.json", {}, old)
    again = Ran("newest", "3.12.1", {}, passed=3)
    assert others(tmp_path / "versions.json", [again]) == old[:1]
    assert others(None, [again]) == others(tmp_path / "none.json", [again]) == []


def test_the_files_of_each_lane_are_there() -> None:
    files = [name for arguments in LANES.values() for name in arguments if name.startswith("tests/")]
    assert len(files) == 8 and [name for name in files if not (ROOT / name).exists()] == []


def test_the_first_step_is_the_first_round_with_iterations(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert not first_steps._steps(metrics)
    metrics.write_text(json.dumps({"count": 0}) + "\n")
    assert not first_steps._steps(metrics)
    with metrics.open("a") as file:
        file.write(json.dumps({"count": 2})[:-1])  # half a line
        file.flush()
        assert not first_steps._steps(metrics)
        file.write("}\n")
    assert first_steps._steps(metrics) == 2
