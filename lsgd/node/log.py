"""The log of a process: a file. If it cannot be written, lines are lost, but nothing else fails."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lsgd.output import append

SAY_EVERY_S = 60.0
"""Shortest time between two reports that the same log fails."""


class Log:
    """Lines in a file. Lines that cannot be written are counted; each new line is another attempt.

    Args:
        path: of the file.
        say: shows a line to the user.
        again: append to the file.
    """

    def __init__(self, path: Path, say: Callable[[str], None], *, again: bool) -> None:
        self._path = path
        self._say = say
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if again else os.O_TRUNC)
        self._descriptor: int | None = None
        self._lost = 0
        self._why = ""
        self._said_at: float | None = None
        self._is_said = False
        with suppress(OSError):  # the first line says so
            self._open()

    def line(self, text: str) -> None:
        """Append a line; if lines are missing, first one that says how many."""
        missing = f"... {self._lost} lines are missing here: {self._why}\n" if self._lost else ""
        try:
            append(self._open(), f"{missing}{text}\n".encode(errors="replace"))
        except OSError as error:
            self._lose(error)
            return
        if self._is_said:
            self._say(f"the log {self._path} is written again; {self._lost} lines are missing in it")
        self._lost, self._is_said = 0, False

    def close(self) -> None:
        """Close the file."""
        if self._is_said:
            self._say(f"the last {self._lost} lines are missing in the log {self._path}: {self._why}")
        if self._descriptor is not None:
            with suppress(OSError):  # NFS and quotas may report an error only now
                os.close(self._descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, self._flags, 0o666)
        return self._descriptor

    def _lose(self, error: OSError) -> None:
        self._lost += 1
        self._why = os.strerror(error.errno) if error.errno else str(error)
        now = time.monotonic()
        if not self._is_said and (self._said_at is None or now - self._said_at > SAY_EVERY_S):
            self._is_said, self._said_at = True, now
            self._say(
                f"the log {self._path} cannot be written: {self._why}; training continues, and each new line is "
                f"another try: free space there"
            )
