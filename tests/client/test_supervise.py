"""The supervisor with real processes: shells that print, fail, refuse to end, or leave something behind."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lsgd.client import screen
from lsgd.client.screen import Screen, Transcript

DRIVER = """
import json, os, sys
from pathlib import Path
from lsgd.client import supervise
from lsgd.client.process import Command

folder, scripts, options = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
vars(supervise).update(options["patience"])
commands = [
    Command(
        name,
        ["bash", "-c", script],
        os.environ,
        folder / f"{name}.log",
        "server" in name,
        name == "bar",
        options["restarts"],
    )
    for name, script in scripts.items()
]
sockets = folder / "sockets"
sockets.mkdir()
sys.exit(supervise.Supervisor(commands, stops_run="server", linger=options["linger"], folder=sockets).run())
"""
FOREVER = "while :; do sleep 0.05; done"
SERVER = f"trap 'echo stopped; touch $HERE/over; exit 0' TERM; touch $HERE/up; {FOREVER}"
WORKER = "until [ -e $HERE/over ]; do sleep 0.05; done; echo saved"
STUBBORN = f"trap '' TERM; touch $HERE/$$.ready; {FOREVER}"


class Supervised:
    """A supervisor in a process of its own; all that it starts is known by a variable."""

    def __init__(
        self, folder: Path, scripts: dict[str, str], stdout: int, options: dict[str, object]
    ) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        options = {"patience": {}, "linger": False, "restarts": 0, **options}
        environ = {**os.environ, "HERE": str(folder), "SUPERVISED": self.token, "TERM": "xterm"}
        arguments = [str(folder), json.dumps(scripts), json.dumps(options)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            env=environ,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )

    def left(self) -> list[int]:
        """Return the processes that are there."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.token.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def finish(self) -> tuple[int, str, str]:
        """Return exit status, output and errors, when it has ended and left nothing behind."""
        out, err = self.process.communicate(timeout=60)
        assert self.left() == []
        assert not (self.folder / "sockets").exists()
        return self.process.returncode, (out or b"").decode(), err.decode()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    """Start a supervisor of shell scripts by name; ``server...`` are servers, ``bar`` may have a terminal."""
    started: list[Supervised] = []

    def start(stdout: int = subprocess.PIPE, **arguments: object) -> Supervised:
        options = {key: arguments.pop(key) for key in ("patience", "linger", "restarts") if key in arguments}
        started.append(Supervised(tmp_path, arguments, stdout, options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for supervised in started:
        supervised.process.kill()
        supervised.process.communicate()
        until(lambda: not supervised.left(), "all processes are gone")  # noqa: B023


def until(condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def test_output_has_prefixes_and_logs(start, tmp_path):
    status, out, err = start(server="echo one; echo two >&2", worker="printf 'no newline'").finish()
    assert status == 0
    assert [line for line in out.splitlines() if "server" in line] == ["[server] one", "[server] two"]
    assert "[worker] no newline\n" in out
    assert (tmp_path / "server.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "worker.log").read_text() == "no newline\n"
    assert err == ""


def test_failure_ends_the_others_and_is_reported(start):
    failing = "for i in $(seq 30); do echo line $i; done; sleep 0.2; exit 7"
    status, out, err = start(server=SERVER, good=FOREVER, bad=failing).finish()
    assert status == 7
    assert "bad failed with exit code 7" in err
    assert "    line 30\n" in err and "    line 11\n" in err
    assert "line 10\n" not in err
    assert out.index("SIGTERM to good") < out.index("SIGTERM to server")
    assert "[server] stopped" in out


def test_killed_process_is_a_failure_with_its_signal(start):
    status, _, err = start(worker="kill -KILL $$").finish()
    assert status == 128 + signal.SIGKILL
    assert "worker was killed by SIGKILL (was memory short?)" in err
    assert "(nothing)" in err


def test_killed_process_is_started_again(start, tmp_path):
    """Both die once; the worker is the one that ends the run when it has come back."""
    once = "if [ ! -e $HERE/{0} ]; then touch $HERE/{0}; echo dies; kill -KILL $$; fi; echo lives; "
    scripts = {
        "server": once.format("server") + SERVER,
        "worker": once.format("worker") + "until [ -e $HERE/server ]; do sleep 0.05; done",
    }
    status, out, _ = start(**scripts, restarts=1, patience={"LINGER_S": 0.2}).finish()
    assert status == 0
    assert "worker was killed by SIGKILL" in out and "it is started again in 1 s (0 more times)" in out
    for name in scripts:
        assert (tmp_path / f"{name}.log").read_text().splitlines()[:2] == ["dies", "lives"]


def test_a_worker_that_the_run_left_out_is_started_again(start, tmp_path):
    again = f"test -e {tmp_path}/mark && exit 0; touch {tmp_path}/mark; exit 76"
    status, out, _ = start(worker=again, restarts=1).finish()
    assert status == 0
    assert "worker was left out of the run; it is started again in 1 s (0 more times)" in out


def test_process_that_is_killed_too_often_is_a_failure(start):
    status, out, _ = start(server=SERVER, worker="echo here; kill -KILL $$", restarts=1).finish()
    assert status == 128 + 9
    assert out.count("[worker] here") == 2


def test_process_that_fails_by_itself_is_not_started_again(start):
    status, out, _ = start(server=SERVER, worker="echo here; exit 3", restarts=5).finish()
    assert status == 3
    assert out.count("[worker] here") == 1


def test_worker_that_gave_its_servers_up_ends_the_node_with_its_code(start):
    status, out, err = start(server=SERVER, worker="echo here; exit 75", restarts=5).finish()
    assert status == 75
    assert out.count("[worker] here") == 1
    assert "worker gave up waiting for its servers (exit code 75)" in err


def test_failed_server_ends_the_workers(start):
    status, _, err = start(server="exit 4", worker=FOREVER).finish()
    assert status == 4
    assert "server failed with exit code 4" in err


def test_process_that_refuses_to_end_is_killed(start):
    bad = 'until compgen -G "$HERE/*.ready" >/dev/null; do sleep 0.02; done; exit 5'
    status, out, _ = start(bad=bad, stubborn=STUBBORN, patience={"TERM_PATIENCE_S": 0.5}).finish()
    assert status == 5
    assert "SIGKILL to stubborn" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_stops_the_run_through_the_server(start, tmp_path, number):
    supervised = start(server=SERVER, worker=WORKER)
    until((tmp_path / "up").exists, "the server is up")
    supervised.process.send_signal(number)
    status, out, _ = supervised.finish()
    assert status == 0
    assert out.index("[server] stopped") < out.index("[worker] saved")


def test_worker_that_does_not_follow_the_server_is_ended(start, tmp_path):
    supervised = start(server=SERVER, worker=FOREVER, patience={"STOP_PATIENCE_S": 0.3})
    until((tmp_path / "up").exists, "the server is up")
    supervised.process.send_signal(signal.SIGINT)
    status, out, _ = supervised.finish()
    assert status == 128 + signal.SIGINT
    assert "SIGTERM to worker" in out


def test_server_that_cannot_stop_the_run_is_not_waited_for(start, tmp_path):
    supervised = start(server=f"trap 'exit 1' TERM; touch $HERE/up; {FOREVER}", worker=FOREVER)
    until((tmp_path / "up").exists, "the server is up")
    began = time.monotonic()
    supervised.process.send_signal(signal.SIGTERM)
    status, _, _ = supervised.finish()
    assert status == 128 + signal.SIGTERM
    assert time.monotonic() - began < 60


def test_second_signal_kills_at_once(start, tmp_path):
    supervised = start(server=STUBBORN, worker=STUBBORN)
    until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "both are up")
    supervised.process.send_signal(signal.SIGINT)
    supervised.process.send_signal(signal.SIGTERM)
    status, out, _ = supervised.finish()
    assert status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "SIGKILL to server, worker" in out


def test_servers_end_after_the_workers(start):
    status, out, _ = start(server=SERVER, worker="echo done", patience={"LINGER_S": 0.2}).finish()
    assert status == 0
    assert out.index("the workers have ended without the end of the run") < out.index("SIGTERM to server")


def test_server_that_goes_on_after_the_stop_is_ended_soon(start, tmp_path):
    deaf = f"trap 'test -e $HERE/over && exit 0; touch $HERE/over' TERM; touch $HERE/up; {FOREVER}"
    supervised = start(server=deaf, worker=WORKER, patience={"LINGER_S": 0.2})
    until((tmp_path / "up").exists, "the server is up")
    supervised.process.send_signal(signal.SIGINT)
    status, out, _ = supervised.finish()
    assert status == 0
    assert out.count("SIGTERM to server") == 2


def test_servers_that_other_nodes_need_go_on(start, tmp_path):
    supervised = start(server=SERVER, worker="touch $HERE/done", linger=True, patience={"LINGER_S": 0.0})
    until((tmp_path / "done").exists, "the worker has ended")
    with pytest.raises(subprocess.TimeoutExpired):
        supervised.process.wait(0.5)
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.finish()[0] == 0


def test_nothing_is_left_of_a_process_that_started_others(start, tmp_path):
    assert start(worker=f"bash -c '{FOREVER}' & echo started").finish()[0] == 0


def test_killed_launcher_leaves_no_process(start, tmp_path):
    offspring = f"bash -c 'touch $HERE/$$.ready; {FOREVER}' & {STUBBORN}"
    supervised = start(server=STUBBORN, worker=offspring)
    until(lambda: len(list(tmp_path.glob("*.ready"))) == 3, "all are up")
    supervised.process.kill()
    until(lambda: not supervised.left(), "all processes are gone")
    assert not (tmp_path / "sockets").exists()


def test_lost_output_ends_nothing(start, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    supervised = start(stdout=writing, worker="echo one; sleep 0.2; echo two")
    os.close(writing)
    assert supervised.finish()[0] == 0
    assert (tmp_path / "worker.log").read_text() == "one\ntwo\n"


def test_progress_bar_stays_below_the_lines_of_the_others(start, tmp_path):
    bar = textwrap.dedent("""
        import os, pathlib, time
        from rich.progress import Progress
        with Progress() as progress:
            task = progress.add_task("training", total=10)
            for step in range(10):
                progress.update(task, advance=1, refresh=True)
                if step == 4:
                    print("half", flush=True)
                    pathlib.Path(os.environ["HERE"], "half").touch()
                    while not pathlib.Path(os.environ["HERE"], "said").exists():
                        time.sleep(0.02)
    """)
    (tmp_path / "bar.py").write_text(bar)
    other = "until [ -e $HERE/half ]; do sleep 0.02; done; echo between; sleep 0.3; touch $HERE/said"
    reading, writing = pty.openpty()
    supervised = start(stdout=writing, bar=f"exec '{sys.executable}' $HERE/bar.py", other=other)
    os.close(writing)
    shown = b""
    try:
        while data := os.read(reading, 4096):
            shown += data
    except OSError:  # the terminal's end
        pass
    os.close(reading)
    assert supervised.finish()[0] == 0
    lines = rendered(shown.decode())
    assert "[other] between" in lines
    assert any(line.startswith("[bar] training") and "100%" in line for line in lines)
    assert sum("training" in line for line in lines) == 1, lines
    log = (tmp_path / "bar.log").read_text()
    assert "half\n" in log and "\x1b" not in log and "\r" not in log


def rendered(output: str) -> list[str]:
    """Return the lines that a terminal shows, where only the last one was ever rewritten."""
    lines = [line.rstrip("\r").rpartition("\x1b[2K")[2] for line in output.split("\n")]
    return [screen._CONTROL.sub("", line) for line in lines]


class TestTranscript:
    """Bytes in, lines out."""

    @pytest.fixture
    def transcript(self, tmp_path: Path) -> Iterator[Transcript]:
        with contextlib.closing(Transcript(Screen(), "w", tmp_path / "w.log", 0, live=False)) as transcript:
            yield transcript

    def test_characters_and_lines_may_come_in_pieces(self, transcript, capsysbinary):
        for byte in "größe\r\nzwei\n".encode():
            transcript.feed(bytes([byte]))
        transcript.feed(b"\xff\n")
        assert capsysbinary.readouterr().out.decode().splitlines() == ["[w] größe", "[w] zwei", "[w] \ufffd"]

    def test_overwritten_line_is_shown_now_and_then(self, transcript, capsysbinary, monkeypatch):
        monkeypatch.setattr(screen, "OVERWRITTEN_EVERY_S", 1e9)
        transcript.feed(b"\r 1%")
        transcript.feed(b"\r 2%")
        assert capsysbinary.readouterr().out == b""
        monkeypatch.setattr(screen, "OVERWRITTEN_EVERY_S", 0.0)
        transcript.feed(b"\r 3%")
        assert capsysbinary.readouterr().out == b"[w]  3%\n"
        transcript.feed(b"\r100%\n")
        assert capsysbinary.readouterr().out == b"[w] 100%\n"

    def test_colours_go_where_there_is_no_terminal(self, transcript, capsysbinary):
        transcript.feed(b"\x1b[31mred\x1b[0m\n\x1b[?25h\n\n")
        assert capsysbinary.readouterr().out == b"[w] red\n[w] \n"
