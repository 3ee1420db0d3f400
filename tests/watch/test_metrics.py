"""Metrics of a run: what an exposition has, that its counters never fall, and what reads it."""

import importlib.util
import json
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lsgd.errors import ConfigError
from lsgd.protocol.events import (
    Note,
    RoundCompleted,
    RoundFailed,
    RoundOrdered,
    RunChanged,
    WorkerChanged,
    WorkerJoined,
)
from lsgd.server.roster import MemberState
from lsgd.watch import metrics
from lsgd.watch.history import MAX_REASONS
from lsgd.watch.metrics import MAX_WORKERS, WORKER_STATES, exposition
from lsgd.watch.reader import Batch

from ..needs import needs
from ..speed import scaled
from .test_view import OTHER, REPORT, WHO, Bench, at, order, progress_of

DEPLOYED = Path(__file__).parents[2] / "deploy" / "prometheus"
promtool = needs("prometheus")


def fed() -> Bench:
    """Return the view of a run in which everything has happened that a metric tells of."""
    bench = Bench()
    bench.view.connected = True
    bench.tell(
        *(WorkerJoined(name, 0, "10.0.0.1", "") for name in (WHO, OTHER)),
        order(1),
        RoundCompleted(1, 0.25, 100),
        RoundOrdered(2, "local", 0, WHO, 9, 2.0, {WHO: 0.5}),
        RoundCompleted(2, 0.02, 100),
        order(3),
        RoundFailed(3, "gone.silent", "why"),
        WorkerChanged(OTHER, "straggler", "evicted", "slow"),
        progress_of(10, at(WHO, 6, 1.0, 64), at(OTHER, 4, state="straggler"), logged={"accuracy": 0.75}),
        progress_of(
            12,
            at(WHO, 8, 2.0, 128),
            at(OTHER, 4, state="straggler"),
            logged={"accuracy": 0.75},
            rounds_global=2,
            rounds_local=1,
        ),
    )
    return bench


def samples(view) -> dict[tuple[str, ...], float]:
    """Return the value of each sample, by its name and the values of its labels."""
    families = text_string_to_metric_families(exposition(view).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_what_happens_is_told_in_base_units() -> None:
    told = samples(fed().view)
    assert told["lsgd_iterations_total",] == 12 and told["lsgd_run_progress_ratio",] == 0.012
    assert told["lsgd_run_info", "leader", "r"] == told["lsgd_run_state", "running"] == told["lsgd_connected",] == 1
    assert (told["lsgd_rounds_total", "global"], told["lsgd_rounds_total", "local"]) == (2, 1)
    assert told["lsgd_round_failures_total", "gone.silent"] == 1
    assert told["lsgd_round_seconds_sum", "global"] == 0.25 and told["lsgd_round_seconds_count", "global"] == 1
    buckets = {key[1]: value for key, value in told.items() if key[0] == "lsgd_round_seconds_bucket" and "local" in key}
    assert [buckets[bound] for bound in ("0.01", "0.03", "+Inf")] == [0, 1, 1]
    assert told["lsgd_worker_loss", WHO] == 0.5 and told["lsgd_worker_iterations_total", WHO] == 8
    assert (told["lsgd_sent_bytes_total", WHO], told["lsgd_received_bytes_total", WHO]) == (128, 64)
    seconds = [told[f"lsgd_{what}_seconds_total", WHO] for what in ("compute", "wait", "exchange")]
    assert seconds == [2.0, 4.0, 6.0]
    states = {state: told["lsgd_worker_state", state, OTHER] for state in WORKER_STATES}
    assert states == {state: float(state == "straggler") for state in WORKER_STATES}
    assert (told["lsgd_workers", "live"], told["lsgd_workers", "straggler"]) == (1, 1)
    assert (told["lsgd_joins_total",], told["lsgd_departures_total", "evicted", "straggler"]) == (2, 1)
    assert told["lsgd_user", "accuracy"] == 0.75


def test_there_are_no_other_states() -> None:
    assert {*(state.shown for state in MemberState), "left"} == set(WORKER_STATES)


def test_before_the_first_report_there_is_only_that_nobody_answers() -> None:
    bench = Bench(run="")
    assert samples(bench.view) == {("lsgd_connected",): 0.0}


def test_counters_never_fall_when_the_server_is_started_again() -> None:
    bench = fed()
    before = samples(bench.view)
    entries = [
        {"round": n, "scope": scope, "node": -1, "worker": WHO, "count": 8, "seconds": 1.0, "losses": {}}
        for n, scope in ((1, "global"), (2, "local"), (3, "global"))
    ]
    report = REPORT | {"count": 11, "rounds_global": 2, "rounds_local": 1, "leaders": entries, "state": "running"}
    report["stream"] = {"epoch": "f", "last": 3}
    bench.view.apply(Batch(connected=True, report=report, restarted=True))
    bench.seq = 0
    bench.tell(*(RoundOrdered(**{**entry, "losses": {}}) for entry in entries))  # a new stream begins with its rounds
    bench.tell(progress_of(11, at(WHO, 7), at(OTHER, 4), rounds_global=2, rounds_local=1))  # no heartbeat was heard yet
    between = samples(bench.view)
    bench.tell(order(4), RoundCompleted(4, 0.25, 100))
    bench.tell(progress_of(15, at(WHO, 11, 3.0, 200), at(OTHER, 4), rounds_global=3, rounds_local=1))
    after = samples(bench.view)
    for name, *labels in before:
        if name.endswith(("_total", "_bucket", "_count", "_sum")):
            key = (name, *labels)
            assert before[key] <= between[key] <= after[key], key
    assert after["lsgd_iterations_total",] == 15 and after["lsgd_server_restarts_total",] == 1
    assert after["lsgd_rounds_total", "global"] == 3 and after["lsgd_round_seconds_count", "global"] == 2
    assert (after["lsgd_sent_bytes_total", WHO], after["lsgd_compute_seconds_total", WHO]) == (200, 3.0)


def test_who_leaves_because_the_run_ends_is_not_gone() -> None:
    bench = fed()
    bench.tell(RunChanged("stopping", "all_made", "all are made"), WorkerChanged(WHO, "left", "finished", "done"))
    bench.tell(progress_of(12, state="over"), WorkerChanged(OTHER, "left", "finished", "done"))
    assert bench.view.counters.departures == {("straggler", "evicted"): 1}


def test_iterations_that_are_made_again_count_again() -> None:
    bench = fed()
    bench.tell(Note("gone_back", "goes back"), progress_of(5, at(WHO, 8, 2.0)), progress_of(9, at(WHO, 8, 2.0)))
    assert samples(bench.view)["lsgd_iterations_total",] == 16
    assert samples(bench.view)["lsgd_run_progress_ratio",] == 0.009


def test_a_large_run_has_a_bounded_number_of_series() -> None:
    bench = Bench()
    bench.tell(progress_of(1, *(at(f"node{n}/worker0", 1, 1.0, 8) for n in range(MAX_WORKERS + 100))))
    bench.tell(*(WorkerChanged(WHO, "left", f"code{n}", "why") for n in range(3 * MAX_REASONS)))
    told = samples(bench.view)
    assert sum(key[0] == "lsgd_sent_bytes_total" for key in told) == MAX_WORKERS
    assert sum(value for key, value in told.items() if key[0] == "lsgd_workers") == MAX_WORKERS + 100
    departures = {key: value for key, value in told.items() if key[0] == "lsgd_departures_total"}
    assert len(departures) == MAX_REASONS + 1 and sum(departures.values()) == 3 * MAX_REASONS


def test_without_the_library_the_line_to_type_is_said(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"-m pip install 'lsgd\[metrics\]'"):
        metrics.check()


def test_the_dashboard_and_the_alerts_name_metrics_that_there_are() -> None:
    there = {name for name, *_ in samples(fed().view)}
    grafana = json.loads((DEPLOYED / "grafana.json").read_text())
    expressions = [target["expr"] for panel in grafana["panels"] for target in panel["targets"]]
    expressions += [each["query"] for each in grafana["templating"]["list"]]
    expressions += [each["expr"] for each in grafana["annotations"]["list"]]
    alerts = re.findall(r"expr: >-\n((?: {10}.*\n)+)", (DEPLOYED / "alerts.yml").read_text())
    assert len(expressions) > 20 and len(alerts) == 3
    named = [set(re.findall(r"\blsgd_\w+", text)) for text in (*expressions, *alerts)]
    assert set().union(*named) <= there, set().union(*named) - there
    assert len([names for names in named if names]) == len(named) - 1  # but for the choice of a data source
    states = set(re.findall(r'state=~?"([\w|]+)"', "".join(expressions + alerts)))
    assert {each for group in states for each in group.split("|")} <= {*WORKER_STATES, *metrics.RUN_STATES}


@promtool
def test_prometheus_finds_nothing_wrong_with_them() -> None:
    def check(*arguments, **options):
        done = subprocess.run(
            ["promtool", *arguments], capture_output=True, cwd=DEPLOYED, timeout=scaled(60), **options
        )
        assert (done.returncode, done.stderr.decode()) == (0, ""), done.stdout

    check("check", "metrics", input=exposition(fed().view))
    check("check", "config", "prometheus.yml")


@promtool
def test_alerts_fire_when_they_should_and_not_after_the_end(tmp_path) -> None:
    """In minutes: it trains until 10, stands until 30, with a worker gone from 20; trains until 40; then it is over."""
    shutil.copy(DEPLOYED / "alerts.yml", tmp_path)
    run, alert = '{job="lsgd", instance="x"}', "- {eval_time: %sm, alertname: Lsgd%s, exp_alerts: [%s]}"
    labels = 'exp_labels: {job: lsgd, instance: x, severity: %s}, exp_annotations: {summary: "%s", description: "%s"}'
    no_iterations = labels % (
        "critical",
        "The run at x makes no iterations.",
        "It has made none for ten minutes. What it waits for: lsgd status",
    )
    gone = (
        labels
        % (
            "warning",
            "node0/worker1 is left: the run continues without it.",
            "Why, and since when: lsgd status --json, and the log of the global server.",
        )
    ).replace("instance: x", "instance: x, worker: node0/worker1, state: left")
    down = labels % (
        "critical",
        "The global server, or lsgd metrics beside it, is silent at x.",
        "Workers wait for it server_timeout_s, then they save and end. Start it again with its journal.",
    )
    series = {
        "lsgd_iterations_total": "0+60x10 600x20 660+60x10 1260x60",
        'lsgd_run_state{state="running"}': "1x40 0x60",
        'lsgd_run_state{state="over"}': "0x40 1x60",
        'lsgd_worker_state{state="left", worker="node0/worker1"}': "0x20 1x80",
        "lsgd_connected": "1x34 0x5 1 0x60",
        "up": "1x41 0x60",
    }
    rows = [
        f"      - {{series: '{name.partition('{')[0]}{{{run[1:-1]}{', ' * ('{' in name)}"
        f"{name.partition('{')[2].rstrip('}')}}}', values: '{values}'}}"
        for name, values in series.items()
    ]
    tests = [
        alert % (9, "NoIterations", ""),
        alert % (25, "NoIterations", f"{{{no_iterations}}}"),
        alert % (40, "NoIterations", ""),
        alert % (18, "WorkerGone", ""),
        alert % (30, "WorkerGone", f"{{{gone}}}"),
        alert % (50, "WorkerGone", ""),
        alert % (30, "ServerDown", ""),
        alert % (38, "ServerDown", f"{{{down}}}"),
        alert % (60, "ServerDown", ""),
    ]
    head = "rule_files: [alerts.yml]\nevaluation_interval: 1m\ntests:\n  - interval: 1m\n    input_series:\n"
    text = head + "\n".join(rows) + "\n    alert_rule_test:\n" + textwrap.indent("\n".join(tests), " " * 6) + "\n"
    (tmp_path / "tests.yml").write_text(text)
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60)
    )
    assert done.returncode == 0, done.stdout + done.stderr
