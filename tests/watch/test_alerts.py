"""Alerts: what they say of a run, each once, and to whom."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lsgd.protocol.events import RoundCompleted, RoundFailed, RunChanged, WorkerChanged
from lsgd.watch.alerts import FLAT_OVER, Alert, Alerts, Facts, _told, line_of, tell
from tests import golden

from .test_view import OTHER, WHO, Bench, at, order, progress_of

NOTHING = Facts()


def codes(alerts: Alerts, bench: Bench, facts: Facts = NOTHING) -> list[str]:
    return [alert.code for alert in alerts.new(bench.view, facts)]


@pytest.fixture
def bench() -> Bench:
    bench = Bench(state="running")
    bench.tell(progress_of(12, at(WHO, 6, 1.0, 64), at(OTHER, 6, 1.0, 64)))
    return bench


def test_a_run_that_trains_is_not_spoken_of(bench) -> None:
    bench.tell(*(each for n in range(1, 9) for each in (order(n), RoundCompleted(n, 0.5, 100))))
    assert codes(Alerts(), bench, Facts(1.0, 1e12)) == []


def test_what_the_log_has_of_the_same_run_is_not_told_again(bench, tmp_path) -> None:
    bench.tell(WorkerChanged(WHO, "left", "failed", "its process has ended"))
    (told,) = Alerts().new(bench.view)
    (log := tmp_path / "alert.log").write_text(
        f"alerts of run r\n{line_of(told)}\nalerts of run q\nrun.over: the end\n"
    )
    assert codes(Alerts(_told(log, "r")), bench) == []
    assert (
        codes(Alerts(_told(log, "q")), bench) == codes(Alerts(_told(tmp_path / "none", "r")), bench) == ["worker.left"]
    )


def test_two_failed_rounds_in_a_row_are_said_once(bench) -> None:
    alerts = Alerts()
    bench.tell(order(1), RoundFailed(1, "x", "a link broke"), order(2), RoundCompleted(2, 0.5, 1))
    bench.tell(order(3), RoundFailed(3, "x", "a link broke"))
    assert codes(alerts, bench) == []
    bench.tell(order(4), RoundFailed(4, "x", "it broke again"))
    (alert,) = alerts.new(bench.view)
    assert alert == Alert("rounds.fail", golden.text("alerts.two_failed"))
    bench.tell(order(5), RoundFailed(5, "x", "and again"))
    assert codes(alerts, bench) == []


def test_each_worker_and_each_of_its_states_is_said_once(bench) -> None:
    alerts = Alerts()
    for worker, state in ((WHO, "straggler"), (OTHER, "straggler"), (WHO, "straggler"), (WHO, "away")):
        bench.tell(WorkerChanged(worker, state, "late", "the others waited 120 s for it"))
        bench.tell(WorkerChanged(worker, "live", "", "")) if worker == OTHER else None
    found = [alert.words for alert in alerts.new(bench.view)]
    assert found == [golden.text("alerts.away", who=WHO)]
    bench.tell(WorkerChanged(OTHER, "straggler", "late", "the others waited 120 s for it"))
    assert codes(alerts, bench) == ["worker.straggler"] and codes(alerts, bench) == []


def test_a_loss_that_is_no_number_and_one_that_does_not_fall(bench) -> None:
    alerts = Alerts()
    bench.tell(progress_of(24, replace(at(WHO, 12, 1.0, 64), loss=None), at(OTHER, 12, 1.0, 64)))
    assert codes(alerts, bench) == ["loss.nan"]
    for n in range(1, 2 * FLAT_OVER + 1):
        assert codes(alerts, bench) == []
        bench.tell(order(n, {WHO: 1.0 if n < FLAT_OVER else 1.5}), RoundCompleted(n, 0.5, 1))
    assert [alert.words.partition(":")[2] for alert in alerts.new(bench.view)] == [golden.text("alerts.was_and_is")]
    assert codes(alerts, bench) == []


def test_a_server_that_is_silent_again_is_said_again(bench) -> None:
    alerts = Alerts()
    seen = [codes(alerts, bench, Facts(silent_s)) for silent_s in (10.0, 31.0, 60.0, 0.0, 31.0)]
    assert seen == [[], ["server.silent"], [], [], ["server.silent"]]


def test_a_full_disk_and_the_end(bench) -> None:
    alerts = Alerts()
    assert codes(alerts, bench, Facts(0.0, 5e8)) == ["disk.low"]
    bench.tell(RunChanged("over", "all_made", "all 1000 iterations are done"))
    (alert,) = alerts.new(bench.view, Facts(0.0, 5e8))
    assert alert == Alert("run.over", golden.text("alerts.over_after"))


def test_a_command_finds_the_alert_in_its_variables(tmp_path) -> None:
    command = f'echo "$LSGD_ALERT_CODE|$LSGD_ALERT|$LSGD_ALERT_RUN|$LSGD_ALERT_FOLDER" > {tmp_path}/said'
    assert tell(command, Alert("disk.low", 'it\'s "full"'), "f00d", tmp_path) == ""
    assert (tmp_path / "said").read_text() == f'disk.low|it\'s "full"|f00d|{tmp_path}\n'
    assert tell("exit 3", Alert("disk.low", ""), "f00d", tmp_path) == golden.text("alerts.exit_3")


def test_a_web_server_gets_json(tmp_path) -> None:
    got: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204 if len(got) == 1 else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/hook"
        assert tell(address, Alert("run.over", "done"), "f00d", tmp_path) == ""
        assert "500" in tell(address, Alert("run.over", "done"), "f00d", tmp_path)
        server.shutdown()
    text = f"lsgd, {tmp_path.name}: done"
    assert got[0] == {"code": "run.over", "text": text, "run": "f00d", "folder": str(tmp_path)}
    assert tell(address, Alert("run.over", ""), "f00d", tmp_path) != ""
