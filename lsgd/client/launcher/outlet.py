"""Output that keeps nobody waiting: a thread writes it, and what nobody takes in is dropped and counted."""

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING_NCHARS = 8 << 20
"""How much text waits for somebody to read it; what comes after that is dropped."""

FLUSH_WITHIN_S = 3.0
"""How long the end waits while nobody takes in any of what is left."""

_FLUSHES = 20  # at the end: even a reader that takes in a little each time is waited for no longer than so many times
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)


class Outlet:
    """Text for a descriptor: of a terminal that may be held by Ctrl-S, a pipe that nobody reads, a file on a full disk.

    Args:
        descriptor: to write to.
        missing: returns the text that stands for this many lines which could not be written.
    """

    def __init__(self, descriptor: int, missing: Callable[[int], str]) -> None:
        self._descriptor = descriptor
        self._missing = missing
        self._changed = threading.Condition()
        self._texts: deque[tuple[str, int]] = deque()  # and the number of lines that each stands for
        self._nchars = 0
        self._lost = 0
        self._written = 0
        self._closing = False
        self._gone = False  # nobody will ever read it
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        """Have this written when it can be."""
        with self._changed:
            if self._gone:
                return
            if self._nchars > MAX_WAITING_NCHARS / (2 if self._lost else 1):  # one gap, not many
                self._lost += text.count("\n")
                return
            self._append_missing()
            self._append(text, text.count("\n"))
        if self._thread is None:  # not before: whoever forks first is to have one thread
            self._thread = threading.Thread(target=self._serve, name="lsgd-outlet", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is left, as long as somebody takes it in."""
        with self._changed:
            self._append_missing()
            self._closing = True
            self._changed.notify()
        for _ in range(_FLUSHES if self._thread else 0):
            assert self._thread
            before = self._written
            self._thread.join(FLUSH_WITHIN_S)
            if not self._thread.is_alive() or self._written == before:
                return

    def _append_missing(self) -> None:
        if self._lost:
            self._append(self._missing(self._lost), self._lost)
            self._lost = 0

    def _append(self, text: str, lines: int) -> None:
        self._texts.append((text, lines))
        self._nchars += len(text)
        self._changed.notify()

    def _serve(self) -> None:
        while not self._gone:
            with self._changed:
                while not self._texts:
                    if self._closing:
                        return
                    self._changed.wait()
                text, lines = self._texts.popleft()
            try:
                self._write(text.encode(errors="replace"))
            except OSError as error:
                with self._changed:
                    self._gone = error.errno in _GONE
                    self._lost += lines  # of a disk that is full, say: the next text is tried again
            with self._changed:
                self._nchars -= len(text)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                count = os.write(self._descriptor, data)
            except BlockingIOError:  # somebody has set the descriptor so
                select.select([], [self._descriptor], [])
                continue
            self._written += count
            data = data[count:]
