"""What a run leaves in its folder, and ``lsgd runs``, which lists it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from lsgd.cli.commands import main
from lsgd.protocol.messages import Endpoint
from lsgd.run_folder import claimed, moved
from lsgd.watch import curve, results
from tests import golden

RESULT = {"run": "1", "state": "over", "code": "all_made", "reason": "all 900 iterations are done", "count": 900}
RESULT |= {"algorithm": "leader", "iterations": 900, "rounds_global": 2, "seconds": 75.0, "loss": 0.25, "members": []}


def round_of(number: int, worker: str, count: int, workers: int = 2) -> dict[str, Any]:
    losses = {f"node0/worker{i}": (i + 1) / (count + 1) for i in range(workers)}
    line = {"run": "1", "round": number, "scope": "global", "node": -1, "worker": worker, "count": count}
    return line | {"seconds": 1.0, "losses": losses}


ROUNDS = [round_of(1, "node0/worker0", 0), round_of(2, "node0/worker1", 450)]


def leave(folder: Path, result: dict[str, Any] = RESULT, rounds: list[dict[str, Any]] = ROUNDS) -> Path:
    """Leave in a folder what the global server writes."""
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in rounds))
    return folder


def pixels(path: Path, color: str) -> Any:
    """Return how many pixels of a colour each row of a picture has, as a share of its width."""
    picture = imread(path)[:, :, :3]
    return (abs(picture - to_rgb(color)) < 0.01).all(axis=2).mean(axis=1)


def test_the_picture_shows_the_losses_and_who_led_when(tmp_path: Path) -> None:
    curve.draw(RESULT, ROUNDS, path := tmp_path / "curve.png")
    first, second = (pixels(path, color) for color in curve.COLORS[:2])
    led = (first > 0.3) & (second > 0.3)  # the bar below: half blue, half orange
    assert led.mean() > 0.02
    assert first[: len(first) // 2].any() and second[: len(second) // 2].any()  # the curves above


@pytest.mark.parametrize(
    ("leader", "workers", "colors"),
    [("", 2, curve.COLORS[:2]), ("node0/worker0", 40, (curve.GRAY, curve.BLACK)), ("", 1, curve.COLORS[:1])],
)
def test_the_picture_without_leaders(tmp_path: Path, leader, workers, colors) -> None:
    rounds = [round_of(number, leader, 10 * number, workers) for number in range(5)]
    curve.draw(RESULT, rounds, path := tmp_path / "curve.png")
    for color in colors:
        assert 0 < pixels(path, color).max() < 0.3


def test_a_worker_that_was_away_has_a_gap_and_held_out_losses_a_line(tmp_path: Path) -> None:
    rounds = [round_of(number, "", 100 * number) | {"means": {"val": 0.3, "accuracy": 0.9}} for number in range(50)]
    for line in rounds[15:35]:
        del line["losses"]["node0/worker1"]
    curve.draw(RESULT | {"count": 4900}, rounds, path := tmp_path / "curve.png")
    picture = imread(path)[:480, :, :3]
    columns = [(abs(picture - to_rgb(color)) < 0.01).all(axis=2).any(axis=0) for color in curve.COLORS[:2]]
    here, away = ([each[start : start + 60].any() for start in range(100, 1060, 120)] for each in columns)
    assert all(here) and away == [True, True, True, False, False, False, True, True]
    assert pixels(path, curve.BLACK).max() > 0.4


def test_losses_that_nobody_reported_are_said_in_the_picture(tmp_path: Path) -> None:
    nobody = [line | {"losses": {"node0/worker0": None}} for line in ROUNDS]
    curve.draw(RESULT, nobody, tmp_path / "curve.png")
    assert pixels(tmp_path / "curve.png", "#000000").max() > 0


def test_results_of_stages_are_apart_and_drawn_at_the_end_of_the_launch(tmp_path: Path) -> None:
    leave(folder := tmp_path / "run", RESULT | {"state": "over"})
    results.finish(folder, 0, draws=False)
    results.put_aside(folder, 1)
    assert {path.name for path in folder.iterdir()} == {"stage1"}
    (folder / "metrics.jsonl").write_text((folder / "stage1" / "metrics.jsonl").read_text())
    (folder / "result.json").write_text(json.dumps(RESULT | {"state": "over"}))
    results.finish(folder, 0)
    assert all((folder / part / "curve.png").exists() for part in ("", "stage1"))
    assert results.read(folder / "stage1")["state"] == "finished"
    results.clear(folder, resume=True)
    assert (folder / "stage1").exists()
    results.clear(folder, resume=False)
    assert not list(folder.iterdir())


def test_what_is_made_again_is_drawn_once_and_a_long_run_is_thinned(tmp_path: Path) -> None:
    counts = [0, 10, 20, 30, 10, 20, 40]
    leave(folder := tmp_path / "run", rounds=[round_of(n, "node0/worker0", count) for n, count in enumerate(counts)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"run": "1", "rou')
    assert [each["count"] for each in results.read_rounds(folder / "metrics.jsonl")] == [0, 10, 10, 20, 40]
    many = [round_of(n, "node0/worker0", n) for n in range(2 * results.MAX_POINTS + 1)]
    leave(tmp_path / "long", rounds=many)
    read = results.read_rounds(tmp_path / "long" / "metrics.jsonl")
    assert len(read) <= results.MAX_POINTS and read[-1] == many[-1]
    assert results.read_rounds(tmp_path / "none.jsonl") == []


def test_without_matplotlib_the_rest_is_there_and_one_line_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "lsgd.watch.curve")
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    first, second = results.finish(folder := leave(tmp_path / "run"), 0)
    assert first.startswith(golden.text("results.no_matplotlib"))
    assert first.endswith(" -m pip install matplotlib")
    assert second == (golden.text("results.finished_in", path=folder))
    assert not (folder / "curve.png").exists()
    assert json.loads((folder / "result.json").read_text()) == RESULT | {"state": "finished", "exit_code": 0}


def test_what_jupyter_sets_for_matplotlib_does_not_matter(tmp_path: Path) -> None:
    folder = leave(tmp_path / "run")
    code = "import sys, pathlib; from lsgd.watch.results import finish; print(finish(pathlib.Path(sys.argv[1]), 0))"
    environ = os.environ | {"MPLBACKEND": "module://no.such.backend"}
    command = [sys.executable, "-P", "-c", code, str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "curve.png in" in done.stdout and (folder / "curve.png").exists()


@pytest.mark.parametrize("name", [r"a$\foo$b", os.fsdecode(b"caf\xe9"), "plain"])
def test_the_picture_never_decides_how_a_run_ended(tmp_path: Path, name: str) -> None:
    """Neither the folder's name nor damaged lines cost more than the picture."""
    folder = leave(tmp_path / name)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'5\n[1]\n{"count": 3}\n{"count": null}\nnull\n\xff\xfe\n')
    assert results.finish(folder, 0)[-1].startswith(golden.text("results.finished"))
    assert (folder / "curve.png").exists()
    assert json.loads((folder / "result.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no font"), "ValueError: no font"), (KeyboardInterrupt(), "Ctrl-C came while it was drawn")],
)
def test_a_picture_that_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch, error, said) -> None:
    monkeypatch.setattr(curve, "draw", Mock(side_effect=error))
    first, last = results.finish(leave(tmp_path / "run"), 0)
    assert first == golden.text("results.no_curve", said=said) and last.startswith("finished: ")


def test_results_that_cannot_be_written_are_said(tmp_path) -> None:
    (leave(tmp_path / "run") / "result.json.tmp").symlink_to("/dev/full")
    first, second = results.finish(tmp_path / "run", 1, "failed", "global failed with exit code 2")
    assert first == golden.text("results.not_written", path=tmp_path / "run")
    assert second.startswith(golden.text("results.failed_2"))


def test_an_end_that_the_server_could_not_write_is_said_in_the_last_line_all_the_same(tmp_path) -> None:
    folder = leave(tmp_path / "run")
    older = RESULT | {"state": "waiting", "code": "joining", "reason": "1 of 2 workers have joined", "count": 0}
    (folder / "result.json").write_text(json.dumps(older))
    first, last = results.finish(folder, 0, "", "all 900 iterations are done")
    assert first == golden.text("results.end_not_written", path=folder / "result.json")
    assert last.startswith(golden.text("results.finished"))


@pytest.mark.parametrize(
    ("code", "state"),
    [
        *(("all_made", "finished"), ("ordered", "stopped"), ("rounds_fail.error", "failed")),
        *(("model_lost", "failed"), ("same_batches", "failed")),
    ],
)
def test_a_run_without_a_consensus_has_failed_whoever_started_its_server(tmp_path, code, state) -> None:
    leave(tmp_path / "run", RESULT | {"code": code})
    assert [run["state"] for run in json.loads("".join(listed("--json", str(tmp_path))))] == [state]
    assert results.finish(tmp_path / "run", 0)[-1].startswith(f"{state}: ")


def listed(*arguments: str) -> list[str]:
    done = CliRunner().invoke(main, ["runs", *arguments])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_runs_are_listed_newest_first_with_what_became_of_them(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert listed() == [golden.text("results.no_runs")]
    folder, going = Path("runs"), RESULT | {"state": "running", "count": 12, "iterations": 0, "loss": None}
    long = "a-very-long-name-that-somebody-gave-to-a-run"
    leave(folder / "done", RESULT | {"state": "finished"})
    leave(folder / long, going | {"algorithm": "low_precision_decentralized", "seconds": 7322.0})
    leave(folder / "broken", going | {"state": "failed", "reason": "node0/worker1 failed with exit code 1 " * 3})
    leave(folder / "killed", going)
    leave(folder / "by-hand", going)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "node1.lock").touch()
    os.utime(folder / "elsewhere" / "node1.lock", (2, 2))
    (folder / "no run").mkdir()
    (folder / "no run" / "uv.lock").touch()
    (folder / "no run" / "result.json").write_text('{"loss": [0.5, "high"]}')
    leave(folder / "moved", going)
    for name in ("done", "broken", "killed"):
        with claimed(folder / name, 0, "tcp://127.0.0.1:9"):
            pass
    for age, name in enumerate(("killed", "broken", "done")):
        os.utime(folder / name / "node0.lock", (10_000 - 100 * age,) * 2)
    with claimed(folder / "moved", 0, "tcp://127.0.0.1:9"):
        os.utime(folder / "moved" / "node0.lock", (3, 3))
        moved(folder / "moved", 0, [Endpoint(2, "tcp://127.0.0.2:9")])  # to another node, and it began when it began
    os.utime(folder / "by-hand" / "result.json", (1, 1))
    with claimed(folder / long, 0, "tcp://127.0.0.1:9"):
        lines = listed()
        states = [(Path(run["folder"]).name, run["state"]) for run in json.loads("".join(listed("--json")))]
    assert states == [
        *((long, "running"), ("killed", "failed"), ("broken", "failed"), ("done", "finished")),
        *(("moved", "unknown"), ("elsewhere", "unknown"), ("by-hand", "unknown")),
    ]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "state", "algorithm", "iterations", "loss", "time", "started"]
    assert lines[1].startswith("a-very-long-nam") and "… " in lines[1] and " running " in lines[1]
    assert " 12 " in lines[1] and "2h02m" in lines[1]
    assert lines[3].startswith(golden.text("results.logs_in"))
    assert golden.text("results.on_node_0") in lines
    assert golden.text("results.on_node_2") in lines
    (done,) = [line for line in lines if line.startswith("done")]
    assert done.split()[:6] == ["done", "finished", "leader", "900/900", "0.25", "1m15s"]


def test_a_run_whose_name_is_no_utf_8_is_listed(tmp_path) -> None:
    leave(tmp_path / os.fsdecode(b"caf\xe9"))
    assert listed(str(tmp_path))[1].startswith("caf?  finished")
