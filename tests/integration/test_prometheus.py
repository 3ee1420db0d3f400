"""A real Prometheus reads the metrics of a real run, with the alerts and the dashboard of deploy/."""

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from lsgd.protocol.messages import StopRun

from ..needs import needs
from .running import DEADLINE_S, LIGHT, free_port, until

DEPLOYED = Path(__file__).parents[2] / "deploy" / "prometheus"
needs_prometheus = needs("prometheus")


@pytest.fixture
def begin(tmp_path):
    """Start a program and return its process; all of them are ended at last."""
    started = []

    def begin(*command, **options):
        started.append(subprocess.Popen([str(part) for part in command], **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def metrics(cluster, begin):
    """Start a run and ``lsgd metrics`` beside it; return its URL."""

    def start():
        cluster.start("--workers", "2", "--period", "8", "--local-period", "8")
        command = (sys.executable, "-m", "lsgd.client", "metrics", "--connect", cluster.address, "--port", "0")
        url = begin(*command, stdout=subprocess.PIPE, text=True).stdout.readline().split()[-1]
        for index in range(2):
            cluster.worker("train", 0, index, "--sleep", 0.01, **LIGHT)
        return url

    return start


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return answer.read()


def test_metrics_are_served_while_the_server_is_away_too(cluster, metrics) -> None:
    url = metrics()
    until(lambda: b'lsgd_run_state{state="running"} 1.0' in get(url), "the run is seen")
    until(lambda: b'lsgd_sent_bytes_total{worker="node0/worker0"}' in get(url), "what workers say is seen")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(url.replace("/metrics", "/"))
    for process in cluster.processes:
        process.end()
    until(lambda: b"lsgd_connected 0.0" in get(url), "that nobody answers")
    assert b'lsgd_run_state{state="running"} 1.0' in get(url)


@needs_prometheus
def test_prometheus_reads_a_run_and_every_query_of_the_dashboard(cluster, metrics, begin, tmp_path) -> None:
    target = urllib.parse.urlsplit(metrics()).netloc
    text = (DEPLOYED / "prometheus.yml").read_text()
    assert "localhost:9464" in text and text.count("15s") == 2
    (tmp_path / "prometheus.yml").write_text(text.replace("localhost:9464", target).replace("15s", "1s"))
    shutil.copy(DEPLOYED / "alerts.yml", tmp_path)
    listens = f"127.0.0.1:{free_port()}"
    log = (tmp_path / "prometheus.log").open("wb")
    options = (f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data")
    begin("prometheus", *options, f"--web.listen-address={listens}", stdout=log, stderr=log)
    log.close()

    def ask(path, **query):
        try:
            answer = json.loads(get(f"http://{listens}/api/v1/{path}?{urllib.parse.urlencode(query)}"))
        except (urllib.error.URLError, ConnectionError):
            assert "level=error" not in (tmp_path / "prometheus.log").read_text()
            return {}
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(query):
        found = ask("query", query=query).get("result")
        return float(found[0]["value"][1]) if found else 0.0

    until(lambda: value("min(lsgd_worker_iterations_total)") > 0, "iterations of both workers")
    until(lambda: value("rate(lsgd_iterations_total[10s])") > 0, "a rate")
    until(lambda: value('up{job="lsgd"}') == value('lsgd_run_state{state="running"}') == 1, "a run that is up")
    until(lambda: value('sum(lsgd_workers{state=~"live|held"})') == 2, "both workers")
    grafana = json.loads((DEPLOYED / "grafana.json").read_text())
    optional = {"Time left", "Your own numbers", "Departures", "Rounds per minute", "Time of a round"}
    optional |= {"Iterations per second", "Where the time goes", "Throughput", "Iterations per second by worker"}

    def answers(title, query):
        found = ask("query", query=query)
        return found and (found["result"] or title in optional)  # those over a minute may be too young

    for panel in grafana["panels"]:
        for each in panel["targets"]:
            query = each["expr"].replace("$job", "lsgd").replace("$instance", target)
            until(partial(answers, panel["title"], query), f"{panel['title']}: {query}")
    (rules,) = ask("rules")["groups"]
    assert [rule["name"] for rule in rules["rules"]] == ["LsgdNoIterations", "LsgdWorkerGone", "LsgdServerDown"]
    until(lambda: {r["health"] for r in ask("rules")["groups"][0]["rules"]} == {"ok"}, "alerts are evaluated")
    until(lambda: ask("alerts").get("alerts") == [], "no alert is pending, for the run makes iterations")
    cluster.ask(StopRun("seen enough"))
    until(lambda: value('lsgd_run_state{state="over"}') == 1, "the end is read")
