"""The dashboard's data, who is let in by its real server, and the report of a finished run."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from http.client import HTTPConnection
from itertools import count

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from lsgd.errors import ConfigError, JoinError
from lsgd.protocol.events import (
    Event,
    Note,
    RoundOrdered,
    RunProgress,
    SettingsChanged,
    Summary,
    WorkerChanged,
    WorkerJoined,
    WorkerProgress,
)
from lsgd.watch.dashboard import follow, server
from lsgd.watch.dashboard.data import (
    MAX_LOSSES,
    MAX_WORKERS,
    Story,
    columns,
    encoded,
    setting_names,
    shares,
    snapshot,
)
from lsgd.watch.reader import Batch, Reader
from lsgd.watch.view import Totals
from tests import golden

from ..integration.running import DEADLINE_S, until
from .test_view import REPORT

BEGIN = 1.79e9


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tornado drops a socket that fails
@pytest.mark.parametrize(
    ("host", "trouble"), [("10.0.0..1", "Name or service not known"), ("192.0.2.77", "Cannot assign requested address")]
)
def test_a_host_that_is_not_here_is_said(host, trouble) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("dashboard.not_listening", host=host, trouble=trouble)):
        server._bind(host, None)


def told(seconds, workers=2, rounds_every=5, leads=True):
    """Return the story of a run that has gone on for so long, with a worker that waits more than it computes."""
    story, names = Story(), [f"node{i // 8}/worker{i % 8}" for i in range(workers)]
    seq = 0
    for k in range(seconds):
        happened = []
        if k % rounds_every == 0:
            losses = {name: float("nan") if i == 1 else 2.0 + i for i, name in enumerate(names)}
            leader = names[k // rounds_every // 2 % 2] if leads else ""
            happened.append(RoundOrdered(k // rounds_every + 1, "global", -1, leader, 10 * k, float(k), losses))
        lines = [
            WorkerProgress(name, i, "live", 5 * k, 1.0, 0.1, k * (0.25 if i else 0.75), k * 0.25, 0.0, 1000 * k, 0)
            for i, name in enumerate(names)
        ]
        happened.append(progress_at(k, 10 * k, lines, "<b>nobody</b> waits"))
        story.apply(Batch(tuple(Event(seq + n, BEGIN + k, what) for n, what in enumerate(happened, 1)), 0, True))
        seq += len(happened)
    return story


def progress_at(k, count, lines, reason=""):
    now = Summary(state="running", reason=reason, seconds=float(k), count=count, progress=0.5)
    return RunProgress(now, tuple(lines))


def test_the_data_say_who_leads_who_is_slow_and_who_is_gone():
    story = told(60)
    gone = WorkerChanged("node0/worker1", "left", "failed", "its process has ended")
    story.apply(Batch((Event(1000, BEGIN + 60, gone),), 0, True))
    data = json.loads(encoded(snapshot(story)))
    assert data["head"]["rate"] == pytest.approx(10)
    loss = data["loss"]
    assert loss["counts"][:3] == [0, 50, 100] and loss["workers"]["node0/worker1"][0] is None  # not finite
    assert loss["consensus"][0] == [0, 2.0]
    assert loss["leaders"][:2] == [[0, 2.0, "node0/worker0"], [100, 2.0, "node0/worker1"]]
    assert data["head"]["elects"] and not snapshot(told(60, leads=False))["head"]["elects"]
    assert snapshot(told(60, leads=False))["loss"]["leaders"] == []
    fast, slow = data["workers"]
    assert (fast["compute"], slow["compute"]) == pytest.approx((0.75, 0.25)) and fast["rate"] == pytest.approx(5)
    assert slow["state"] == "left" and slow["reason"] == golden.text("server.process_ended")
    assert data["gaps"] == [["node0/worker1", "left", "failed", golden.text("server.process_ended"), BEGIN + 60, None]]
    assert data["recent"]["rows"]["node0/worker0"][0][3:-1] == "f" * (data["recent"]["number"] - 4)
    assert data["recent"]["bytes_per_s"][5] == pytest.approx(2000)
    assert data["recent"]["bytes_per_iteration"][5] == pytest.approx(200)


def progress(k, count, *workers):
    """Return what is told at second ``k`` of the run: (worker, iterations, bytes)."""
    lines = [WorkerProgress(name, 0, "live", done, 1.0, 0.1, 0.0, 0.0, 0.0, sent, 0) for name, done, sent in workers]
    return progress_at(k, count, lines)


def test_the_rate_of_a_worker_ends_with_its_reports():
    story = told(60)
    still = [progress(k, 10 * k, ("node0/worker0", 5 * k, 1000 * k)) for k in range(60, 100)]
    story.apply(Batch(tuple(Event(1000 + n, BEGIN + 60 + n, what) for n, what in enumerate(still)), 0, True))
    data = snapshot(story)
    assert [(w["rate"], w["bytes_per_s"]) for w in data["workers"]] == [(5.0, 1000.0), (None, None)]
    assert data["sums"]["bytes_per_s"] == 1000.0


def test_numbers_of_all_count_workers_that_are_not_shown():
    story = told(11, workers=MAX_WORKERS + 44)
    gone = WorkerChanged("node37/worker3", "left", "failed", "its process has ended")
    story.apply(Batch((Event(1000, BEGIN + 11, gone),), 0, True))
    data = snapshot(story)
    assert len(data["workers"]) == len(data["recent"]["rows"]) == MAX_WORKERS
    sums = {"workers": 300, "out": 1, "done": 300 * 50, "sent_nbytes": 300 * 10_000, "bytes_per_s": 300_000.0}
    assert data["sums"] == sums
    assert data["recent"]["bytes_per_s"] == [300_000.0] * 5


def test_curves_never_run_backwards():
    story = told(60)
    story._older = [replace(each, count=each.count - 2000) for each in story.view.rounds]
    events = (progress(60, 250), RoundOrdered(13, "global", -1, "node0/worker0", 260, 61.0, {"node0/worker0": 9.0}))
    counts = []
    for n, what in enumerate(events):
        story.apply(Batch((Event(1000 + n, BEGIN + 60 + n, what),), 0, True))
        loss = snapshot(story)["loss"]
        assert loss["counts"] == sorted(loss["counts"])
        counts.append([count for count, _ in loss["consensus"]])
    older = range(-2000, -1449, 50)
    assert counts == [[*older, *range(0, 551, 50)], [*older, *range(0, 251, 50), 260]]


def test_a_loss_has_gaps_where_its_worker_was_away_and_held_out_ones_are_apart():
    first, away, other = "node0/worker0", "node0/worker1", "node1/worker0"
    rounds = [
        RoundOrdered(1, "global", -1, "", 10, 1.0, {first: 3.0, away: 3.0, other: 3.0}, {"val": 4.0, "accuracy": 0.5}),
        RoundOrdered(2, "local", 1, "", 20, 2.0, {other: 2.5}),
        RoundOrdered(3, "global", -1, "", 30, 3.0, {first: 2.0, other: 2.0}, {"val": None}),
        RoundOrdered(4, "global", -1, "", 40, 4.0, {first: 1.0, away: 1.0, other: 1.0}, {"val": 2.0}),
    ]
    gone = WorkerProgress(away, 1, "left", 9, 1.0, 0.1, 0.0, 0.0, 0.0, 0, 0)
    now = progress_at(5, 50, [replace(gone, worker=first, state="live"), gone])
    story = Story()
    events = [Event(n, BEGIN + n, what) for n, what in enumerate([*rounds, now], 1)]
    story.apply(Batch(tuple(events), 0, True))
    loss = snapshot(story)["loss"]
    assert loss["counts"] == [10, 20, 30, 40, 50]
    assert loss["workers"][first] == [3.0, False, 2.0, 1.0, 1.0]
    assert loss["workers"][away] == [3.0, False, None, 1.0, None]
    assert loss["held_out"] == {"val": [(10, 4.0), (40, 2.0)]}


def test_the_page_says_why_a_run_is_longer_or_shorter_or_went_back():
    told, seqs = Story(), count(1)

    def tell(made, iterations, *causes):
        now = replace(progress_at(1, made, []).run, iterations=iterations)
        events = (Event(seq := next(seqs), BEGIN + seq, what) for what in (*causes, RunProgress(now, ())))
        told.apply(Batch(tuple(events), 0, True))

    tell(0, 0)
    tell(10, 3000, WorkerJoined("node0/worker0", 0, "", ""))  # it has a length only now
    tell(20, 2990)  # as workers report
    tell(30, 2225, SettingsChanged({"iterations": "2225"}))
    tell(40, 2225, SettingsChanged({"keep": "0.5"}))
    tell(50, 1200, WorkerChanged("node0/worker1", "left", "failed", "its process has ended"))
    tell(25, 1200, Note("gone_back", "it goes back to checkpoints"))
    assert [words for _, words in snapshot(told)["turns"]] == [
        golden.text("dashboard.iterations_set"),
        golden.text("dashboard.iterations_left"),
        golden.text("dashboard.back_to_checkpoints"),
    ]


def test_the_agreement_of_each_layer_is_a_row() -> None:
    told = Story()
    logged = [
        {"lsgd/agreement": 0.5, "lsgd/agreement/h.0": 0.75},
        {"lsgd/agreement/h.0": 0.75},
        {"lsgd/agreement/ln": 0.25},
    ]
    for k, numbers in enumerate(logged, 1):
        now = RunProgress(progress_at(k, 10 * k, []).run, (), numbers)
        told.apply(Batch((Event(k, BEGIN + k, now),), 0, True))
    data = snapshot(told)["agreement"]
    assert data == {"counts": [10, 30], "layers": ["h.0", "ln"], "rows": [[0.75, None], [None, 0.25]]}
    assert snapshot(Story())["agreement"] == {"counts": [], "layers": [], "rows": []}


def test_rounds_stay_where_they_were_when_the_server_comes_back():
    story = told(10)
    report = REPORT | {"run": "", "stream": {"epoch": "f", "last": 0}}
    story.apply(Batch(connected=True, report=report, restarted=True))
    story.apply(Batch((Event(1, BEGIN + 100, progress(10, 100, ("node0/worker0", 50, 9000))),), 0, True))
    assert [mark[0] for mark in snapshot(story)["whole"]["rounds"]] == [BEGIN, BEGIN + 5]


def test_why_a_run_cannot_be_read_stays_until_it_can(monkeypatch):
    class Moving(Reader):
        """A reader that is told to go elsewhere, hears nothing for a while, and then the run."""

        def read(self, timeout_s):
            said.append(story.problem)
            if len(said) == 4:
                follower.stop()
            if len(said) == 1:
                raise JoinError("it has moved")
            return Batch(connected=True, report=REPORT if len(said) == 3 else None)

    monkeypatch.setattr(follow, "RETRY_S", 0.0)
    said, story = [], Story()
    follower = follow.Follower(Moving("tcp://127.0.0.1:9"), story, lambda text: None, lambda: False)
    follower.run()
    assert said == ["", "it has moved", "it has moved", ""]


def test_it_offers_the_settings_that_a_run_can_change():
    names = setting_names("local")
    assert {"iterations", "seconds", "period", "outer_lr"} <= {*names} and "patience_s" not in names


def test_data_are_bounded_and_stand_in_a_script():
    story = told(650, workers=64, rounds_every=1)
    text = encoded(snapshot(story))
    data = json.loads(text)
    assert len(text) < 400_000 and "<" not in text and data["head"]["reason"] == "<b>nobody</b> waits"
    assert sum(map(len, data["loss"]["workers"].values())) <= 64 + MAX_LOSSES
    assert data["loss"]["counts"][-1] == 10 * 649 and data["whole"]["number"] <= 200


def test_seconds_that_are_told_late_lie_where_they_were_spent():
    points = [Totals(t, 0, None, 10.0 * (t // 10), 0.0, 0.0, 0, 0) for t in range(31)]  # steps of 10 s
    compute, _, _ = shares(points, columns(0.0, 30.0, 100))
    assert compute == "k" * 30


@pytest.fixture
def dashboard(servers):
    """Start dashboards of the run; return the address and the token of each."""
    started = []

    def start(*options):
        command = [sys.executable, "-m", "lsgd.client", "dashboard", "--connect", servers.address, *options]
        started.append(subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True))
        line = started[-1].stdout.readline()
        return re.fullmatch(r"dashboard: http://(?:.*):(\d+)/(?:\?token=(\S+))?\n", line).groups()

    yield start
    for process in started:
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        process.stdout.close()


def answer(port, path, *, host="127.0.0.1", method="GET", body=None, **headers):
    """Return the status, the headers and the text of what the dashboard answers."""
    link = HTTPConnection("127.0.0.1", int(port), timeout=DEADLINE_S)
    headers = {"Host": f"{host}:{port}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    link.request(method, path, body, headers)
    response = link.getresponse()
    found = response.status, response.headers, response.read().decode()
    link.close()
    return found


def test_the_page_is_for_this_machine_and_changes_come_from_it_alone(dashboard, servers):
    port, token = dashboard()
    assert token is None
    status, headers, page = answer(port, "/")
    assert status == 200 and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert answer(port, "/", host="localhost")[0] == 200
    for path in ("/", "/state.json", "/events", "/page.js"):
        assert [answer(port, path, host=host)[0] for host in ("attacker.example", "[", "10.0.0.1")] == [403] * 3
    for path in ("/page.html", "/server.py", "/../server.py", "/%2e%2e/server.py"):
        assert answer(port, path)[0] == 404
    assert "plotly.js v" in answer(port, "/plotly.js")[2]
    state = until(lambda: json.loads(answer(port, "/state.json")[2]).get("head", {}).get("run"), "a state")
    assert state == servers.status()["run"]
    assert f'run="{state}"' in answer(port, "/metrics")[2]

    csrf = re.search(r'data-csrf="([^"]+)"', page)[1]
    change = {"method": "POST", "body": '{"period": "16"}'}
    assert answer(port, "/set", **change)[0] == 403
    assert answer(port, "/set", **change, X_Lsgd_Csrf="guessed")[0] == 403
    assert answer(port, "/set", **change, X_Lsgd_Csrf=csrf, Origin="http://attacker.example")[0] == 403
    assert servers.status()["period"] == 8
    assert answer(port, "/set", **change, X_Lsgd_Csrf=csrf, Origin=f"http://127.0.0.1:{port}")[0] == 200
    refused = answer(port, "/set", method="POST", body='{"perod": "1"}', X_Lsgd_Csrf=csrf)
    assert refused[0] == 400 and "period" in json.loads(refused[2])["error"]
    for body in ("[]", "{", '{"period": 8}', "[" * 5000, r'{"period": "\ud800"}', r'{"\ud800": "8"}'):
        assert answer(port, "/set", method="POST", body=body, X_Lsgd_Csrf=csrf)[0] == 400


@pytest.mark.parametrize("options", [("--private",), ("--host", "0.0.0.0")])
def test_a_token_is_needed_for_everything(dashboard, options):
    port, token = dashboard(*options)
    for path in ("/", "/state.json", "/metrics", "/events", "/plotly.js", "/?token=guessed", "/nothing"):
        status, _, text = answer(port, path)
        assert status == 401 and golden.text("dashboard.open_address") in text
    assert answer(port, "/stop", method="POST")[0] == 401
    status, headers, _ = answer(port, f"/?token={token}")
    assert status == 302 and headers["Location"] == "/" and "HttpOnly" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].split(";")[0]
    assert answer(port, "/", Cookie=cookie)[0] == 200
    assert answer(port, "/", Cookie=cookie, host="attacker.example")[0] == 403
    assert answer(port, "/nothing", Cookie=cookie)[0] == 404


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tornado drops a socket that fails
def test_another_port_than_the_usual_is_explained(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        monkeypatch.setattr(server, "DEFAULT_PORT", taken)
        said = []

        async def serve(dashboard, sockets, folder, say, parent):
            say(dashboard.url())
            for each in sockets:
                each.close()

        monkeypatch.setattr(server, "_serve", serve)
        server.open_dashboard("tcp://127.0.0.1:9", None, "127.0.0.1", None, None, said.append)
        server.open_dashboard("tcp://127.0.0.1:9", None, "127.0.0.1", 0, None, said.append)
    assert re.fullmatch(golden.pattern("dashboard.port_taken", taken=taken, pid=os.getpid()), said[0])
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", said[1])


def test_another_page_takes_the_place_of_the_oldest(dashboard):
    port, _ = dashboard()
    links, pages = [], []
    for _ in range(33):
        links.append(HTTPConnection("127.0.0.1", int(port), timeout=DEADLINE_S))
        links[-1].request("GET", "/events")
        pages.append(links[-1].getresponse())
        assert pages[-1].status == 200 and pages[-1].readline() == b"retry: 1000\n"
    while pages[0].readline():  # to its end
        pass
    assert pages[1].readline() == pages[32].readline() == b"\n"
    for link in links:
        link.close()


def test_the_report_of_a_run_is_one_file(servers, tmp_path):
    state = servers.status() | {"state": "finished", "reason": "</script><b>all made"}
    (tmp_path / "result.json").write_text(json.dumps(state))
    losses = {"node0/worker0": 1.5, "node0/worker1": None}
    line = {"run": state["run"], "round": 1, "scope": "global", "node": -1, "worker": "node0/worker0", "count": 16}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, "seconds": 0.5, "losses": losses}) + "\n")
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text)[1])
    assert data["head"]["reason"] == "</script><b>all made" and data["loss"]["consensus"] == [[16, 1.5]]
    assert not re.search(r'(src|href)="(?!data:)', text[: text.index("<script")])
    nameless = tmp_path / os.fsdecode(b"r\xff")
    nameless.mkdir()
    (nameless / "result.json").write_text(json.dumps(state))
    done = CliRunner().invoke(main, ["report", str(nameless)])
    assert done.exit_code == 0 and '/r?"' in (nameless / "report.html").read_text(), done.output
    refused = CliRunner().invoke(main, ["report", str(tmp_path / "nothing")])
    assert refused.exit_code == 1 and golden.text("dashboard.no_result") in refused.output
