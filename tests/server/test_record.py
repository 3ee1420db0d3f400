"""What is written down of a run: every round once, whatever happens to the server and its disk."""

import json
from pathlib import Path

from lsgd.protocol.messages import StopRun
from lsgd.run_folder import METRICS, RESULT
from lsgd.server.report import RESULT_EVERY_S, RETRY_EVERY_S, Record
from lsgd.server.rounds import MAX_ELECTIONS
from tests import golden

from .helpers import Bench, Lockstep, make_plan


def training(**settings: object) -> Bench:
    """Return a run of two workers in its first round."""
    bench = Bench("00", "01", plan=make_plan(algorithm=Lockstep(), workers=2, **settings))
    bench.ask_all("00", "01", w00=1.0, w01=3.0)
    return bench


def advance(bench: Bench, rounds: int) -> None:
    for _ in range(rounds):
        bench.complete_all("00", "01")
        bench.ask_all("00", "01", w00=0.12345678, w01=float("nan"))


def rounds_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def result_in(folder: Path) -> dict:
    return json.loads((folder / RESULT).read_text())


def test_every_round_is_there_and_the_state_now_and_then(tmp_path: Path) -> None:
    bench, record = training(), Record(tmp_path / "run", "run")
    assert record.keep(bench.state, bench.now) == ""
    for _ in range(MAX_ELECTIONS // 100 + 2):
        advance(bench, 100)
        bench.now += RESULT_EVERY_S / 2
        assert record.keep(bench.state, bench.now) == ""
    written = rounds_in(tmp_path / "run")
    assert [each["round"] for each in written] == list(range(1, bench.book.next_id))
    assert len(written) > MAX_ELECTIONS
    assert written[-1] == {
        "run": "run",
        "round": len(written),
        "scope": "global",
        "node": -1,
        "worker": "",  # nobody leads
        "count": bench.ledger.count,
        "seconds": bench.now - 100.0 - RESULT_EVERY_S / 2,
        "losses": {"node0/worker0": 0.123457, "node0/worker1": None},
        "means": {},
    }
    going = result_in(tmp_path / "run")
    assert (going["state"], going["loss"]) == ("running", 0.12345678)
    assert 0 < going["count"] <= bench.ledger.count
    bench.say(StopRun("enough"))
    record.keep(bench.state, bench.now, last=True)
    assert (result_in(tmp_path / "run")["code"], result_in(tmp_path / "run")["count"]) == (
        "ordered",
        bench.ledger.count,
    )


def test_a_line_cut_short_is_written_anew_by_the_server_that_goes_on(tmp_path: Path) -> None:
    bench, first = training(), Record(tmp_path, "run")
    advance(bench, 3)
    first.keep(bench.state, bench.now)
    started = result_in(tmp_path)["started"]
    whole = (tmp_path / METRICS).read_bytes()
    for left in (whole[:-20], whole[:-1], whole + b'{"run": "run", "ro', whole + b"\0\0\0\n", whole):
        (tmp_path / METRICS).write_bytes(left)
        Record(tmp_path, "run").keep(bench.state, bench.now, last=True)
        assert (tmp_path / METRICS).read_bytes() == whole
    assert result_in(tmp_path)["started"] == started


def test_a_resumed_run_adds_its_rounds(tmp_path: Path) -> None:
    for run in ("one", "two"):
        bench = training()
        advance(bench, 1)
        Record(tmp_path, run).keep(bench.state, bench.now)
    assert [(each["run"], each["round"]) for each in rounds_in(tmp_path)] == [
        *(("one", 1), ("one", 2)),
        *(("two", 1), ("two", 2)),
    ]


def test_a_disk_that_cannot_be_written_is_said_once_and_tried_again(tmp_path: Path) -> None:
    bench, record = training(), Record(tmp_path, "run")
    (tmp_path / METRICS).mkdir()
    said = []
    for _ in range(3):
        advance(bench, 1)
        said.append(record.keep(bench.state, bench.now))
        bench.now += RETRY_EVERY_S
    assert golden.text("record.not_written") in said[0]
    assert said[1:] == ["", ""]
    (tmp_path / METRICS).rmdir()
    assert record.keep(bench.state, bench.now).endswith(golden.text("record.written_again"))
    assert [each["round"] for each in rounds_in(tmp_path)] == [1, 2, 3, 4]
