"""Lines for people, printed by a thread of their own: who does not read them keeps no daemon from its work."""

import atexit
import errno
import os
import select
import threading
import time
from collections import deque

MAX_LINES = 4096
"""Most lines that wait to be read; those after them are dropped and counted."""

FLUSH_WITHIN_S = 1.0
"""How long a process that ends waits for its lines to be read."""


class Output:
    """Writes to descriptors in order, in one thread, which begins with the first line.

    Args:
        max_lines: that wait.
    """

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._max_lines = max_lines
        self._lines: deque[tuple[int, bytes]] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed: set[int] = set()  # descriptors that nobody will ever read again

    def put(self, descriptor: int, line: str) -> None:
        """Write a line soon, or drop it if too many wait."""
        with self._changed:
            if len(self._lines) >= self._max_lines:
                self._dropped += 1
                return
            if self._dropped:
                missing = f"{stamp()} {self._dropped} lines are missing here: they could not be written"
                self._lines.append((descriptor, missing.encode() + b"\n"))
                self._dropped = 0
            self._lines.append((descriptor, line.encode(errors="replace") + b"\n"))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="lsgd-output", daemon=True)
                self._thread.start()
                atexit.register(self.flush, FLUSH_WITHIN_S)

    def flush(self, within_s: float) -> bool:
        """Wait until all lines are written, for ``within_s`` at most, and return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines, within_s)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                descriptor, line = self._lines[0]
            if descriptor not in self._closed:
                self._write_line(descriptor, line)
            with self._changed:
                self._lines.popleft()
                self._changed.notify_all()

    def _write_line(self, descriptor: int, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(descriptor, line) :]
            except BlockingIOError:  # somebody who has the other end, or a copy, wants it so
                waiting = select.poll()
                waiting.register(descriptor, select.POLLOUT)
                waiting.poll()
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EBADF):
                    self._closed.add(descriptor)
                    return
                with self._changed:  # a full disk, say
                    self._dropped += 1
                return


def stamp() -> str:
    """Return the time of day."""
    return time.strftime("%H:%M:%S")
