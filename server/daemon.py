"""What both daemons share: one loop, two signals, and lines for people."""

import os
import signal
import sys
import time
from types import FrameType
from typing import TextIO

from lsgd.sockets import Wakeup

TICK_S = 0.1
"""Longest sleep of a daemon, in seconds."""

LAST_WORDS_S = 0.3
"""How long a daemon that is done stays for its last messages to arrive: a connection closed at once can lose them."""

MAX_GROWTH_NBYTES = 512 << 20
"""By how much a daemon may grow; no run needs as much, so more is a peer that sends without an end."""

EXIT_AT_ONCE = 3
"""Exit code of a daemon that a second signal ended before its run was."""


class Memory:
    """Watches how much memory this process has taken since it was made, or since the last time that was too much."""

    def __init__(self) -> None:
        self._at_first_nbytes = self._nbytes()

    def overgrown(self) -> bool:
        """Whether it has grown by more than :data:`MAX_GROWTH_NBYTES`."""
        return self._nbytes() - self._at_first_nbytes > MAX_GROWTH_NBYTES

    def begin_anew(self) -> None:
        """Take what it is now as the measure."""
        self._at_first_nbytes = self._nbytes()

    @staticmethod
    def _nbytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Signals:
    """Counts SIGTERM and SIGINT: the first asks for a clean end, the second for one at once."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.received: list[str] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)
        self.wakeup.set()

    @property
    def first(self) -> str:
        """Name of the first signal, or an empty text."""
        return self.received[0] if self.received else ""

    @property
    def at_once(self) -> bool:
        """Whether a second one came."""
        return len(self.received) > 1


def say(text: str) -> None:
    """Print a line with the time of day."""
    _print(text, sys.stdout)


def complain(text: str) -> None:
    """Print a line with the time of day to standard error."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=stream, flush=True)
    except BrokenPipeError:  # nobody reads on: no reason to end the run
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
