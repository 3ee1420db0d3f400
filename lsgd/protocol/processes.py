"""The ends of a machine's processes, also of orphans, and how many descriptors this one may have open."""

import ctypes
import os
import resource
import selectors
from collections.abc import Callable, Collection
from contextlib import suppress

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
    """Watches processes, and sees at once when one ends, whoever started it. Pollers take it as a source."""

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
        except OSError:
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


class Orphans:
    """Adopts what our children start and leave behind, also in sessions of their own, and ends it with us.

    ``own``: returns the children whose ends somebody else awaits. Those that we had before are left alone.
    """

    def __init__(self, own: Callable[[], Collection[int]]) -> None:
        self._before = {each.pid for each in psutil.Process().children()}
        self._own = own
        _adopt(1)

    def reap(self) -> None:
        """Let orphans that have ended go."""
        own = {*self._before, *self._own()}
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)

    def end(self, within_s: float) -> list[int]:
        """End them, by force after ``within_s``, and adopt no more; return their numbers."""
        own = {*self._before, *self._own()}
        found = [each for each in psutil.Process().children() if each.pid not in own]
        family = [*found, *(child for each in found for child in _children(each))]
        for process in family:
            with suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(family, within_s)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, within_s)
        _adopt(0)
        return [each.pid for each in found]


def _adopt(on: int) -> None:
    ctypes.CDLL(None).prctl(36, on, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, in Linux's prctl.h


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(process.children(recursive=True))
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
