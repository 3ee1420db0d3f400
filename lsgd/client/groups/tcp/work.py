"""What a verb waits for: its messages, each on its way over a line."""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsgd.client.groups.tcp.line import Line

HEADER = struct.Struct("!QI")
"""Precedes each message: its length in bytes, and a checksum of the verb's name."""

GOODBYE = HEADER.pack((1 << 64) - 1, 0)
"""Instead of a header: this was the last message."""


@dataclass(eq=False)
class Parcel:
    """A message on its way.

    Attributes:
        header: precedes it.
        view: the tensor's memory.
        work: that it belongs to.
        start: of its header in the line's stream.
        done: whether it has left or arrived.
        released: its work was waited for, so the tensor's memory no longer belongs to the group.
    """

    header: bytes
    view: memoryview
    work: Work
    start: int = 0
    done: bool = False
    released: bool = False

    def keep(self, arrived: int) -> None:
        """Replace the tensor's memory by a copy of what comes after position ``arrived`` in the stream."""
        body = self.start + len(self.header)
        if arrived <= body:
            self.view = memoryview(bytes(self.view))
        else:
            self.start, self.header, self.view = arrived, b"", memoryview(bytes(self.view[arrived - body :]))

    @property
    def end(self) -> int:
        """Where the next one starts in the stream."""
        return self.start + len(self.header) + len(self.view)


class Work:
    """Messages that a verb waits for together."""

    def __init__(self) -> None:
        self._puts: list[tuple[Line, Parcel]] = []
        self._left = 0
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()

    def start(self, puts: Sequence[tuple[Line, memoryview]], verb: str) -> None:
        """Put these messages on their lines; call it once."""
        tag = zlib.crc32(verb.encode())
        self._puts = [(line, Parcel(HEADER.pack(len(view), tag), view, self)) for line, view in puts]
        self._left = len(puts)
        for line, parcel in self._puts:
            line.put(parcel)

    def wait(self, deadline: float) -> None:
        """Wait until all messages are sent and received; :meth:`release` frees their memory.

        Raises:
            OSError: it failed, or ``deadline`` (of ``time.monotonic``) has passed.
        """
        if self._left and not self._over.wait(max(0.0, deadline - time.monotonic())) and self._left:
            late = {line.peer: line.trouble for line, parcel in self._puts if not parcel.done}
            words = [f"{peer} did not do its part in time{f' ({why})' if why else ''}" for peer, why in late.items()]
            raise TimeoutError("; ".join(words))
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Stop using the messages' memory; all must be through."""
        for line, parcel in self._puts:
            line.release(parcel)
        self._puts = []  # parcels refer to their work: this breaks the cycle, which would hold the memory

    def one_done(self) -> None:
        """Record that a message is through."""
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self._over.set()

    def fail(self, error: Exception) -> None:
        """Record that a message failed."""
        self._error = self._error or error
        self._over.set()
