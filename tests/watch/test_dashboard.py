"""The dashboard's data, who is let in by its real server, and the report of a finished run."""

import json
import re
import socket
import subprocess
import sys
from http.client import HTTPConnection

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from lsgd.protocol.events import Event, RoundOrdered, RunProgress, WorkerChanged, WorkerProgress
from lsgd.watch.dashboard import server
from lsgd.watch.dashboard.data import MAX_LOSSES, Story, columns, encoded, setting_names, shares, snapshot
from lsgd.watch.reader import Batch
from lsgd.watch.view import Totals

from ..integration.running import DEADLINE_S, until

pytest.importorskip("tornado")
pytest.importorskip("plotly")
pytest.importorskip("prometheus_client")
BEGIN = 1.79e9


def told(seconds, workers=2, rounds_every=5):
    """Return the story of a run that has gone on for so long, with a worker that waits more than it computes."""
    story, names = Story(), [f"node{i // 8}/worker{i % 8}" for i in range(workers)]
    seq = 0
    for k in range(seconds):
        happened = []
        if k % rounds_every == 0:
            losses = {name: float("nan") if i == 1 else 2.0 + i for i, name in enumerate(names)}
            leader = names[k // rounds_every // 2 % 2]
            happened.append(RoundOrdered(k // rounds_every + 1, "global", -1, leader, 10 * k, float(k), losses))
        lines = [
            WorkerProgress(name, i, "live", 5 * k, 1.0, 0.1, k * (0.25 if i else 0.75), k * 0.25, 0.0, 1000 * k, 0)
            for i, name in enumerate(names)
        ]
        happened.append(RunProgress(float(k), "running", "", "<b>nobody</b> waits", 10 * k, 0, 0.5, tuple(lines)))
        story.take(Batch(tuple(Event(seq + n, BEGIN + k, what) for n, what in enumerate(happened, 1)), 0, True))
        seq += len(happened)
    return story


def test_the_data_say_who_leads_who_is_slow_and_who_is_gone():
    story = told(60)
    gone = WorkerChanged("node0/worker1", "left", "failed", "its process has ended")
    story.take(Batch((Event(1000, BEGIN + 60, gone),), 0, True))
    data = json.loads(encoded(snapshot(story)))
    assert data["head"]["rate"] == pytest.approx(10)
    loss = data["loss"]
    assert loss["counts"][:3] == [0, 50, 100] and loss["workers"]["node0/worker1"][0] is None  # not finite
    assert loss["consensus"][0] == [0, 2.0]
    assert loss["leaders"][:2] == [[0, 2.0, "node0/worker0"], [100, 2.0, "node0/worker1"]]
    story.view.algorithm = "local"  # which has no leaders
    assert snapshot(story)["loss"]["leaders"] == [] and snapshot(story)["recent"]["elects"] is False
    fast, slow = data["workers"]
    assert (fast["compute"], slow["compute"]) == pytest.approx((0.75, 0.25)) and fast["rate"] == pytest.approx(5)
    assert slow["state"] == "left" and slow["reason"] == "its process has ended"
    assert data["gaps"] == [["node0/worker1", "left", "failed", "its process has ended", BEGIN + 60, None]]
    assert data["recent"]["rows"]["node0/worker0"][0][3:-1] == "f" * (data["recent"]["number"] - 4)
    assert data["recent"]["bytes_per_s"][5] == pytest.approx(2000)
    assert data["recent"]["bytes_per_iteration"][5] == pytest.approx(200)


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
        assert status == 401 and "open the address that lsgd dashboard printed" in text
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
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/ \(port {taken} is taken\)", said[0])
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
    refused = CliRunner().invoke(main, ["report", str(tmp_path / "nothing")])
    assert refused.exit_code == 1 and "there is no result.json" in refused.output
