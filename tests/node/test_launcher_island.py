"""The process above those of a worker: what it tells them, and how it ends."""

import contextlib
import signal
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from lsgd.errors import EvictedError
from lsgd.node import island
from lsgd.protocol.ports import hold_or_any, port_of
from lsgd.protocol.sockets import Wakeup
from tests import golden

from ..speed import scaled


def run(script: str, devices: str = "cpu,cpu") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "lsgd.node.island", devices, "--", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))


def test_processes_are_told_their_places() -> None:
    told = run(
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $LSGD_ISLAND $LSGD_DEVICE $MASTER_ADDR; "
        "[ $MASTER_PORT -gt 1023 ] || exit 1",
        "cuda:0,cuda:1,cuda:2",
    )
    assert told.returncode == 0
    assert sorted(told.stdout.splitlines()) == [f"{rank} {rank} 3 3 3 cuda:{rank} 127.0.0.1" for rank in range(3)]


STORE = """
import os, socket, sys
port = int(os.environ["MASTER_PORT"])
print("port", port, flush=True)
sys.stdin.readline()
with socket.create_server(("", port)):
    print("listens", flush=True)
    sys.stdin.readline()
"""


def test_two_islands_side_by_side_have_a_port_each_that_nobody_gets_before_their_stores() -> None:
    command = [sys.executable, "-P", "-m", "lsgd.node.island", "cpu", "--", sys.executable, "-c", STORE]
    with contextlib.ExitStack() as started:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        islands = [started.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        ports = [int(one.stdout.readline().split()[1]) for one in islands]
        assert ports[0] != ports[1]
        for port in ports:
            with hold_or_any("127.0.0.1", port) as other:
                assert port_of(other) != port
        for wanted in ("listens\n", ""):
            for one in islands:
                one.stdin.write("\n")
                one.stdin.flush()
            assert [one.stdout.readline() for one in islands] == [wanted] * 2
    assert [one.returncode for one in islands] == [0, 0]


@pytest.mark.parametrize(
    ("end", "status"),
    [("kill -KILL $$", -signal.SIGKILL), ("kill -SEGV $$", -signal.SIGSEGV), ("exit 76", EvictedError.exit_code)],
)
def test_one_that_dies_takes_the_others_with_it(end, status) -> None:
    began = time.monotonic()
    assert run(f"[ $RANK = 1 ] && {end}; exec sleep 60").returncode == status
    assert time.monotonic() - began < 30.0


def test_a_script_without_its_interpreter_is_an_error_in_words(tmp_path, capfd) -> None:
    script = tmp_path / "train.py"
    script.touch(mode=0o755)
    assert island.main(["cpu,cpu", "--", str(script)]) == 1
    assert capfd.readouterr().err == (golden.text("node.no_program", script=script))


class Process:
    """A process that has ended, or ends when it is killed."""

    def __init__(self, status: int | None, wakeup: Wakeup) -> None:
        self.returncode, self._wakeup = status, wakeup

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL
        self._wakeup.set()


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([76, -signal.SIGKILL], -signal.SIGKILL),
        ([76, -signal.SIGSEGV, None], -signal.SIGSEGV),
        ([76, None], 76),
        ([76, 0], 76),
        ([3, -signal.SIGSEGV], 3),
        ([0, 0], 0),
    ],
)
def test_the_status_of_one_that_was_killed_counts_more_than_that_of_others_it_has_evicted(statuses, expected) -> None:
    with closing(Wakeup()) as wakeup:
        processes = [Process(status, wakeup) for status in statuses]
        assert island._wait(processes, SimpleNamespace(wakeup=wakeup, received=[])) == expected


def test_after_an_error_the_others_may_end_by_themselves() -> None:
    ended = run("[ $RANK = 0 ] && exit 3; sleep 0.5; echo saved")
    assert ended.returncode == 3 and ended.stdout == "saved\n"
