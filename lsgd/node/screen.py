"""The output of several processes as one: whole lines with a prefix, and one line that may be overwritten."""

import math
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from lsgd.output import Output

FLUSH_WITHIN_S, FLUSHES = 3.0, 20
"""How long the end waits while nobody reads the remaining output, and for how many such waits at most."""

CROWDED_NCHARS = 1 << 16
"""No panel while more characters than this wait to be shown."""

SAME_WITHIN_S, MAX_SAID, SAME_NCHARS = 60.0, 256, 80
"""For how long a line of lsgd in one worker stands for the same one in others, and for how many lines; and by how many
characters of it two reasons of a failure are the same, of which one may be abridged."""

TRACEBACK = "Traceback (most recent call last):"
"""Begins what Python says of a mistake."""

_OF_LSGD, _WORKER = "lsgd: ", re.compile(r"node\d+/worker\d+|\bworker \d+| for \d+ s\b|\bround \d+")
_OF_ROUND = re.compile(r"lsgd: round \d+: ")

_FAILURE = re.compile(
    r"(?:node\d+/worker\d+ (?:(?:leaves|left): failed: |is refused, |ends with exit code \d+: "
    r"|has left without an answer from the servers \()"
    r"|ended: the run is over: )(.+?)(?:, in line \d+ of [^/]+)?(?: \(\d+ iterations\))?$"
)
"""What servers and workers say of a worker whose script has failed, or that was refused; and of a run that ended so."""

_ECHO = re.compile(r"lsgd: generation \d+ is over: \S+ left: failed: ")
"""What workers say of one whose script has failed: its own node says why, and so does the global server."""

_ERROR = re.compile(r"(?:lsgd\.errors\.\w+: )?(.+)")
"""The last line of what Python says of a mistake."""

LAUNCHER = "[launch] "
"""Prefix of the launcher's own lines."""

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CONTROL_BUT_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
_CLEAR_LINE = "\r\x1b[2K"
_COLUMNS, _ROWS = 80, 24


def show(text: str, stream: TextIO) -> None:
    """Print a text of the launcher, after the lines of its children; give up if nobody reads it."""
    output = Output(lambda lost: "")
    output.put(stream.fileno(), text)
    output.flush(FLUSH_WITHIN_S, FLUSHES)


class Screen:
    """Standard output: lines with prefixes; on a terminal also colors, a moving line, and a panel below it.

    One process may overwrite the moving line; the panel's lines are replaced together. Several threads may write, and
    none waits for a reader. The cursor is never hidden and rests below the panel, so a launcher that is killed leaves
    nothing to restore.

    Args:
        plain: whether to write as if there were no terminal; also with ``TERM=dumb``, and where ``CI`` is set.
        verbose: whether details are shown, which else are in the logs alone.
        brief: whether of a traceback the error, the script's line and the log that has all of it are enough. Node 0
            shows all of a mistake that all nodes make.

    Attributes:
        is_terminal: whether lines can be overwritten.
        has_colours: whether they can be colored too: not with ``NO_COLOR``.
    """

    def __init__(self, *, plain: bool = False, verbose: bool = False, brief: bool = False) -> None:
        self.verbose, self.brief = verbose, brief
        plain = plain or os.environ.get("TERM") == "dumb" or bool(os.environ.get("CI"))
        self.is_terminal = sys.stdout.isatty() and not plain
        self.has_colours = self.is_terminal and not os.environ.get("NO_COLOR")
        self._lock = threading.Lock()
        self._said: dict[str, tuple[str, float]] = {}  # what lsgd has said in workers: where, and when
        self._failures: dict[str, float] = {}  # why workers have failed, and when that was said
        self._live = ""
        self._panel: Sequence[str] = ()
        self._descriptor = sys.stdout.fileno()
        self._output = Output(self._missing)

    def size(self) -> tuple[int, int]:
        """Return the columns and rows of the terminal."""
        try:
            columns, rows = os.get_terminal_size(self._descriptor)
        except OSError:  # it is gone
            return _COLUMNS, _ROWS
        return columns or _COLUMNS, rows

    def line(self, prefix: str, text: str, colour: int = 0) -> None:
        """Write a line above the moving line."""
        if self.has_colours:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        with self._lock:
            erase = self._erase()
            if self._output.waiting > CROWDED_NCHARS:
                self._panel = ()
            self._put(f"{erase}{prefix}{text}\n{self._below()}")

    def is_known(self, text: str) -> bool:
        """Whether a line says of a worker how it failed, and this has just been said of another one, or by itself."""
        found = _FAILURE.search(text)
        return _ECHO.match(text) is not None or (found is not None and self._has_failed(found[1]))

    def _has_failed(self, why: str) -> bool:
        """Whether it has just been said why a worker failed; it is, from now on. Python's own words may be longer."""
        now, why = time.monotonic(), _WORKER.sub("", why)
        with self._lock:
            self._failures = {known: at for known, at in self._failures.items() if now - at < SAME_WITHIN_S}
            said = any(known[:SAME_NCHARS] in why or why[:SAME_NCHARS] in known for known in self._failures)
            self._failures[why] = now
        return said

    def repeats(self, prefix: str, text: str) -> str:
        """Return who has just said the same of itself, if lsgd's log or Python did; note that this process has.

        What a worker says of a round, it says no second time of the next ones.
        """
        if not text.startswith((_OF_LSGD, TRACEBACK)):
            return ""
        if text.startswith(TRACEBACK) and (found := _ERROR.match(text.rpartition("\n")[2])):
            self._has_failed(found[1])
        now, words = time.monotonic(), _WORKER.sub("", text)
        with self._lock:
            who, at = self._said.get(words, (prefix, -math.inf))
            if (who != prefix or _OF_ROUND.match(text)) and now - at < SAME_WITHIN_S:
                return who
            if len(self._said) >= MAX_SAID:
                self._said.pop(next(iter(self._said)))
            self._said[words] = prefix, now
        return ""

    def say(self, text: str) -> None:
        """Write a line from the launcher itself."""
        self.line(LAUNCHER, text, colour=1)

    def live(self, text: str) -> None:
        """Replace the moving line."""
        with self._lock:
            if text != self._live:
                erase, self._live = self._erase(), text
                self._put(erase + self._below())

    def panel(self, lines: Sequence[str]) -> None:
        """Replace the panel, if there is room for one; the lines are no wider than the terminal."""
        with self._lock:
            if not lines or self._output.waiting <= CROWDED_NCHARS:
                erase, self._panel = self._erase(), lines
                self._put(erase + self._below())

    def close(self) -> None:
        """Write what is left as far as somebody reads it, and leave the cursor on a new line."""
        self._put("\n" if self._live else "")  # also writes the notice of missing lines
        self._output.flush(FLUSH_WITHIN_S, FLUSHES)

    def _erase(self) -> str:
        """Return the text that removes what :meth:`_below` returns."""
        if not self._panel:
            return _CLEAR_LINE if self._live else ""
        columns, _ = self.size()  # lines take several rows if the terminal was narrowed
        lines = [*[self._live] * bool(self._live), *self._panel]
        rows = sum(max(1, -(-len(CONTROL.sub("", line)) // columns)) for line in lines)
        return f"\r\x1b[{rows}A\x1b[J"

    def _below(self) -> str:
        """Return the moving line and the panel."""
        if not self._panel:
            return self._live
        return "".join(f"{line}\n" for line in [*[self._live] * bool(self._live), *self._panel])

    def _put(self, text: str) -> None:
        self._output.put(self._descriptor, text)

    def _missing(self, lines: int) -> str:
        clear = _CLEAR_LINE if self.is_terminal else ""
        return f"{clear}{LAUNCHER}{lines} lines skipped (output was not read); the log files are complete\n"
