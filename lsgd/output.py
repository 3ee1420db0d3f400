"""Prints in a separate thread: nobody waits for its reader, and lost lines are counted."""

import errno
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MAX_WAITING_NCHARS = 8 << 20
"""Most text that waits to be read; more is dropped."""

_GONE = (errno.EPIPE, errno.EBADF, errno.ENXIO)


DETAIL = "\x1f"
"""Begins a line that `lsgd launch` writes to the log, and shows only with ``--verbose``."""

MARKS_DETAILS = "LSGD_MARKS_DETAILS"
"""Variable of the processes that `lsgd launch` starts: their details begin with :data:`DETAIL`."""


def detail(text: str) -> str:
    """Return a line of a healthy run, which nobody needs to see as long as all goes well."""
    return f"{DETAIL}{text}" if os.environ.get(MARKS_DETAILS) else text


def append(descriptor: int, data: bytes) -> None:
    """Append all of ``data`` to a file, or nothing and raise OSError: the disk is full, say."""
    length = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, length)  # half a line
        raise


def stamped(text: str) -> bytes:
    """Return a line with the time of day."""
    return f"{time.strftime('%H:%M:%S')} {text}\n".encode(errors="replace")


def append_line(path: Path, text: str) -> None:
    """Append a line to a file, with the time of day; lose it if that fails."""
    with suppress(OSError), path.open("ab") as file:
        append(file.fileno(), stamped(text))


def show_any_text() -> None:
    """Have standard output show ``?`` for what its encoding lacks, such as a file's name that is no UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def write_whole(path: Path, text: str) -> None:
    """Replace a file once the new one is complete; if it cannot be written, keep the old one and raise OSError.

    What is there must be a file: root could replace a device, such as /dev/stdout.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


class Output:
    """Writes texts in order, even to a terminal held by Ctrl-S, a pipe that nobody reads, or a file on a full disk.

    The thread starts with the first text, so a process that forks before then has one thread.

    ``missing`` returns the text that replaces a number of lost lines.
    """

    def __init__(self, missing: Callable[[int], str]) -> None:
        self._missing = missing
        self._changed = threading.Condition()
        self._texts: deque[tuple[int, str, int]] = deque()  # descriptor, text, lines that it stands for
        self._nchars = 0
        self._lost = 0
        self._written = 0
        self._gone: set[int] = set()  # descriptors that nobody will ever read again
        self._thread: threading.Thread | None = None

    def put(self, descriptor: int, text: str) -> None:
        """Write a text soon, or drop it if too much waits; an empty one only reports lost lines."""
        with self._changed:
            if text and self._nchars >= MAX_WAITING_NCHARS / (2 if self._lost else 1):  # one gap, not many
                self._lost += text.count("\n")
                return
            if self._lost:
                self._append(descriptor, self._missing(self._lost), self._lost)
                self._lost = 0
            self._append(descriptor, text, text.count("\n"))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="lsgd-output", daemon=True)
                self._thread.start()

    @property
    def waiting(self) -> int:
        """How many characters wait to be written."""
        return self._nchars

    def flush(self, within_s: float, tries: int = 1) -> bool:
        """Return whether all is written, after up to ``tries`` waits as long as each one gets some text written."""
        with self._changed:
            for _ in range(tries):
                before = self._written
                if self._changed.wait_for(lambda: not self._texts, within_s) or self._written == before:
                    break
            return not self._texts

    def _append(self, descriptor: int, text: str, lines: int) -> None:
        self._texts.append((descriptor, text, lines))
        self._nchars += len(text)
        self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                descriptor, text, lines = self._texts[0]
            written = descriptor in self._gone or self._write(descriptor, text.encode(errors="replace"))
            with self._changed:
                self._lost += 0 if written else lines
                self._texts.popleft()
                self._nchars -= len(text)
                self._changed.notify_all()

    def _write(self, descriptor: int, data: bytes) -> bool:
        """Write all of ``data``; return False if it cannot be written now: a disk is full, say."""
        while data:
            try:
                count = os.write(descriptor, data)
            except BlockingIOError:  # whoever has the other end, or a copy, made it non-blocking
                waiting = select.poll()
                waiting.register(descriptor, select.POLLOUT)
                waiting.poll()
            except OSError as error:
                if error.errno in _GONE:
                    self._gone.add(descriptor)
                return descriptor in self._gone
            else:
                self._written += count
                data = data[count:]
        return True
