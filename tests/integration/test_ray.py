"""Ray Train's workers as workers of a run, on a real Ray cluster of two nodes: on_ray.py has what runs there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import golden

from ..speed import scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Return the folder of all that has run; one cluster for all tests, because its start takes seconds."""
    folder = tmp_path_factory.mktemp("ray")
    own = {"PYTHONPATH": str(ROOT), "LSGD_KEYS": str(folder / "keys"), "RAY_USAGE_STATS_ENABLED": "0"}
    own["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "30"  # how long it waits for a node that is gone
    own["RAY_worker_niceness"] = "0"  # at Ray's 15 a busy machine leaves its workers next to nothing
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "tests.integration.on_ray", str(folder)]
        done = subprocess.run(
            command, env={**os.environ, **own}, stdout=log, stderr=log, cwd=ROOT, timeout=scaled(1700)
        )
    assert done.returncode == 0, (folder / "log").read_text()[-10_000:]
    return folder


def starts(folder: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"starts-{rank}").read_text().splitlines()]


def test_the_example_trains_one_model_and_reports_it(out) -> None:
    assert "accuracy 0.9" in (out / "log").read_text()
    (model,) = out.glob("ray-results/*/checkpoint_*/model.pt")
    (result,) = out.glob("ray-results/*/lsgd/result.json")
    assert model.stat().st_size > 0 and json.loads(result.read_text())["state"] == "finished"


def test_a_killed_worker_is_replaced_alone_and_the_global_server_too(out) -> None:
    folder = out / "kills"
    (survivor,), (before, after) = starts(folder, 0), starts(folder, 1)
    assert survivor["name"] == "node0/worker0" and before["name"] == after["name"] == "node1/worker0"
    assert before["process"] != after["process"] and after["step"] > 0
    assert (folder / "ends-0").read_text() == (folder / "ends-1").read_text()
    assert "continues run" in (out / "log").read_text()


def test_a_worker_killed_after_the_end_takes_no_report_with_it(out) -> None:
    result = json.loads((out / "kills" / "result.json").read_text())
    assert result == {"metrics": {"consensus": True, "workers": 2}, "saved": "of the first worker"}
    assert golden.text("integrations.too_late") in (out / "log").read_text()


def test_a_lost_node_leaves_fewer_workers_that_resume(out) -> None:
    folder = out / "shrinks"
    *_, last = starts(folder, 0)
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"] == {"consensus": True, "workers": 1} and last["step"] > 0


def test_mistakes_are_refused_in_words(out) -> None:
    said = "LsgdConfig: argument perod: the algorithm local has no setting 'perod'; did you mean 'period'?"
    assert (out / "setting").read_text() == said
    assert golden.text("integrations.report_once") in (out / "kills" / "early").read_text()
