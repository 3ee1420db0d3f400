"""Makes a fork of a process that has imported everything what Python would be that was started for a program.

Some start others themselves (``LAUNCHERS``, and whatever a test says does). Such a one works with copies of lsgd's
modules, which were made before, or are its own if it is a launcher's child itself. What it starts with Python is a fork
of it, with the modules as they were imported. That is a child like any other: of its number, session and group, with
the descriptors and the output that it was given, and nothing of what its parent has made.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import itertools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

LAUNCHERS = re.compile(r"lsgd\.client launch\b|lsgd\.node\.island\b")
"""Modules, and what they are told to do, that start other programs below another."""

PREFIX = re.compile(r"nsenter --target=(\d+) --net --uts --mount env --chdir=(\S+)")
"""How a testbed starts a command on a host: its first process, and the folder (benchmarks/testbed/hosts.py)."""

NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000, "pid": 0x20000000}  # <linux/sched.h>

STACKS = 200
"""The descriptor of a file in memory: on the last signal there is, the stacks of all threads are written there.

Whoever waits for the process in vain reads them (waiting.py).
"""

_libc = ctypes.CDLL(None, use_errno=True)
_exec = subprocess._fork_exec  # type: ignore[attr-defined]
_register = atexit.register
_registered: list[Callable[..., object]] = []
"""What a launcher wants to be called at its end."""
_modules: dict[str, ModuleType] = {}
"""lsgd's, as they were imported."""
_copies: dict[str, ModuleType] = {}
"""The same again, for a launcher."""
_last = ""
"""The last of all other modules: those of lsgd come after it."""
_path: list[str] = []
"""Where from."""
_finalizers: "set[weakref.finalize[..., Any]]" = set()
"""Of what was imported."""
_kept: list[object] = []
"""What must not be freed: it would write to a descriptor, or close one, that is another's now."""


@dataclass(frozen=True)
class Program:
    """A program in Python.

    Args:
        name: of a module, or the path of a script.
        safe: whether Python is not to look for modules beside it.
        host: the first process of the host that it runs on, in a folder; 0 for this machine.
        launches: whether it starts other programs.
    """

    command: Sequence[str]
    name: str
    arguments: Sequence[str]
    safe: bool
    host: int
    folder: str
    launches: bool

    @property
    def place(self) -> list[str]:
        """Where Python looks first for modules."""
        script = self.name.endswith(".py")
        return [] if self.safe else [os.path.dirname(os.path.abspath(self.name)) if script else os.getcwd()]

    def main(self) -> None:
        """Run it."""
        if self.name.endswith(".py"):
            runpy.run_path(self.name, run_name="__main__")
        else:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)


def program_of(command: Sequence[str], environ: Mapping[str, str]) -> Program | None:
    """Return what a command runs with this Python; None if it does not, or not a script or a module."""
    host, folder = 0, ""
    if prefix := PREFIX.match(" ".join(command[:7])):
        host, folder, command = int(prefix[1]), prefix[2], command[7:]
    python, *rest = command
    if shutil.which(python, path=environ.get("PATH")) != sys.executable:
        return None
    options = [*itertools.takewhile(lambda word: word in ("-P", "-u"), rest)]
    safe = "-P" in options
    match rest[len(options) :]:
        case ["-m", name, *arguments]:
            launches = bool(LAUNCHERS.match(" ".join([name, *arguments[:1]])))
            return Program(command, name, arguments, safe, host, folder, launches)
        case [name, *arguments] if name.endswith(".py"):
            return Program(command, name, arguments, safe, host, folder, False)
    return None


def remember(launcher: str = "") -> None:
    """Let the programs begin with what is imported now; a launcher with copies of its module and what that imports."""
    global _last
    _modules.update(lsgd_modules())
    forget_modules()
    _last = next(reversed(sys.modules))
    if launcher:
        importlib.import_module(launcher)
        _copies.update(lsgd_modules())
        forget_modules()
    sys.modules.update(_modules)
    _path.extend(sys.path)
    _finalizers.update(weakref.finalize._registry)  # type: ignore[attr-defined]
    for finalizer in _finalizers:  # torch's, which take its kernels out one by one
        finalizer.atexit = False


def enter(host: int, *kinds: str) -> None:
    """Enter namespaces of a host, by its first process; that of processes is for this one's children."""
    opened = [(os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY), NAMESPACES[kind]) for kind in kinds]
    for number, flag in opened:  # in the last one /proc is another
        if _libc.setns(number, flag):
            raise OSError(ctypes.get_errno(), f"cannot enter a namespace of process {host}")
        os.close(number)


def become(program: Program, environ: Mapping[str, str], keep: Collection[int] = ()) -> NoReturn:
    """Be a process for a program, with these descriptors beside the first three, and run it to its end."""
    try:
        gc.freeze()
        forget_signals()
        forget_descriptors(keep)
        forget_exits()
        write_stacks_when_asked()
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None  # it is where these variables say
        show(program.command, environ)
        sys.argv = [program.name, *program.arguments]
        own = [path for path in environ.get("PYTHONPATH", "").split(":") if path and path not in _path]
        sys.path[:] = [*program.place, *own, *_path]
        choose_modules(program)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    end_with(program.main)


def forget_signals() -> None:
    """Handle them as a program does that starts: those that are ignored stay so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_descriptors(keep: Collection[int]) -> None:
    """Close what is open but for these, and write to the first ones anew."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in keep:
            with suppress(OSError):  # the folder's own
                os.close(number)
    _kept.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = output(1, at_once)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = output(2, at_once, line_buffering=True, errors="backslashreplace")  # type: ignore[misc]
    sys.excepthook = sys.__excepthook__


def write_stacks_when_asked() -> None:
    """Let a signal write the stacks of all threads, whatever Python is at."""
    made = os.memfd_create("stacks")
    fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, STACKS)
    os.close(made)
    faulthandler.register(signal.SIGRTMAX, file=STACKS, all_threads=True)


def output(number: int, at_once: bool, **options: Any) -> io.TextIOWrapper:
    """Return what writes to a descriptor, by lines to a terminal."""
    raw = open(number, "wb", buffering=0 if at_once else -1, closefd=False)
    return io.TextIOWrapper(raw, **{"line_buffering": os.isatty(number), "write_through": at_once, **options})


def forget_exits() -> None:
    """Call nothing at the end that a launcher wants to be called at its own, such as what removes its folders."""
    for function in _registered:
        atexit.unregister(function)
    for finalizer in set(weakref.finalize._registry) - _finalizers:  # type: ignore[attr-defined]
        finalizer.detach()
    _registered.clear()
    atexit.register = _register


def show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Let /proc show the command line and the environment where those of the server of forks were.

    That has had room for them: an argument and a variable that mean nothing.
    """
    with open("/proc/self/stat") as stat:
        places = list(map(int, stat.read().rpartition(")")[2].split()[45:49]))
    variables = [f"{name}={value}" for name, value in environ.items()]
    for texts, (start, end) in ((command, places[:2]), (variables, places[2:])):
        shown = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def choose_modules(program: Program) -> None:
    """Work with lsgd's modules as they were imported; a launcher with copies, which its children do not see."""
    forget_modules()
    subprocess._fork_exec = _exec  # type: ignore[attr-defined]
    if not program.launches:
        sys.modules.update(_modules)
        return
    sys.modules.update(_copies)
    _copies.clear()  # what this one makes of them is not for its children
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    atexit.register = note_exit
    if "DRAWS" not in os.environ:
        sys.modules["matplotlib"] = None  # type: ignore[assignment]


def forget_modules() -> None:
    """Let lsgd be imported anew."""
    for name in lsgd_modules():
        del sys.modules[name]


def lsgd_modules() -> dict[str, ModuleType]:
    """Return the modules of lsgd and of the benchmarks that are imported.

    The others are not looked at: that writes to each, and copies its page.
    """
    names = itertools.takewhile(lambda name: name != _last, reversed(sys.modules))
    return {name: sys.modules[name] for name in names if name.split(".")[0] in ("lsgd", "benchmarks")}


def note_exit(function: Callable[..., object], *arguments: Any, **options: Any) -> Callable[..., object]:
    """Stand in for ``atexit.register`` in a launcher."""
    _registered.append(function)
    return _register(function, *arguments, **options)


def fork_exec(arguments: Sequence[Any], *how: Any) -> int:
    """Stand in for what starts a process for ``subprocess``: a program in Python is a fork of this process."""
    _, _, keep, folder, variables, stdin, _, _, stdout, _, stderr, _, failed, _, session, group = how[:16]
    prepare = how[20]
    pairs = (os.fsdecode(pair).partition("=") for pair in variables or ())
    environ = dict(os.environ) if variables is None else {name: value for name, _, value in pairs}
    program = program_of([os.fsdecode(argument) for argument in arguments], environ)
    if program is None:
        return int(_exec(arguments, *how))
    if pid := os.fork():
        return pid
    try:
        for number, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            if number >= 0:
                os.dup2(number, target)
        if program.host:
            enter(program.host, "net", "uts", "mnt")
        if folder or program.folder:
            os.chdir(program.folder or folder)
        if session:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        if prepare:
            prepare()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    become(program, environ, [number for number in keep if number != failed])


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
        try:
            main()
        except SystemExit:
            raise
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)  # which may raise SystemExit
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0
