"""The ends of a machine's processes, also of orphans, and how many descriptors this one may have open."""

import ctypes
import os
import resource
import selectors
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

MAX_DESCRIPTORS = 1 << 20
"""More is useless, and some programs that inherit the limit loop over all numbers below it."""


def pid_namespace() -> int:
    """Return the number of this process's PID namespace; 0 if there is none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Processes:
    """Watches processes, and sees at once when one ends, whoever started it. ``wait_for`` takes it as a source."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._descriptors: dict[bytes | str, int] = {}

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._selector.fileno()

    def watch(self, name: bytes | str, pid: int, namespace: int | None = None) -> None:
        """Watch a process from now on; ignore one that cannot be watched, such as one in a container.

        :meth:`ended` returns ``name``. ``namespace``: of the number ``pid``; None: ours.
        """
        if name in self._descriptors or not pid or namespace not in (None, pid_namespace()):
            return
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError):  # messages may have any number
            return
        self._descriptors[name] = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, name)

    def forget(self, name: bytes | str) -> None:
        """Stop watching a process."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def ended(self) -> list[bytes | str]:
        """Return the names of processes that have ended since the last call, and stop watching them."""
        names: list[bytes | str] = [key.data for key, _ in self._selector.select(0)]
        for name in names:
            self.forget(name)
        return names


FORGOTTEN_S = 5.0
"""A child that has ended and was not let go for this long is nobody's but ours."""


class Orphans:
    """Adopts what our children start and leave behind, also in sessions of their own, and ends it with us.

    Args:
        mark: a variable and its value that only they have: ``NAME=VALUE``.
        own: returns the children that have it too, but are no orphans.
    """

    def __init__(self, mark: str, own: Callable[[], Collection[int]]) -> None:
        self._mark, self._own = mark.encode(errors="surrogateescape"), own
        self._groups: set[int] = set()  # of all children so far
        self._known: set[int] = set()
        self._ended_at: dict[int, float] = {}  # children of unknown origin that nobody has let go yet
        _adopt(1)

    def reap(self) -> None:
        """Let orphans that have ended go."""
        for pid in self._find():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def terminate(self, within_s: float) -> list[int]:
        """End them, by force after ``within_s``, and adopt no more; return their numbers.

        What they have started while they were looked at is adopted and ended in turn, for twice that time.
        """
        self.reap()
        ended: list[int] = []
        deadline = time.monotonic() + 2 * within_s
        while (found := list(self._find())) and time.monotonic() < deadline:
            ended += found
            _end([process for pid in found for process in _family(pid)], within_s)
        _adopt(0)
        return ended

    def _find(self) -> Iterator[int]:
        own, children = set(self._own()), set(_children())
        self._groups |= own
        self._known &= children
        self._ended_at = {pid: at for pid, at in self._ended_at.items() if pid in children}
        self._known |= {pid for pid in children - own - self._known if self._is_orphan(pid)}
        yield from self._known - own

    def _is_orphan(self, pid: int) -> bool:
        variables = b""
        with suppress(OSError):  # it has ended
            variables = Path(f"/proc/{pid}/environ").read_bytes()
        if variables:
            return self._mark in variables.split(b"\0")
        now = time.monotonic()
        with suppress(ProcessLookupError):  # somebody has just let it go
            return os.getpgid(pid) in self._groups or now - self._ended_at.setdefault(pid, now) > FORGOTTEN_S
        return False


def _end(processes: Sequence[psutil.Process], within_s: float) -> None:
    """End processes, by force after ``within_s``, and let those go that are our children."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, within_s)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, within_s)


def _adopt(on: int) -> None:
    ctypes.CDLL(None).prctl(36, on, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, in Linux's prctl.h


def _children() -> Iterator[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            yield from map(int, path.read_text().split())


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one and return it, because 1,024 is too few for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox may forbid it
        return soft
    return wanted
