"""lsgd compare: what the folders of two runs say beside each other."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from tests import golden


def folder(path: Path, period: int, losses: list[float | None], step_s: float) -> Path:
    path.mkdir()
    count, seconds = 8 * len(losses), step_s * len(losses)
    members = [{"worker": "node0/worker0"}, {"worker": "node0/worker1"}]
    result = {"run": path.name, "state": "finished", "count": count, "seconds": seconds, "members": members}
    (path / "result.json").write_text(json.dumps(result | {"rounds_global": len(losses), "participation": 0.5}))
    about = {"scope": "global", "node": -1, "worker": ""}
    rounds = [
        {
            "run": path.name,
            "round": n,
            "count": 8 * n,
            "seconds": step_s * n,
            "losses": {"node0/worker0": loss},
            **about,
        }
        for n, loss in enumerate(losses, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rounds))
    (path / "plan.toml").write_text(f'seconds = 0.0\n\n[algorithm]\nname = "local"\nperiod = {period}\n')
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    fast = folder(tmp_path / "fast", 8, [4.0, 3.0, 2.0, 1.0], 1.0)
    slow = folder(tmp_path / "slow", 64, [None, 2.0, 1.5, 1.0, 0.5, 0.25], 3.0)
    return [str(fast), str(slow)]


def test_two_runs_are_compared_at_the_same_iterations_and_times(runs, tmp_path) -> None:
    done = CliRunner().invoke(main, ["compare", *runs, "-o", str(tmp_path / "both.png")])
    assert done.exit_code == 0, done.output
    rows = {" ".join(cells[:-2]): cells[-2:] for line in done.output.splitlines() if len(cells := line.split()) > 2}
    assert rows["algorithm.period"] == ["8", "64"] and "algorithm.name" not in rows
    assert rows["iterations"] == ["32", "48"] and rows["iterations a second"] == ["8", "2.67"]
    assert rows["loss after 16 iterations"] == ["3", "2"] and rows["loss after 8 iterations"] == ["4", "-"]
    assert rows["loss after 4.0s"] == ["1", "-"]
    assert next(cells for name, cells in rows.items() if name.startswith(golden.text("compare.time_to_loss")))[
        1
    ].startswith("12")
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_a_folder_without_a_run_and_a_single_one_are_refused(runs, tmp_path) -> None:
    done = CliRunner().invoke(main, ["compare", runs[0], str(tmp_path)])
    assert golden.text("compare.no_result", path=tmp_path) in done.output
    assert golden.text("compare.two_runs") in CliRunner().invoke(main, ["compare", runs[0]]).output
