"""Where each thread of a run's processes is: ``lsgd stacks`` asks them, and prints what they answer.

A process that listens has a file in memory, whose first line says what it is, and a handler of a signal that writes all
threads' stacks to it. The handler is C code (Python's faulthandler), so it answers also while Python is stuck. Whoever
may read the process's descriptors finds the file there, and so knows that the signal does no harm.
"""

import faulthandler
import json
import os
import re
import signal
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SIGNAL = signal.SIGRTMIN + 6
_FILE = "lsgd-stacks"
ANSWER_WITHIN_S = 2.0


def listen(name: str, run_dir: Path | None) -> None:
    """Answer from now on, as ``name`` in a run, unless the program has a use of its own for the signal."""
    if signal.getsignal(SIGNAL) is signal.SIG_DFL and not _files(os.getpid()):
        with suppress(OSError):
            file = os.memfd_create(_FILE)
            about = {"name": name, "run_dir": "" if run_dir is None else os.path.realpath(run_dir)}
            os.write(file, json.dumps(about).encode() + b"\n")
            faulthandler.register(SIGNAL, file, all_threads=True)


@dataclass(frozen=True)
class Listener:
    """A process that answers.

    Args:
        name: what it is in the run: ``worker1``, or ``launcher``.
        run_dir: folder of its run; empty: it has none.
    """

    pid: int
    name: str
    run_dir: str
    command: str
    started_at: float
    file: Path

    def stacks(self) -> str:
        """Return the stacks of its threads, the innermost call first; empty: it has not answered in time."""
        with suppress(OSError), self.file.open("rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(self.pid, SIGNAL)
            return _read(file.fileno()).decode(errors="replace")
        return ""


def is_of_lsgd(thread: str) -> bool:
    """Return whether a thread's stack, as :meth:`Listener.stacks` has it, is that of a helper of lsgd."""
    files = re.findall(r'^  File "(.+)", line', thread, re.MULTILINE)
    ours, librarys = str(Path(__file__).parent), sysconfig.get_path("stdlib")
    others = [file for file in files if not file.startswith((ours, librarys)) or "site-packages" in file]
    return thread.startswith("Thread") and not others and any(file.startswith(ours) for file in files)


def listeners() -> list[Listener]:
    """Return all processes that answer, on this machine and of this user, the oldest first."""
    return sorted(_listeners(), key=lambda each: each.started_at)


def _listeners() -> Iterator[Listener]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            for file in _files(process.pid):
                with file.open("rb") as content:
                    about = json.loads(content.readline())
                command, started_at = " ".join(" ".join(process.cmdline()).split()), process.create_time()
                yield Listener(process.pid, about["name"], about["run_dir"], command, started_at, file)


def _files(pid: int) -> list[Path]:
    """Return the file in memory to which a process answers, if it does."""
    found = []
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found += [descriptor] if os.readlink(descriptor).startswith(f"/memfd:{_FILE} ") else []
    return found


def _read(descriptor: int) -> bytes:
    """Return what comes, until nothing more has come for a moment."""
    found, deadline = b"", time.monotonic() + ANSWER_WITHIN_S
    while time.monotonic() < deadline:
        if new := os.read(descriptor, 1 << 16):
            found, deadline = found + new, min(deadline, time.monotonic() + 0.2)
        time.sleep(0.01)
    return found
