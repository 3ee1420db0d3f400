"""The progress below the lines of ``lsgd launch``: what it says, how a terminal shows it, and where there is none."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lsgd.node import transcript
from lsgd.node.panel import frame, line
from lsgd.node.screen import TRACEBACK, Screen
from lsgd.node.transcript import Transcript
from lsgd.protocol.events import Event, RoundOrdered, RunProgress, WorkerProgress
from lsgd.watch.reader import Batch
from lsgd.watch.view import RunView
from tests import golden

from ..integration.running import LIGHT, until
from ..speed import scaled
from .test_launch import TRAIN

ROWS, COLUMNS = 24, 80


class Terminal:
    """A terminal of 24 rows, and all that was written to it."""

    def __init__(self) -> None:
        self._reading, self.writing = pty.openpty()
        termios.tcsetwinsize(self.writing, (ROWS, COLUMNS))
        self.settings = termios.tcgetattr(self.writing)
        self._data = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._reading, 1 << 16):
                self._data += data
        except OSError:  # all its writers are gone
            pass
        os.close(self._reading)

    @property
    def written(self) -> str:
        """All that was written."""
        return self._data.decode(errors="replace")

    def close(self) -> None:
        """Close it, and wait for what was written last."""
        os.close(self.writing)
        self._thread.join(scaled(10))
        assert not self._thread.is_alive()

    def lines(self) -> list[str]:
        """Return what it shows, and what has scrolled away above."""
        lines, row, column = [""], 0, 0
        for number, command, character in re.findall(r"\x1b\[([0-9?]*)([A-Zm])|([\s\S])", self.written):
            if command == "A":
                row = max(row - int(number), 0)
            elif command == "J":
                lines[row:] = [lines[row][:column]]
            elif command == "K":
                lines[row] = ""
            elif character == "\r":
                column = 0
            elif character == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif character:
                lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
                column += 1
        return lines


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    if made._thread.is_alive():
        made.close()


def run_of(workers: int) -> RunView:
    """Return a run of so many workers: the last one is evicted, the rest make 50 iterations a second."""
    member = {"rank": 0, "state": "live", "done": 500, "loss": 0.25, "times_leader": 0, "heard_s_ago": 0.0}
    members = [member | {"worker": f"node{n}/worker0", "node": n, "reason": "", "code": ""} for n in range(workers)]
    members[-1] |= {"state": "away", "reason": f"evicted: {'nothing was heard from it, ' * 9}", "loss": None}
    report = {"run": "r", "algorithm": "leader", "state": "running", "reason": "busy", "code": "busy", "loss": 0.25}
    report |= {"count": 1000, "iterations": 2000, "progress": 0.5, "seconds": 20.0, "generation": 1, "nodes": 1}
    report |= {"rounds_global": 1, "rounds_local": 2, "period": 24, "period_reason": "", "leaders": []}
    report["members"] = members
    run = RunView()
    run.apply(Batch(connected=True, report=report))
    made = [replace(run.now, seconds=10.0 * n, count=500 * n, progress=0.25 * n) for n in (1, 2)]
    events = tuple(Event(n, 10.0 * n, RunProgress(now, ())) for n, now in enumerate(made, 1))
    run.apply(Batch(events, connected=True))
    return run


def plain(text: str) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]


def test_a_frame_has_progress_rate_time_left_and_a_line_for_each_worker():
    progress, first, second = plain(frame(run_of(2), COLUMNS, ROWS))
    assert progress.startswith("━") and progress.endswith("50%  1000/2000  50/s  20.0s left  loss 0.25")
    assert first.split() == ["node0/worker0", "trains", "500", "loss", "0.25"]
    assert second.startswith("node1/worker0  away ") and "evicted: nothing" in second and second.endswith("…")


def test_a_line_has_the_same_and_each_nodes_share_and_who_is_away():
    assert line(run_of(2)) == golden.text("panel.status")


def test_a_line_of_a_run_that_waits_has_no_rate():
    run = run_of(2)
    waits = replace(run.now, state="waiting", code="waiting", reason="2 of 4 workers have joined", count=1000)
    run.apply(Batch((Event(3, 30.0, RunProgress(waits, ())),), connected=True))
    assert run.rate is None and line(run).startswith("1000 of 2000 iterations; loss 0.25; node0 50%")


def test_a_line_names_workers_whose_losses_are_no_numbers_any_more():
    run = run_of(3)
    for seq, loss in ((3, 0.5), (4, None)):
        at = [
            WorkerProgress(f"node{n}/worker0", n, "live", 597 + seq, loss, 0.0, 1.0, 0.0, 0.0, 0, 0) for n in range(2)
        ]
        run.apply(Batch((Event(seq, 10.0 * seq, RunProgress(run.now, tuple(at))),), connected=True))
    assert "; no finite loss: node0/worker0, node1/worker0 (lower" in line(run)
    assert [text.split()[4:6] for text in plain(frame(run, COLUMNS, ROWS))[1:3]] == [["not", "finite"]] * 2


def test_details_are_in_the_log_alone_and_what_all_workers_say_is_shown_once(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("LSGD_VERBOSE", raising=False)
    for verbose in (False, True):
        screen = Screen(plain=True, verbose=verbose)
        for worker in ("worker0", "worker1"):
            log = tmp_path / f"{worker}.log"
            transcript = Transcript(screen, f"node0/{worker}", log, 0, False)
            mistake = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x'
            said = f"\x1flsgd: a detail\nlsgd: node0/{worker} waits for 10 s\nloss 1\n{mistake}\n"
            transcript.feed(said.encode())
            transcript.close()
            assert log.read_text() == said.replace("\x1f", "")
        screen.close()
        lines = capfd.readouterr().out.splitlines()
        waits = "[node0/worker0] lsgd: node0/worker0 waits for 10 s"
        loss = [f"[node0/worker{index}] loss 1" for index in range(2)]
        mistakes = [f"[node0/worker0] {text}" for text in mistake.split("\n")]
        mistakes += ["[node0/worker1] the same mistake as in [node0/worker0]"]
        shown = [waits, loss[0], *mistakes[:3], loss[1], *mistakes[3:]]
        assert len(lines) == 12 if verbose else lines == shown


def test_one_mistake_is_shown_once_without_lsgd_s_own_calls(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("LSGD_VERBOSE", raising=False)
    screen, made = Screen(plain=True), {}
    where = f"{transcript.__file__.rpartition('/node/')[0]}/client/worker.py"
    script = '  File "train.py", line 7, in <module>\n    with Worker.join(model) as worker:\n         ^^^^^^^^^^^\n'
    own = f'  File "{where}", line 180, in join\n    membership = join_run(model)\n'
    refused = "its model differs from node0/worker0's: build the same"

    def say(name: str, text: str) -> None:
        if name not in made:
            made[name] = Transcript(screen, name, tmp_path / f"{name.replace('/', '-')}.log", 0, False)
        made[name].feed(f"{text}\n".encode())

    say("global", f"09:03:12 node1/worker0 is refused, {refused}")
    say("global", f"09:03:12 node1/worker1 is refused, {refused}")
    say("node1/worker0", f"{TRACEBACK}\n{script}{own}lsgd.errors.JoinError: {refused}")
    say("node1/worker1", f"{TRACEBACK}\n{script}{own}lsgd.errors.JoinError: {refused}")
    say("node0/worker0", f"{TRACEBACK}\n{script}{own}ValueError: no such row. Did you mean 3?")
    say("global", "09:03:13 node0/worker0 leaves: failed: ValueError: no such row (17 iterations)")
    say("node0/worker1", "lsgd: generation 1 is over: node0/worker0 left: failed: ValueError: no such row")
    say(
        "global",
        "09:03:13 node1/worker0 leaves: failed: ValueError: no such row, in line 7 of train.py (17 iterations)",
    )
    say("global", "09:03:14 node0/worker1 leaves: failed: KeyError: 'x' (17 iterations)")
    dealt = "lsgd: node0/worker{0} ends with exit code 77: node1/worker1 and node0/worker{0} divide other data"
    say("global", "09:03:15 node1/worker1 leaves: failed: JoinError: node1/worker1 and node0/worker0 divide other data")
    for index in range(2):
        say(f"node0/worker{index}", dealt.format(index))
    say("node0", "09:03:16 ended: the run is over: node1/worker1 and node0/worker0 divide other data")
    say("node0", "09:03:16 ended: the run is over: the time is over")
    assert made["node0/worker1"].mistake == dealt.format(1)
    say("node0/worker0", "lsgd: round 2: this model is not finite")
    say("node0/worker0", "lsgd: round 3: this model is not finite")
    say("node0/worker0", "lsgd: worker 0 joins too late")
    say("node0/worker1", "lsgd: worker 1 joins too late")
    screen.close()
    assert capfd.readouterr().out.splitlines() == [
        f"[global] 09:03:12 node1/worker0 is refused, {refused}",
        *(f"[node1/worker0] {line}" for line in f"{TRACEBACK}\n{script}lsgd.errors.JoinError: {refused}".split("\n")),
        golden.text("panel.same_mistake"),
        *(f"[node0/worker0] {line}" for line in f"{TRACEBACK}\n{script}{own}".splitlines()),
        "[node0/worker0] ValueError: no such row. Did you mean 3?",
        "[global] 09:03:14 node0/worker1 leaves: failed: KeyError: 'x' (17 iterations)",
        "[global] 09:03:15 node1/worker1 leaves: failed: JoinError: node1/worker1 and node0/worker0 divide other data",
        "[node0] 09:03:16 ended: the run is over: the time is over",
        "[node0/worker0] lsgd: round 2: this model is not finite",
        "[node0/worker0] lsgd: worker 0 joins too late",
    ]
    assert made["node1/worker0"].mistake == f"lsgd.errors.JoinError: {refused}" and not made["global"].mistake
    assert where in (tmp_path / "node1-worker0.log").read_text()


def test_other_nodes_than_node_0_say_a_mistake_in_a_line(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("LSGD_VERBOSE", raising=False)
    screen = Screen(plain=True, brief=True)
    script = tmp_path / "train.py"
    calls = f'  File "{script}", line 7, in <module>\n    f()\n  File "{pytest.__file__}", line 3, in f\n    ^^^\n'
    mistake = "ValueError: no such row. Did you mean 3?"
    transcripts = [Transcript(screen, f"node1/worker{n}", tmp_path / f"{n}.log", 0, False) for n in range(2)]
    over = "lsgd: generation 1 is over: node1/worker1 left: failed: ValueError: no such row"
    transcripts[0].feed(f"{over}\n{TRACEBACK}\n{calls}{mistake}\n".encode())
    transcripts[1].feed(f"{TRACEBACK}\n{calls}{mistake}\n".encode())
    screen.close()
    assert capfd.readouterr().out.splitlines() == [
        f"[node1/worker0] {mistake}, in line 7 of train.py (the traceback: {tmp_path / '0.log'})",
        "[node1/worker1] the same mistake as in [node1/worker0]",
    ]
    assert transcripts[0].mistake == mistake and calls in (tmp_path / "0.log").read_text()


@pytest.mark.parametrize(("leader", "says"), [("node0/worker0", True), ("", False)])
def test_a_leader_is_named_where_leaders_matter(leader, says):
    run = run_of(2)
    order = RoundOrdered(1, "global", -1, leader, 1000, 20.0, {"node0/worker0": 0.25})
    run.apply(Batch((Event(3, 21.0, order),), connected=True))
    assert plain(frame(run, COLUMNS, ROWS))[1].endswith("leads") is says


def test_a_frame_fits_the_terminal_and_keeps_the_worker_that_something_is_wrong_with():
    lines = plain(frame(run_of(40), COLUMNS, ROWS))
    assert len(lines) <= ROWS // 2 and max(map(len, lines)) < COLUMNS
    assert lines[1].startswith("node39/worker0  away") and lines[-1] == golden.text("panel.more")
    run = run_of(2)
    run.apply(Batch(connected=False))
    assert golden.text("panel.silent_server") in frame(run, COLUMNS, ROWS)


def test_lines_scroll_above_the_panel(terminal, monkeypatch):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(terminal.writing), "w"))
    screen = Screen()
    screen.panel(["half", "worker0"])
    screen.line("[a] ", "one", colour=36)
    screen.live("bar 1%")
    screen.panel(["more", "worker0", "worker1"])
    screen.line("[a] ", "two")
    assert screen._output.flush(10)
    sys.stdout.close()
    terminal.close()
    assert "\x1b[36m[a] " in terminal.written
    assert terminal.lines() == ["[a] one", "[a] two", "bar 1%", "more", "worker0", "worker1", ""]


@pytest.mark.parametrize(("variable", "value"), [("TERM", "dumb"), ("CI", "true"), ("TERM", "xterm")])
def test_where_lines_cannot_move_there_are_plain_ones(terminal, monkeypatch, variable, value):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(terminal.writing), "w"))
    screen = Screen(plain=value == "xterm")
    assert not screen.is_terminal
    screen.line("[a] ", "one", colour=36)
    assert screen._output.flush(10)
    sys.stdout.close()
    terminal.close()
    assert terminal.written == "[a] one\r\n"


@pytest.mark.slow
def test_a_run_on_a_terminal_shows_its_workers_and_ctrl_c_leaves_the_terminal_as_it_was(terminal, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    environ = {**os.environ, **LIGHT, "LSGD_ALGORITHM": "leader", "TERM": "xterm", "NO_COLOR": "1", "CI": ""}
    process = subprocess.Popen(
        [*(sys.executable, "-m", "lsgd.client", "launch", "--device", "cpu", "--run-dir", "run"), "python", "train.py"],
        cwd=tmp_path,
        env=environ,
        stdin=terminal.writing,
        stdout=terminal.writing,
        stderr=terminal.writing,
    )
    try:
        until(lambda: re.search(r"node0/worker1 +trains", terminal.written), "the panel shows the second worker")
        until(lambda: re.search(r"\d/s", terminal.written), "the panel shows a rate")
        process.send_signal(signal.SIGINT)
        assert process.wait(scaled(60)) == 0
    finally:
        process.kill()
        process.wait()
    assert termios.tcgetattr(terminal.writing) == terminal.settings
    terminal.close()
    assert not re.search(r"\x1b\[[0-9;]*m|\x1b\[\?25l", terminal.written.replace("\x1b[0m", "")), "colours"
    lines = [line for line in terminal.lines() if line]
    assert lines[-1].startswith("[launch] stopped: ") and not any(line.startswith("node0/") for line in lines)
