"""The guard: a small process that outlives the launcher and cleans up after it if it was killed."""

import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


class Guard:
    """Tracks the live process groups. When the launcher is gone, it kills them and deletes ``folder``.

    A parent-death signal (``PR_SET_PDEATHSIG``) would reach only the children, not what a worker started itself.
    Create it while the launcher has one thread, because it forks; a replacement takes no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: set[int] = set()
        self._pid: int | None = None
        self._writing = -1
        self._begin()

    def _begin(self) -> None:
        reading, writing = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if self._pid == 0:
            os.close(writing)
            _watch(reading, self._folder, self._groups)
        os.close(reading)
        self._writing = writing

    def renew(self) -> str:
        """Replace the guard if it is gone; return a message for the user, or an empty string."""
        was_said = self._pid is None
        if self._pid is not None:
            if os.waitpid(self._pid, os.WNOHANG) == (0, 0):
                return ""
            self._pid = None
            os.close(self._writing)
            self._writing = -1
        try:
            self._begin()
        except OSError as error:
            trouble = f"the process that guards the others was killed and cannot be replaced: {error.strerror}"
            return "" if was_said else trouble
        return "the process that guards the others was killed; it has been replaced"

    def add_self(self) -> None:
        """Add the group that the calling process leads. Called by each child before it runs its command."""
        with suppress(OSError):  # the guard was just killed: the launcher tells its replacement
            os.write(self._writing, b"%d\n" % os.getpid())

    def add(self, group: int) -> None:
        """Remember a group that has added itself, for a replacement of this guard."""
        self._groups.add(group)

    def remove(self, group: int) -> None:
        """Forget a group that has ended; its number may be reused."""
        self._groups.discard(group)
        if self._pid is not None:
            with suppress(OSError):
                os.write(self._writing, b"%d\n" % -group)

    def close(self) -> None:
        """Let the guard clean up, and wait until it has."""
        if self._pid is not None:
            os.close(self._writing)
            os.waitpid(self._pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _watch(reading: int, folder: Path, alive: Iterable[int]) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        # This process must not hold the launcher's files open.
        os.closerange(3, reading)
        os.closerange(reading + 1, os.sysconf("SC_OPEN_MAX"))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # readers of the launcher's output must not wait for the guard
            os.dup2(nowhere, standard)
        groups = set(alive)
        with os.fdopen(reading) as lines:
            for line in lines:
                (groups.add if int(line) > 0 else groups.discard)(abs(int(line)))
        for group in groups:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)
