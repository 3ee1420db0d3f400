"""Imports what servers and worker scripts need once, then forks a process for each that a test asks for.

It so starts in milliseconds instead of seconds, and ends as fast: the system frees its memory, not the interpreter.
Otherwise it is a process like any other: started at the top level of this module, with a standard output, an
environment and an exit code of its own.

The arguments are the modules to import; a server of forks that is to start ``lsgd-server`` imports no torch. Requests
are lines on standard input, JSON objects with ``program`` (a module, or the path of a script), ``arguments``,
``environ`` and ``log``. Answers are lines on standard output: ``{"started": pid}`` to each, and
``{"ended": pid, "code": code}`` as they end.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from select import select
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def serve() -> str:
    """Fork until standard input ends; return the program to run, in the process that is to run it."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    gc.freeze()  # what is there is not looked through, and so not copied, in the processes
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
            request = json.loads(line)
            if (pid := os.fork()) == 0:
                become(**request)
                return str(request["program"])
            tell({"started": pid})


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


def become(program: str, arguments: list[str], environ: dict[str, str], log: str) -> None:
    """Make this process what a shell would have made for the program; it ends with the server of forks."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdin.close()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [program, *arguments]


def tell(answer: dict[str, int]) -> None:
    """Write a line at once: print() would write its end apart where PYTHONUNBUFFERED is set."""
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def end_with(main: Callable[[], object]) -> NoReturn:
    """Run a program and end as the interpreter would, but leave its modules and their objects to the system.

    Freeing them one by one writes to each page that the processes share: it takes longer than a short program.
    """
    code = code_of(main)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def code_of(main: Callable[[], object]) -> int:
    """Run a program and return its exit code, negative for the signal that it is to end by."""
    try:
        main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    program = serve()
    if program.endswith(".py"):
        end_with(lambda: runpy.run_path(program, run_name="__main__"))
    else:
        end_with(lambda: runpy.run_module(program, run_name="__main__", alter_sys=True))
