"""``lsgd status``, ``set``, ``stop`` and ``algorithms``: what they say of a real server, and of none."""

import errno
import fcntl
import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from rich.console import Console

from lsgd.algorithms import ALGORITHMS
from lsgd.cli.commands import main
from lsgd.protocol.events import Event, RunProgress
from lsgd.protocol.keys import KeyRing, parse_token, token_path
from lsgd.protocol.sockets import new_key_pair
from lsgd.run_folder import claimed, find_live
from lsgd.server.reasons import Why
from lsgd.settings import fields
from lsgd.settings import shown as shown_value
from lsgd.watch import terminal
from lsgd.watch.view import RunView
from tests import golden

from ..integration.running import Cluster, until

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def lsgd(servers):
    """Run a command of ``lsgd`` against the server; return its exit code and what it prints."""

    def run(name, *arguments, connect=servers.address):
        done = CliRunner().invoke(main, [name, "--connect", connect, *arguments])
        return done.exit_code, done.output

    return run


def test_status_says_what_the_run_waits_for(lsgd):
    code, output = lsgd("status")
    assert code == 0
    state, iterations, run, period = output.splitlines()
    assert state == golden.text("operate.waiting")
    assert iterations == golden.text("operate.progress_0")
    assert run.endswith(golden.text("operate.rounds_0"))
    assert period == "period 8: as planned"


def test_healthy_is_a_server_that_answers(tmp_path):
    own = Cluster(tmp_path)
    server = own.start_global("--workers", "1", "--iterations", "100")

    def healthy():
        done = CliRunner().invoke(main, ["status", "--healthy", "--connect", own.address])
        return done.exit_code, done.output

    def answers():
        code, output = healthy()
        return output if code == 0 else ""

    try:
        output = until(answers, "the server answers within 1 s")
        assert output.startswith("healthy: run ") and "is waiting, 0 iterations" in output
        server.send(signal.SIGSTOP)
        code, output = healthy()
        assert code == 1 and golden.text("operate.no_answer", address=own.address) in output
        server.send(signal.SIGCONT)
        until(answers, "it answers again")
        server.send(signal.SIGKILL)
        server.wait()
        assert healthy()[0] == 1
    finally:
        own.close()


def test_the_run_is_found_by_its_folder(servers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(main, ["stop"])
    assert refused.exit_code == 1
    assert golden.text("operate.none_in_folder") in refused.output
    mine, other = Path("runs", "mine"), Path("runs", "other")
    with claimed(other, 0, "tcp://127.0.0.1:9"), claimed(mine, 0, servers.address):
        os.utime(other / "node0.lock", (1, 1))
        for arguments in ([], ["--run", "runs"], ["--run", str(mine)]):
            done = CliRunner().invoke(main, ["status", *arguments])
            assert (
                done.exit_code == 0 and golden.text("operate.run_at", path=mine, address=servers.address) in done.stderr
            )
            assert json.loads(CliRunner().invoke(main, ["status", "--json", *arguments]).stdout)["run"]
        monkeypatch.setattr(os, "getuid", lambda: 12345)  # somebody else's
        assert CliRunner().invoke(main, ["stop", "--run", str(mine)]).exit_code == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert golden.text("operate.launcher_killed") in CliRunner().invoke(main, ["status"]).stdout  # it has ended
    assert CliRunner().invoke(main, ["set", "period=8"]).exit_code == 1


def test_the_status_of_a_run_that_has_ended_is_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs", "ended")
    with claimed(folder, 0, "tcp://127.0.0.1:9"):
        pass
    member = {
        "worker": "node0/worker0",
        "node": 0,
        "rank": -1,
        "state": "left",
        "reason": "the run is over",
        "code": "",
    }
    member |= {"done": 900, "loss": 0.5, "times_leader": 0, "heard_s_ago": 1.0}
    result = {"run": "r", "state": "finished", "code": "all_made", "reason": "all 900 iterations are done"}
    result |= {"count": 900, "iterations": 900, "seconds": 9.0, "algorithm": "local", "members": [member]}
    (folder / "result.json").write_text(json.dumps(result))
    for arguments in ([], ["--watch"], ["--run", str(folder)]):
        done = CliRunner().invoke(main, ["status", *arguments])
        assert done.exit_code == 0 and golden.text("operate.has_ended", path=folder) in done.stderr
        assert golden.text("operate.finished_900") in done.stdout
    assert json.loads(CliRunner().invoke(main, ["status", "--json"]).stdout)["reason"] == result["reason"]
    monkeypatch.setattr("lsgd.watch.reader.ANSWER_WITHIN_S", 0.2)
    with claimed(folder, 0, "tcp://127.0.0.1:9"):  # its launcher waits until the store has all
        assert find_live(Path("runs"))[0] == folder, "the result is that of the run before"
        assert json.loads(CliRunner().invoke(main, ["runs", "--json"]).stdout)[0]["state"] == "running"
        (folder / "result.json").write_text(json.dumps(result))
        assert "finished: all 900" in CliRunner().invoke(main, ["status"]).stdout
        assert "finished" in CliRunner().invoke(main, ["runs"]).stdout
        assert CliRunner().invoke(main, ["status", "--healthy"]).exit_code == 1
        assert golden.text("operate.none_running") in CliRunner().invoke(main, ["stop"]).output
    refused = CliRunner().invoke(main, ["status", "--healthy"])
    assert refused.exit_code == 1 and golden.text("operate.none_running") in refused.output
    assert CliRunner().invoke(main, ["stop"]).exit_code == 1


def test_a_look_at_a_run_folder_keeps_no_launcher_from_it(tmp_path, monkeypatch):
    with claimed(tmp_path, 0, "tcp://127.0.0.1:9"):
        pass
    with (tmp_path / "node0.lock").open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: fcntl.flock(looked_at, fcntl.LOCK_UN))
        monkeypatch.setattr("lsgd.run_folder.time", clock)
        with claimed(tmp_path, 0, "tcp://127.0.0.1:9"):
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_disk_without_locks_refuses_no_launcher_and_hides_no_run(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with claimed(tmp_path, 1, "tcp://127.0.0.1:9"):
        assert find_live(tmp_path) == (tmp_path, "tcp://127.0.0.1:9", b"")


def test_an_address_needs_no_scheme(lsgd, servers):
    assert lsgd("status", connect=servers.address.removeprefix("tcp://"))[0] == 0


def test_status_as_json(lsgd):
    code, output = lsgd("status", "--json")
    status = json.loads(output)
    assert code == 0
    assert (status["state"], status["count"], status["members"]) == ("waiting", 0, [])


def test_the_table_of_members():
    member = {"worker": "node0/worker0", "rank": 0, "state": "live", "done": 12, "loss": 0.123456}
    member |= {"times_leader": 3, "heard_s_ago": 0.04, "node": 0, "reason": "", "code": ""}
    away = member | {"worker": "node0/worker1", "rank": -1, "state": "left", "loss": None}
    status = {"run": "r", "algorithm": "leader", "state": "running", "reason": "why", "iterations": 0}
    status |= {"count": 24, "seconds": 2.0, "rounds_global": 1, "rounds_local": 2, "generation": 1}
    status |= {"period": 24, "period_reason": "a round takes 1.2 s, a step 0.05 s", "code": "busy", "nodes": 1}
    status |= {"progress": 0.0, "loss": None, "leaders": [], "members": [member, away]}
    console = Console(width=80, file=io.StringIO())
    console.print(terminal.view(RunView(status)))
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["running: why", golden.text("operate.progress_24")]
    assert lines[2] == golden.text("operate.rounds_3")
    assert lines[3] == Why.PERIOD(period=24, delay="", reason=Why.MEASURED(round_s=1.2, step_s=0.05))
    assert lines[5].split() == ["node0/worker0", "0", "live", "12", "0.1235", "3", "0.0", "s"]
    assert lines[6].split() == ["node0/worker1", "-", "left", "12", "-", "3", "0.0", "s"]
    members = [each | {"times_leader": 0} for each in (member, away)]  # as without leaders
    console.print(terminal.view(RunView(status | {"algorithm": "local", "delay": 6, "members": members})))
    lines = console.file.getvalue().splitlines()
    assert lines[-2].split() == ["node0/worker0", "0", "live", "12", "0.1235", "0.0", "s"]
    assert Why.PERIOD(period=24, delay=" with a delay of 6", reason=Why.MEASURED(round_s=1.2, step_s=0.05)) in lines
    console.print(terminal.view(RunView(status | {"count": 20_024})))  # resumed
    assert golden.text("operate.progress_20024") in console.file.getvalue()
    still = RunView(status)
    for second in (3.0, 4.0):
        still.fold(Event(1, second, RunProgress(replace(still.now, seconds=second), ())))
    console.print(terminal.view(still))
    assert golden.text("operate.progress_still") in console.file.getvalue()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("outer_rate=0.5", "outer_rate is unknown; did you mean 'outer_lr'?"),
        ("compression=minmax8", golden.text("operate.fixed_compression")),
        ("outer_momentum=2", "outer_momentum = '2' is not in 0 … 1"),
        ("outer_lr=fast", "outer_lr = 'fast' is not a number"),
        ("outer_lr", golden.text("operate.name_value_outer_lr")),
        ("closing_share=2", "closing_share = '2' is not in 0 … 0.5"),
        ("period=automatic", golden.text("plan.no_integer_or_auto", setting="period = 'automatic'")),
        (
            "zzz=1",
            "zzz is unknown; known: closing_share, delay, drop_outliers, error_decay, iterations, ",
        ),
    ],
)
def test_a_change_that_cannot_be(lsgd, change, reason):
    code, output = lsgd("set", change)
    assert code != 0
    assert reason in output


def test_a_change(lsgd):
    code, output = lsgd("set", "outer_lr=0.5")
    assert code == 0
    assert "outer_lr = 0.5, after 0 iterations" in output


def test_several_changes_are_all_made_or_none(lsgd):
    code, output = lsgd("set", "period=4", "iterations=90", "outer_momentum=2")
    assert code == 1 and golden.text("operate.momentum_range") in output
    assert json.loads(lsgd("status", "--json")[1])["iterations"] == 100
    code, output = lsgd("set", "period=4", "iterations=90")
    assert code == 0 and golden.text("operate.set_two") in output
    assert json.loads(lsgd("status", "--json")[1])["iterations"] == 90
    assert lsgd("set", "iterations=100")[0] == 0


def test_stop_before_the_start_ends_the_servers(tmp_path):
    cluster = Cluster(tmp_path)
    try:
        server = cluster.start_global("--workers", "2")
        done = CliRunner().invoke(main, ["stop", "--connect", cluster.address, "--reason", "not today"])
        assert done.exit_code == 0, done.output
        assert golden.text("operate.stopping") in done.output
        assert Why.ENDED(reason="not today") in server.succeeds()
    finally:
        cluster.close()


@pytest.mark.parametrize("name", ["status", "stop", "set"])
def test_without_a_server_each_says_so(lsgd, monkeypatch, name):
    monkeypatch.setattr("lsgd.watch.reader.ANSWER_WITHIN_S", 0.2)
    arguments = ["outer_lr=1"] if name == "set" else []
    code, output = lsgd(name, *arguments, connect="tcp://127.0.0.1:9")
    assert code == 1
    assert output.startswith(golden.text("operate.no_answer_yet"))


def test_all_algorithms_with_their_bytes():
    done = CliRunner().invoke(main, ["algorithms", "--parameters", "1000000", "--workers", "2"])
    assert done.exit_code == 0
    lines = {line.split()[0]: line.split() for line in done.output.splitlines()[1:]}
    assert list(lines) == list(ALGORITHMS)
    megabytes = {name: float(words[1]) for name, words in lines.items()}
    assert megabytes["allreduce"] == 4.0  # 2 (n - 1) / n of 4 bytes a parameter
    assert megabytes["qsgd"] == pytest.approx(1 + 8 / 2048, abs=1e-3)
    assert megabytes["diloco"] == pytest.approx(4 / 64, abs=1e-3)
    assert megabytes["local"] == pytest.approx(1 / 4 + 2 / 64, abs=1e-3)
    assert " ".join(lines["local"]).endswith(golden.text("operate.auto_period"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_algorithm_with_its_settings(name):
    done = CliRunner().invoke(main, ["algorithms", name])
    assert done.exit_code == 0
    shown = {line.split()[0]: line.split()[1] for line in done.output.splitlines()[3:]}
    expected = {
        setting: json.dumps(shown_value(spec, spec.default)) for setting, spec in fields(ALGORITHMS[name]).items()
    }
    assert shown == expected


def test_an_algorithm_that_is_none():
    done = CliRunner().invoke(main, ["algorithms", "qsdg"])
    assert done.exit_code == 2
    assert golden.text("operate.unknown_algorithm") in done.output


def test_keygen_makes_a_token_for_each_node_and_tells_where(tmp_path):
    done = CliRunner().invoke(main, ["keygen", "--keys", str(tmp_path / "keys"), "--nodes", "3"])
    assert done.exit_code == 0
    *tokens, advice = done.output.splitlines()
    names = ["node0", "node1", "node2", "operator"]
    assert [line.split() for line in tokens] == [[n, str(tmp_path / "keys" / f"{n}.token")] for n in names]
    assert advice.endswith(f"--keys {tmp_path}/keys")
    assert {parse_token((tmp_path / "keys" / f"{n}.token").read_text(), n).name for n in names} == set(names)


def test_keygen_names_no_token_that_the_ring_of_a_node_that_took_over_lacks(tmp_path):
    ring = KeyRing.make(tmp_path / "keys", ["node0"])
    adopted = KeyRing.adopt(tmp_path / "node1-keys", new_key_pair()[1], ring.listed(), b"")
    folder = str(adopted.folder)
    for made_anew in (False, True):
        (adopted.folder / "certificate.pem").write_text("-----CERTIFICATE-----\n")
        done = CliRunner().invoke(main, ["keygen", "--keys", folder, "--nodes", "2"])
        node0, node1, *_ = done.output.splitlines()
        assert node1.split() == ["node1", f"{folder}/node1.token"]
        wanted = f"{folder}/node0.token" if made_anew else golden.text("operate.new_token", path=folder)
        assert node0.endswith(wanted) and (adopted.folder / "node0.token").exists() is made_anew
        (adopted.folder / "allowed").write_text("")


def test_a_command_takes_a_token_and_says_when_it_needs_one(tmp_path, monkeypatch):
    monkeypatch.setenv("LSGD_KEYS", str(tmp_path / "keys"))
    needs = CliRunner().invoke(main, ["status", "--connect", "tcp://192.0.2.1:1"])
    assert needs.exit_code == 1 and golden.text("operate.token_needed") in needs.output
    ring = KeyRing.make(tmp_path / "keys", ["operator"])
    cluster = Cluster(tmp_path)
    try:
        cluster.start_global("--keys", str(ring.folder))
        token = str(token_path("operator", ring.folder))
        done = CliRunner().invoke(main, ["stop", "--connect", cluster.address, "--token", token])
        assert done.exit_code == 0 and golden.text("operate.stopping_by") in done.output
    finally:
        cluster.close()
