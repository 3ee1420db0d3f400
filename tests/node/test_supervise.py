"""A node with real processes: shells that print, fail, are killed, or leave something behind.

test_node.py has what a node does then, on a clock that its tests move.
"""

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lsgd.node import transcript as module
from lsgd.node.screen import CONTROL, Screen
from lsgd.node.transcript import MAX_LINE_NCHARS, Transcript
from tests import golden

from ..integration.running import holders, until
from ..server.test_output import fill, read
from ..speed import scaled

DRIVER = """
import json, os, signal, sys
from contextlib import closing
from functools import partial
from pathlib import Path
from lsgd import output
from lsgd.node import node, restarts
from lsgd.node.allegiance import Allegiance, State
from lsgd.node.process import Command, Process, Role
from lsgd.node.screen import Screen
from lsgd.node.transcript import Reading
from lsgd.protocol.processes import Processes
from lsgd.server.daemon import Signals

here, scripts, options = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
vars(node).update(options["patience"])
vars(restarts).update(options["patience"])
vars(output).update(options["output"])


class Local:
    # The local server: its words to the others are files.
    failure, outcome, over, finished = "", "", False, "server" not in scripts
    joined = ended = set(scripts)
    heard_at, rounds_at = None, {}
    next_is_due = wanted = False
    allegiance = Allegiance(State.SERVING if "server" in scripts else State.FOLLOWING)
    processes = Processes()
    sources = (processes,)
    workers = following = uplink = of_run = property(lambda self: self)

    def turn(self):
        self.processes.ended()

    def upon(self, event):
        pass

    def stop_run(self, reason):
        (here / "stop").touch()

    def end(self, reason):
        self.finished = True

    def give_up(self):
        pass

    def close(self):
        pass


commands = [
    Command(
        name,
        ["bash", "-c", script],
        os.environ,
        here / f"{name}.log",
        Role.SERVER if name == "server" else Role.WORKER,
        name == "bar",
        options["restarts"],
    )
    for name, script in scripts.items()
]
with closing(Screen()) as screen, closing(Reading()) as reading:
    node = node.Node("node0", commands, Local(), partial(Process, screen=screen, reading=reading), screen.say)
    node.run(Signals(signal.SIGHUP))
sys.exit(node.conclude()[0])
"""
FOREVER = "while :; do sleep 0.05; done"
TOLD = "until [ -e $HERE/stop ]; do sleep 0.05; done"
SERVER = f"stops() {{ echo stopped; touch $HERE/over; exit 0; }}; trap stops INT TERM; touch $HERE/up; {TOLD}; stops"
WORKER = "until [ -e $HERE/over ]; do sleep 0.05; done; echo saved"
STUBBORN = f"trap '' INT TERM; touch $HERE/$$.ready; {FOREVER}"


class Supervised:
    """A supervisor in a process of its own; all that it starts is known by a variable."""

    def __init__(self, folder: Path, scripts: dict[str, str], stdout: int, options: dict[str, object]) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        patience = {"SAVE_PATIENCE_S": 0.3, **options.pop("patience", {})}  # type: ignore[dict-item]
        plain = {"output": {}, "restarts": 0}
        options = {**plain, "patience": patience, **options}
        environ = {
            **os.environ,
            "HERE": str(folder),
            "SUPERVISED": self.token,
            "LSGD_LOCAL": self.token,
            "TERM": "xterm",
        }
        arguments = [str(folder), json.dumps(scripts), json.dumps(options)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            env=environ,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )

    def left(self) -> list[int]:
        """Return the processes that are there."""
        return holders(self.token)

    def finish(self) -> tuple[int, str, str]:
        """Return exit status, output and errors, when it has ended and left nothing behind."""
        out, err = self.process.communicate(timeout=scaled(60))
        assert self.left() == []
        return self.process.returncode, (out or b"").decode(), err.decode()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    """Start a supervisor of shell scripts by name; ``server...`` are servers, ``bar`` may have a terminal."""
    started: list[Supervised] = []

    def start(stdout: int = subprocess.PIPE, **arguments: object) -> Supervised:
        known = ("patience", "output", "restarts")
        options = {key: arguments.pop(key) for key in known if key in arguments}
        started.append(Supervised(tmp_path, arguments, stdout, options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for supervised in started:
        supervised.process.kill()
        supervised.process.communicate()
        until(lambda: not supervised.left(), "all processes are gone")  # noqa: B023


def test_output_has_prefixes_and_logs(start, tmp_path):
    status, out, err = start(server="echo one; echo two >&2", worker="printf 'no newline'").finish()
    assert status == 0
    assert [line for line in out.splitlines() if "server" in line] == ["[server] one", "[server] two"]
    assert "[worker] no newline\n" in out
    assert (tmp_path / "server.log").read_text() == "one\ntwo\n"
    assert (tmp_path / "worker.log").read_text() == "no newline\n"
    assert err == ""


def test_failure_stops_the_run_and_is_reported(start):
    failing = "until [ -e $HERE/up ]; do sleep 0.02; done; for i in $(seq 30); do echo line $i; done; exit 7"
    status, out, err = start(server=SERVER, good=WORKER, bad=failing).finish()
    assert status == 7
    assert golden.text("node.failed_7") in err
    assert "    line 30\n" in err and "    line 11\n" in err
    assert "line 10\n" not in err
    assert out.index("[server] stopped") < out.index("[good] saved")
    assert "SIGTERM to good" not in out


def test_killed_process_is_started_again(start, tmp_path):
    """Both die once; the worker is the one that ends the run when it has come back."""
    once = "if [ ! -e $HERE/{0} ]; then touch $HERE/{0}; echo dies; kill -KILL $$; fi; echo lives; "
    scripts = {
        "server": once.format("server") + SERVER,
        "worker": once.format("worker") + "until [ -e $HERE/up ]; do sleep 0.05; done",
    }
    status, out, _ = start(**scripts, restarts=1, patience={"LINGER_S": 0.2}).finish()
    assert status == 0
    assert golden.text("node.worker_killed") in out and golden.text("node.restarting") in out
    for name in scripts:
        assert (tmp_path / f"{name}.log").read_text().splitlines()[:2] == ["dies", "lives"]


def test_first_signal_stops_the_run_through_the_server(start, tmp_path):
    supervised = start(server=SERVER, worker=WORKER)
    until((tmp_path / "up").exists, "the server is up")
    supervised.process.send_signal(signal.SIGHUP)
    status, out, _ = supervised.finish()
    assert status == 0
    assert out.index("[server] stopped") < out.index("[worker] saved")


def test_second_signal_kills_at_once(start, tmp_path):
    supervised = start(server=STUBBORN, worker=STUBBORN)
    until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "both are up")
    supervised.process.send_signal(signal.SIGINT)
    supervised.process.send_signal(signal.SIGTERM)
    status, out, _ = supervised.finish()
    assert status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert golden.text("node.killing") in out


def test_nothing_is_left_of_a_process_that_started_others(start, tmp_path):
    assert start(worker=f"bash -c '{FOREVER}' & echo started").finish()[0] == 0


def test_nothing_is_left_of_what_left_its_session(start, tmp_path):
    """Nor of what it starts when it is to end."""
    at_its_end = 'trap "sleep 600 & touch $HERE/more; exit" TERM'
    daemon = f"(setsid bash -c '{at_its_end}; touch $HERE/1.ready; {FOREVER}' 2>/dev/null &); (true &)"
    ready = "until [ -e $HERE/1.ready ]; do sleep 0.05; done"
    script = f"{daemon}; {ready}; echo started; until [ -e $HERE/go ]; do sleep 0.05; done"
    supervised = start(worker=script, patience={"ORPHAN_PATIENCE_S": 20.0})
    until((tmp_path / "1.ready").exists, "the daemon is up")
    until(lambda: not zombies(supervised.process.pid), "who has ended is let go")
    (tmp_path / "go").touch()
    status, out, _ = supervised.finish()
    assert (tmp_path / "more").exists()
    assert status == 0 and golden.text("node.left_running") in out


def zombies(parent: int) -> list[int]:
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):  # let go just now
            found += [child.pid] * (child.status() == psutil.STATUS_ZOMBIE)
    return found


def test_killed_launcher_leaves_no_process(start, tmp_path):
    offspring = f"bash -c 'touch $HERE/$$.ready; {FOREVER}' & {STUBBORN}"
    supervised = start(server=STUBBORN, worker=offspring)
    until(lambda: len(list(tmp_path.glob("*.ready"))) == 3, "all are up")
    supervised.process.kill()
    until(lambda: not supervised.left(), "all processes are gone")


def test_lost_output_ends_nothing(start, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    supervised = start(stdout=writing, worker="echo one; sleep 0.2; echo two")
    os.close(writing)
    assert supervised.finish()[0] == 0
    assert (tmp_path / "worker.log").read_text() == "one\ntwo\n"


def test_unread_output_ends_and_delays_nothing(start, tmp_path):
    reading, writing = os.pipe()
    supervised = start(stdout=writing, worker="seq 100000; touch $HERE/done; echo end")
    os.close(writing)
    assert supervised.process.wait(scaled(60)) == 0
    os.close(reading)
    assert (tmp_path / "done").exists()
    assert (tmp_path / "worker.log").read_text().splitlines() == [*map(str, range(1, 100001)), "end"]


def test_lines_that_nobody_read_are_counted(start, tmp_path):
    reading, writing = os.pipe()
    full_nbytes = fill(writing)
    script = "seq 100000; touch $HERE/done; until [ -e $HERE/read ]; do sleep 0.05; done; echo end"
    supervised = start(stdout=writing, worker=script, output={"MAX_WAITING_NCHARS": 100_000})
    os.close(writing)
    until((tmp_path / "done").exists, "all is printed")
    until(lambda: (tmp_path / "worker.log").read_text().endswith("\n100000\n"), "all is in the log")
    read(reading, full_nbytes)
    with os.fdopen(reading) as stream:
        lines = []
        for line in stream:
            lines.append(line)
            if len(lines) == 5000:  # most of what waited
                (tmp_path / "read").touch()
    assert supervised.finish()[0] == 0
    (missing,) = [int(line.split()[1]) for line in lines if golden.text("node.lines_skipped") in line]
    assert missing > 10_000 and missing + len(lines) - 1 == 100_001
    assert lines[-1] == "[worker] end\n"


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(start, tmp_path):
    (tmp_path / "worker.log").symlink_to("/dev/full")
    status, out, _ = start(server="echo one", worker="echo two; echo three; echo four").finish()
    assert status == 0
    assert [line for line in out.splitlines() if "[worker]" in line] == [
        f"[worker] {n}" for n in ("two", "three", "four")
    ]
    assert out.count(golden.text("node.log_full")) == 1
    assert golden.text("node.lines_missing", path=tmp_path) in out
    assert (tmp_path / "server.log").read_text() == "one\n"


def test_a_disk_that_hangs_holds_up_nothing_but_output(start, tmp_path):
    """A pipe without a reader takes the place of the log: who opens it waits."""
    os.mkfifo(tmp_path / "worker.log")
    once = "if [ ! -e $HERE/once ]; then touch $HERE/once; kill -KILL $$; fi; echo again; touch $HERE/done"
    supervised = start(server=SERVER, worker=once, restarts=1, patience={"LINGER_S": 0.1})
    until((tmp_path / "done").exists, "the worker is killed, and started again")
    with open(os.open(tmp_path / "worker.log", os.O_RDWR), "rb", buffering=0) as log:
        assert log.read(100) == b"again\n"
        assert supervised.finish()[0] == 0


def test_a_log_goes_on_when_there_is_space_again(start, tmp_path):
    """A limit of the system takes the place of a full disk: it can be lifted."""
    waits = "until [ -e $HERE/{0} ]; do sleep 0.05; done; "
    script = waits.format("limited") + "seq 2000; " + waits.format("lifted") + "echo end"
    supervised = start(worker=script)
    pid, limit = supervised.process.pid, resource.prlimit(supervised.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, limit[1]))
    (tmp_path / "limited").touch()
    assert b"[worker] 2000\n" in supervised.process.stdout  # a line is shown once the log has it, or has lost it
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    (tmp_path / "lifted").touch()
    status, out, _ = supervised.finish()
    assert status == 0
    *whole, told, end = (tmp_path / "worker.log").read_text().splitlines()
    assert end == "end" and whole == [str(n) for n in range(1, len(whole) + 1)]
    missing = 2000 - len(whole)
    assert told == golden.text("node.missing_here", missing=missing)
    assert golden.text("node.written_again", missing=missing) in out


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
    return [CONTROL.sub("", line) for line in lines]


class TestTranscript:
    """Bytes in, lines out."""

    @pytest.fixture
    def made(self, tmp_path: Path, monkeypatch) -> Iterator[tuple[Transcript, Callable[[], bytes]]]:
        """Return a transcript, and what ends it and returns all that was shown, in a file that nobody else has."""
        path = tmp_path / "shown"
        with path.open("w") as file:
            with monkeypatch.context() as here:
                here.setattr(sys, "stdout", file)
                screen = Screen()
            transcript = Transcript(screen, "w", tmp_path / "w.log", 0, live=False)

            def shown() -> bytes:
                transcript.close()
                screen.close()
                assert screen._output.flush(60.0)
                return path.read_bytes()

            yield transcript, shown

    def test_characters_and_lines_may_come_in_pieces(self, made):
        transcript, shown = made
        for byte in "größe\r\nzwei\n".encode():
            transcript.feed(bytes([byte]))
        transcript.feed(b"\xff\n")
        assert shown().decode().splitlines() == ["[w] größe", "[w] zwei", "[w] \ufffd"]

    def test_overwritten_line_is_shown_now_and_then(self, made, monkeypatch):
        transcript, shown = made
        monkeypatch.setattr(module, "OVERWRITTEN_EVERY_S", 1e9)
        transcript.feed(b"\r 1%")
        transcript.feed(b"\r 2%")
        monkeypatch.setattr(module, "OVERWRITTEN_EVERY_S", 0.0)
        transcript.feed(b"\r 3%")
        transcript.feed(b"\r100%\n")
        assert shown() == b"[w]  3%\n[w] 100%\n"

    def test_the_end_of_a_terminal_is_no_line(self, tmp_path, capfd):
        screen = Screen()
        transcript = Transcript(screen, "w", tmp_path / "w.log", 0, live=True)
        transcript.feed(b"\r100%\r\n")
        transcript.close()
        screen.close()  # nothing of it is shown in the next test
        assert (tmp_path / "w.log").read_text() == "100%\n"

    def test_colours_go_where_there_is_no_terminal(self, made):
        transcript, shown = made
        transcript.feed(b"\x1b[31mred\x1b[0m\n\x1b[?25h\n\n")
        assert shown() == b"[w] red\n[w] \n"

    def test_a_line_without_an_end_is_cut(self, made, tmp_path):
        transcript, shown = made
        for _ in range(5 * MAX_LINE_NCHARS // 2):
            transcript.feed(b"x")
        transcript.feed(b"end\n")
        lines = shown().decode().splitlines()
        assert [len(line) - len("[w] ") <= MAX_LINE_NCHARS + 1 for line in lines] == [True] * 3
        assert (tmp_path / "w.log").read_text().replace("\n", "") == "x" * (5 * MAX_LINE_NCHARS // 2) + "end"
