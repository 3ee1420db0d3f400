"""The bottom lines of the terminal, which show the run's progress; a separate process draws them."""

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from lsgd.node.guard import Guard
from lsgd.node.screen import Screen

_END = b"\0"
_READ_NBYTES = 1 << 16


class Panel:
    """Shows the last frame of a process that follows the run; nothing if there is no process or frame.

    Args:
        screen: shows the frame.
        arguments: the process's program and arguments; empty: no process.
    """

    def __init__(self, screen: Screen, arguments: Sequence[str] = ()) -> None:
        self._screen = screen
        self._arguments = arguments if screen.is_terminal else ()
        self._process: subprocess.Popen[bytes] | None = None
        self._unfinished = b""

    def start(self, guard: Guard, selector: selectors.BaseSelector) -> None:
        """Start the process, register it with the guard, and register its output with the selector."""
        if not self._arguments:
            return
        self._guard = guard
        self._output, writing = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._process = subprocess.Popen(
                self._arguments,
                stdin=sys.stdout,
                stdout=writing,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=guard.add_self,
            )
        except OSError:  # the run continues without it
            os.close(self._output)
        else:
            guard.add(self._process.pid)
            selector.register(self._output, selectors.EVENT_READ, self)
        finally:
            os.close(writing)

    def read(self) -> bool:
        """Show the newest frame; return False at the end of the output."""
        try:
            data = os.read(self._output, _READ_NBYTES)
        except BlockingIOError:
            return True
        *frames, self._unfinished = (self._unfinished + data).split(_END)
        if frames:
            self._screen.panel(frames[-1].decode(errors="replace").splitlines())
        if not data:
            self._screen.panel([])
        return bool(data)

    def close(self) -> None:
        """End the process, and remove the lines."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.remove(self._process.pid)
        os.close(self._output)
        self._screen.panel([])
