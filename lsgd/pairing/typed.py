"""What a person types where a command of lsgd runs."""

import os
import select
import sys
from contextlib import suppress


class Typed:
    """What a person types here, if somebody can."""

    def __init__(self) -> None:
        self.can = False
        self._text = b""
        with suppress(OSError, ValueError, AttributeError):
            self._descriptor = sys.stdin.fileno()
            if sys.stdin.isatty():
                self.can = os.tcgetpgrp(self._descriptor) == os.getpgrp()  # else reading would stop this process
            else:
                self.can = not self._is_at_end()

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._descriptor

    def lines(self) -> list[str]:
        """Return the lines that are complete."""
        if not self.can or not select.select([self._descriptor], [], [], 0)[0]:
            return []
        if self._is_at_end():
            return []
        *lines, self._text = self._text.split(b"\n")
        return [line.decode(errors="replace") for line in lines if line.strip()]

    def _is_at_end(self) -> bool:
        """Read what is there; return whether nothing more will come."""
        if not select.select([self._descriptor], [], [], 0)[0]:
            return False
        data = os.read(self._descriptor, 1 << 12)
        self._text += data
        self.can = bool(data)
        return not data
