"""Imports what servers and worker scripts need once, then forks a process for each that a test asks for.

It so starts in milliseconds instead of seconds, and ends as fast: the system frees its memory, not the interpreter.
Otherwise it is a process like any other, with a command line, an environment, an output and an exit code of its own
(become.py).

The arguments are the modules to import; a server of forks that is to start ``lsgd-server`` imports no torch. Requests
are lines on standard input, JSON objects with the arguments of :func:`fork`. Answers are lines on standard output:
``{"started": pid}`` to each, and ``{"ended": pid, "code": code}`` as they end.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
from dataclasses import replace
from select import select

from become import become, enter, program_of, remember

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def serve() -> None:
    """Fork until standard input ends."""
    gc.disable()  # imports leave no garbage, and to look for it takes a seventh of their time
    for name in sys.argv[1].split():
        importlib.import_module(name)
    remember("lsgd.cli.commands" if "lsgd.cli.commands" in sys.modules else "")
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    gc.freeze()  # what is there is not looked through, and so not copied, in the processes
    gc.enable()
    tell({"ready": os.getpid()})
    while True:
        ready, _, _ = select([sys.stdin, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            reap()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                sys.exit()
            tell({"started": fork(**json.loads(line))})


def reap() -> None:
    """Tell of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def fork(command: list[str], environ: dict[str, str], cwd: str, log: str, host: int, launches: bool) -> int:
    """Return the process that runs a command of Python; it ends with this one.

    Args:
        log: where its output goes.
        host: the first process of a host of the testbed; 0 for this machine.
        launches: whether the program starts others.
    """
    program = program_of(command, environ)
    assert program is not None, command
    program = replace(program, launches=launches)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if host:
        enter(host, "pid")
    if pid := os.fork():
        if host:
            enter(os.getpid(), "pid")
        os.close(output)
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(number, target)
    if host:
        enter(host, "net", "uts", "mnt")
    os.chdir(cwd)
    become(program, environ)


def tell(answer: dict[str, int]) -> None:
    """Write a line at once: print() would write its end apart where PYTHONUNBUFFERED is set."""
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    serve()
