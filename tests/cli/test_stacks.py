"""``lsgd stacks``: a worker that hangs is found at its line, and one that cannot answer is named."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lsgd import stacks
from lsgd.cli.commands import main
from tests import golden

HANGS = """
import os, sys, threading
from pathlib import Path
from lsgd import stacks

stacks.listen("worker1", Path(sys.argv[1]))
stacks.listen("again", None)

def waits_for_a_batch():
    print("ready", flush=True)
    threading.Event().wait()

threading.Thread(target=threading.Event().wait, name="of the script", daemon=True).start()
threading.Thread(target=stacks._read, args=[os.pipe()[0]], daemon=True).start()
waits_for_a_batch()
"""


@pytest.fixture
def hanging(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HANGS, str(tmp_path / "run")], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def said(*arguments: str) -> str:
    return CliRunner().invoke(main, ["stacks", *arguments]).output


def test_it_shows_the_line_at_which_a_worker_hangs(hanging, tmp_path) -> None:
    for _ in range(2):  # and the process goes on
        output = said("--run", str(tmp_path / "run"))
        assert f"worker1, process {hanging.pid}, for " in output and "in waits_for_a_batch" in output
        assert output.count("\nThread 0x") == output.count("\nCurrent thread") == 1 and "in _read" not in output
        assert output.count(", process ") == 1 and golden.text("stacks.own_threads") in output
        assert "in _read" in said("--run", str(tmp_path / "run"), "--all")
    assert hanging.poll() is None


def test_one_that_is_stopped_does_not_answer(hanging, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stacks, "ANSWER_WITHIN_S", 0.1)
    os.kill(hanging.pid, signal.SIGSTOP)
    assert golden.text("stacks.stopped_process") in said("--run", str(tmp_path / "run"))
    os.kill(hanging.pid, signal.SIGCONT)


def test_without_a_run_it_says_where_to_look(tmp_path) -> None:
    output = said("--run", str(tmp_path))
    assert golden.text("stacks.no_process", path=tmp_path) in output


def test_a_program_with_a_use_of_its_own_for_the_signal_keeps_it(tmp_path) -> None:
    code = (
        "import os, signal\nfrom lsgd import stacks\n"
        "signal.signal(stacks.SIGNAL, lambda *_: print('mine'))\n"
        "stacks.listen('worker0', None)\nos.kill(os.getpid(), stacks.SIGNAL)\n"
        "print([each.pid for each in stacks.listeners() if each.pid == os.getpid()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mine\n[]\n"
