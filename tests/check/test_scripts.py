"""Scripts with one mistake each, in real runs: the check names it. And right ones, of which it says nothing."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lsgd.check import runs
from lsgd.check.verdicts import Status, Verdict

from .scripts import ALL, MORE, RIGHT, WRONG, check, point_of, points_of, wrong_lines

AT_ONCE = 4
"""How many are checked side by side: most of the time each waits for a start or for an end."""

FIRST = ("unsharded", "ema_left_in", "all_save")
"""Those that the first lane checks, by one run each."""

SLOW = [script for script in WRONG if script.stem not in (*FIRST, "crash_on_restart")]
"""The others, but for one that has a test of its own."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Future[dict[int, Verdict]]]:
    """Return what is said of each script: of a wrong one on its own point, of a right one on all or on some."""
    folder = tmp_path_factory.mktemp("scripts")
    pool = ThreadPoolExecutor(AT_ONCE)
    return {each: pool.submit(check, each, folder / each.stem, points_of(each)) for each in (*SLOW, *RIGHT)}


def names_the_mistake(script: Path, verdict: Verdict) -> None:
    """Assert that a verdict names the mistake of a wrong script, and its line."""
    assert verdict.status is Status.WRONG, verdict
    lines = wrong_lines(script)
    assert {finding.where for finding in verdict.findings} <= (lines or {""}), (verdict.findings, lines)


def test_there_are_enough_of_them() -> None:
    assert len(WRONG) >= 25 and len(RIGHT) >= 12
    assert {point_of(script) for script in WRONG} == ALL - {9}
    assert set(MORE) <= {script.stem for script in RIGHT}


@pytest.mark.first
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FIRST)
def test_some_of_the_wrong_ones(name, tmp_path) -> None:
    (script,) = (each for each in WRONG if each.stem == name)
    names_the_mistake(script, check(script, tmp_path, {point_of(script)})[point_of(script)])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_crash_at_the_restart_is_said_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "STAND_STILL_S", 1e6)  # the others would stand still until the check loses its patience
    (script,) = (each for each in WRONG if each.stem == "crash_on_restart")
    verdict = check(script, tmp_path, {7})[7]
    names_the_mistake(script, verdict)
    assert "File exists" in verdict.findings[0].what


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", SLOW, ids=lambda path: path.stem)
def test_a_wrong_script_is_named_with_its_line(script, verdicts) -> None:
    names_the_mistake(script, verdicts[script].result()[point_of(script)])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", RIGHT, ids=lambda path: path.stem)
def test_a_right_script_is_right(script, verdicts) -> None:
    said = verdicts[script].result()
    assert [(each.point, each.findings) for each in said.values() if each.findings] == []
    assert [each.point for each in said.values() if each.unjudged] == []
