"""The guard: a small process that outlives the launcher, and ends what a launcher that was killed leaves behind."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


class Guard:
    """Knows the process groups that are alive; when the launcher is gone, it kills them and deletes ``folder``.

    A signal on the death of the parent (``PR_SET_PDEATHSIG``) would reach the children only, not what a worker
    started itself. To be made while the launcher has one thread.
    """

    def __init__(self, folder: Path) -> None:
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writing)
            _watch(reading, folder)
        os.close(reading)

    def add_self(self) -> None:
        """Add the group that the calling process leads. Called by each child before it runs its command."""
        os.write(self._writing, b"%d\n" % os.getpid())

    def remove(self, group: int) -> None:
        """Forget a group that has ended, whose number may be used again."""
        os.write(self._writing, b"%d\n" % -group)

    def close(self) -> None:
        """Have it clean up, and wait for that."""
        os.close(self._writing)
        os.waitpid(self._pid, 0)


def _watch(reading: int, folder: Path) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # whoever reads the launcher's output is not to wait for the guard
            os.dup2(nowhere, standard)
        groups = set[int]()
        with os.fdopen(reading) as lines:
            for line in lines:
                (groups.add if int(line) > 0 else groups.discard)(abs(int(line)))
        for group in groups:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)
