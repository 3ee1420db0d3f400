"""What the daemons share: signals, log lines, and watches over memory and refused connections."""

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import TextIO

import psutil

from lsgd.output import Output, detail
from lsgd.protocol.sockets import Listener, Wakeup

TICK_S = 0.1
"""Longest sleep of a daemon, in seconds."""

LAST_WORDS_S = 0.3
"""How long a daemon stays after its last messages, because a connection that is closed at once can lose them."""

MAX_GROWTH_NBYTES = 512 << 20
"""By how much a daemon may grow; no run needs this much, so a peer must be sending an endless message."""

GUARD_EVERY_S = 1.0
"""How often a daemon checks its memory and what it has refused."""

REFUSALS_EVERY_S = 30.0
"""Shortest time between two reports of refused connections."""

FLUSH_WITHIN_S = 1.0
"""How long a process that ends waits for its lines to be read."""

CRASHED = 70  # EX_SOFTWARE
"""Exit code of a daemon that failed in its own code."""

MOVED = 79
"""Exit code of a global server that has given up, because another one has more of the run."""

EXIT_AT_ONCE = 3
"""Exit code of a daemon that a second signal ended before its run was."""


class Memory:
    """Watches how much this process has grown since the start, or since it last grew too much."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._nbytes = 0
        self._at_first_nbytes = self._now_nbytes()

    def overgrown(self) -> bool:
        """Whether it has grown by more than :data:`MAX_GROWTH_NBYTES`."""
        return self._now_nbytes() - self._at_first_nbytes > MAX_GROWTH_NBYTES

    def begin_anew(self) -> None:
        """Measure growth from the present size."""
        self._at_first_nbytes = self._now_nbytes()

    def _now_nbytes(self) -> int:
        with suppress(OSError):  # no descriptor may be left to read it with: then the last value holds
            self._nbytes = self._process.memory_info().rss
        return self._nbytes


class Refusals:
    """Reports now and then which connections and messages a listener has refused."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def report(self, listener: Listener, now: float) -> Iterator[str]:
        """Yield a line for what was refused since the last report, if that was long enough ago."""
        if now < self._next_at:
            return
        self._next_at = now + GUARD_EVERY_S
        for refusal in listener.refusals():
            yield refusal
            self._next_at = now + REFUSALS_EVERY_S


class Ending:
    """How often a daemon was asked to end: the first time cleanly, the second time at once.

    Attributes:
        wakeup: what to wait for, which shows when it is asked.
        received: names of the signals or others that asked, in order.
    """

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.received: list[str] = []

    def ask(self, name: str) -> None:
        """Ask the daemon to end; also from another thread, or a signal handler."""
        self.received.append(name)
        self.wakeup.set()

    @property
    def first(self) -> str:
        """What asked first, or an empty text."""
        return self.received[0] if self.received else ""

    @property
    def at_once(self) -> bool:
        """Whether it was asked a second time."""
        return len(self.received) > 1


class Signals(Ending):
    """Signals that ask this process to end: SIGTERM, SIGINT and ``more``, but those that are ignored from the start."""

    def __init__(self, *more: signal.Signals) -> None:
        super().__init__()
        numbers = [number for number in (signal.SIGTERM, *more) if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, *numbers)}

    def restore(self, *numbers: signal.Signals) -> None:
        """Handle these signals, or all, as before."""
        for number in numbers or self._before:
            signal.signal(number, self._before[number])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)


def _stamp() -> str:
    return time.strftime("%H:%M:%S")


def _missing(lines: int) -> str:
    return f"{_stamp()} {lines} lines are missing here, because they could not be written\n"


_silent = threading.local()
_output = Output(_missing)
atexit.register(_output.flush, FLUSH_WITHIN_S)


def silence() -> None:
    """Print nothing from this thread: it serves a script, whose output is its own."""
    _silent.on = True


def say(text: str) -> None:
    """Print a detail with the time of day, without ever waiting for its reader."""
    _print(text, sys.stdout, detail)


def tell(text: str) -> None:
    """Print what a user should see with the time of day, likewise."""
    _print(text, sys.stdout)


def complain(text: str) -> None:
    """Print a line with the time of day to standard error, likewise."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO, mark: Callable[[str], str] = str) -> None:
    if getattr(_silent, "on", False):
        return
    line = mark(f"{_stamp()} {text}")
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # no file: a test's, say
        print(line, file=stream, flush=True)
        return
    _output.put(descriptor, f"{line}\n")
