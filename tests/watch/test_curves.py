"""Curves of a run: the points that its events make, and what loggers write of them."""

import importlib.util
import json
import signal
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from lsgd.errors import ConfigError
from lsgd.protocol.events import Event, RoundCompleted, RoundOrdered
from lsgd.run_folder import CURVES, METRICS, RESULT, claimed
from lsgd.watch import curves, to_end
from lsgd.watch.curves import LOGGERS, Curves, Point
from lsgd.watch.reader import Batch, Reader
from tests import golden

from .test_view import OTHER, REPORT, WHO, at, order, progress_of


def batch(*told, first=1, **more):
    events = tuple(Event(first + i, 1000.0 + first + i, what) for i, what in enumerate(told))
    return Batch(events, connected=True, **more)


def test_each_round_and_each_second_is_a_point_once() -> None:
    curves = Curves()
    assert list(curves.points(Batch(report=REPORT, connected=True, more=True))) == []
    points = list(
        curves.points(
            batch(
                replace(order(1, {WHO: 0.25, OTHER: 0.75, "node0/worker2": None}), means={"val": 0.5, "top": None}),
                RoundOrdered(2, "local", 0, WHO, 9, 2.0, {WHO: 0.5}),
                RoundCompleted(1, 0.5, 100),
                progress_of(12, at(WHO, 6, 1.0, 64), at(OTHER, 4, 2.0, 36), logged={"accuracy": 0.75}),
            )
        )
    )
    losses = {f"loss/{WHO}": 0.25, f"loss/{OTHER}": 0.75, "loss/consensus": 0.5}
    totals = {"bytes/sent": 100.0, "bytes/received": 50.0}
    totals |= {"seconds/compute": 3.0, "seconds/wait": 6.0, "seconds/exchange": 9.0}
    now = {"progress": 0.012, "workers": 2.0, "user/accuracy": 0.75, "period": 8.0}
    assert points == [
        Point(1001.0, 8, {"rounds": 1.0, "mean/val": 0.5, **losses}),
        Point(1003.0, 8, {"round/seconds": 0.5, "round/sent_bytes": 100.0}),
        Point(1004.0, 12, totals | now),
    ]
    restarted = json.loads(json.dumps(REPORT | {"stream": {"epoch": "f", "last": 1}}))
    assert list(curves.points(Batch(report=restarted, connected=True, restarted=True, more=True))) == []
    later = list(curves.points(batch(order(1), order(3))))
    assert [(point.iterations, point.values["rounds"]) for point in later] == [(24, 3.0)]
    assert [point.iterations for point in curves.rounds(1.0, [order(3), order(4)])] == [32]


def test_a_table_goes_on_after_what_another_process_has_written(tmp_path) -> None:
    points = [Point(float(time), time, {"progress": time / 10}) for time in range(1, 5)]
    for run, written in (("a", points[:2]), ("a", points), ("b", points[:1])):
        logger = LOGGERS["csv"](tmp_path, run)
        for point in written:
            logger.write(point)
        logger.close()
        with (tmp_path / CURVES).open("a") as file:
            file.write("a,9")  # of a process that was killed
    LOGGERS["csv"](tmp_path, "b").close()
    rows = [line.split(",") for line in (tmp_path / CURVES).read_text().splitlines()]
    assert rows[0] == ["run", "time", "iterations", "name", "value"]
    assert [(row[0], row[2]) for row in rows[1:]] == [*(("a", str(n)) for n in range(1, 5)), ("b", "1")]


def test_a_missing_package_is_said_with_the_line_to_type(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    curves.check(["csv"])
    with pytest.raises(ConfigError, match=golden.pattern("curves.needs_wandb")):
        curves.check(["csv", "wandb"])


@pytest.mark.parametrize(
    ("folder", "said"), [("/dev/null/curves", "Not a directory"), (None, "No space left on device")]
)
def test_a_folder_that_cannot_be_made_or_written_is_said_in_words(tmp_path, monkeypatch, folder, said) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(curves, "_last_time", lambda path, run: 0.0)
    told = Batch(report=REPORT, connected=True), batch(progress_of(12))
    monkeypatch.setattr(curves, "to_end", lambda *_: told)
    (tmp_path / CURVES).symlink_to("/dev/full")
    arguments = ["log", "--connect", "tcp://127.0.0.1:9", "--to", "csv", "--out", folder or str(tmp_path)]
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.output) == (1, golden.text("curves.not_written", path=folder or tmp_path, said=said))


def test_a_server_that_never_answers_is_not_waited_for_as_one_that_is_away(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Reader, "read", lambda self, timeout_s: Batch())
    monkeypatch.setattr(to_end, "FIRST_WITHIN_S", 0.0)
    done = CliRunner().invoke(main, ["log", "--connect", "tcp://127.0.0.1:9", "--to", "csv", "--out", str(tmp_path)])
    assert done.exit_code == 1 and golden.text("curves.no_answer") in done.output


def test_the_end_that_the_server_could_not_tell_is_in_the_folder_of_the_run_wherever_it_writes(
    tmp_path, monkeypatch
) -> None:
    batches = iter([Batch(report=REPORT, connected=True)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Reader, "read", lambda self, timeout_s: next(batches, Batch()))
    monkeypatch.setattr(to_end, "AWAY_FOR_S", 0.0)
    run, out = tmp_path / "run", tmp_path / "out"
    with claimed(run, 0, "tcp://127.0.0.1:9"):
        (run / RESULT).write_text(json.dumps({"run": "r", "state": "over"}))
        (run / METRICS).write_text(json.dumps({"run": "r", **asdict(order(1))}) + "\n")
        done = CliRunner().invoke(main, ["log", "--run", str(run), "--to", "csv", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert ",8,rounds,1.0\n" in (out / CURVES).read_text()
