"""The output of several processes as one: whole lines with a prefix, and one line that may be overwritten."""

import codecs
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from lsgd.node.log import Log
from lsgd.output import Output

OVERWRITTEN_EVERY_S = 10.0
"""How often to show a line that its process keeps overwriting (a progress bar) if the output is no terminal."""

TAIL_LINES = 20
"""Last lines of each process to keep for a failure report."""

FLUSH_WITHIN_S, FLUSHES = 3.0, 20
"""How long the end waits while nobody reads the remaining output, and for how many such waits at most."""

CROWDED_NCHARS = 1 << 16
"""No panel while more characters than this wait to be shown."""

LAUNCHER = "[launch] "
"""Prefix of the launcher's own lines."""

_COLOURS = (36, 33, 35, 32, 34)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROL_BUT_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
_CLEAR_LINE = "\r\x1b[2K"
_COLUMNS = 80


def show(lines: Iterable[str]) -> None:
    """Print the launcher's own lines, after those of its children; give up if nobody reads them."""
    output = Output(lambda lost: "")
    output.put(sys.stdout.fileno(), "".join(f"{LAUNCHER}{line}\n" for line in lines))
    output.flush(FLUSH_WITHIN_S, FLUSHES)


class Screen:
    """Standard output: lines with prefixes; on a terminal also colors, a moving line, and a panel below it.

    One process may overwrite the moving line; the panel's lines are replaced together. Writing never waits for a
    reader. The cursor is never hidden and rests below the panel, so a launcher that is killed leaves nothing to
    restore.

    Args:
        plain: write as if there were no terminal; also with ``TERM=dumb``, and in continuous integration (``CI``).

    Attributes:
        is_terminal: whether lines can be overwritten.
        has_colours: whether they can be colored too: not with ``NO_COLOR``.
    """

    def __init__(self, *, plain: bool = False) -> None:
        plain = plain or os.environ.get("TERM") == "dumb" or bool(os.environ.get("CI"))
        self.is_terminal = sys.stdout.isatty() and not plain
        self.has_colours = self.is_terminal and not os.environ.get("NO_COLOR")
        self._live = ""
        self._panel: Sequence[str] = ()
        self._descriptor = sys.stdout.fileno()
        self._output = Output(self._missing)

    def columns(self) -> int:
        """Return the width of the terminal."""
        try:
            return os.get_terminal_size(self._descriptor).columns or _COLUMNS
        except OSError:  # it is gone
            return _COLUMNS

    def line(self, prefix: str, text: str, colour: int = 0) -> None:
        """Write a line above the moving line."""
        if self.has_colours:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        erase = self._erase()
        if self._output.waiting > CROWDED_NCHARS:
            self._panel = ()
        self._put(f"{erase}{prefix}{text}\n{self._below()}")

    def say(self, text: str) -> None:
        """Write a line from the launcher itself."""
        self.line(LAUNCHER, text, colour=1)

    def live(self, text: str) -> None:
        """Replace the moving line."""
        if text != self._live:
            erase, self._live = self._erase(), text
            self._put(erase + self._below())

    def panel(self, lines: Sequence[str]) -> None:
        """Replace the panel, if there is room for one; the lines are no wider than the terminal."""
        if lines and self._output.waiting > CROWDED_NCHARS:
            return
        erase, self._panel = self._erase(), lines
        self._put(erase + self._below())

    def close(self) -> None:
        """Write what is left as far as somebody reads it, and leave the cursor on a new line."""
        self._put("\n" if self._live else "")  # also writes the notice of missing lines
        self._output.flush(FLUSH_WITHIN_S, FLUSHES)

    def _erase(self) -> str:
        """Return the text that removes the moving line and the panel."""
        if not self._panel:
            return _CLEAR_LINE if self._live else ""
        columns = self.columns()  # lines take several rows if the terminal was narrowed
        lines = [*[self._live] * bool(self._live), *self._panel]
        rows = sum(max(1, -(-len(_CONTROL.sub("", line)) // columns)) for line in lines)
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
        return f"{clear}{LAUNCHER}{lines} lines are missing here, because nobody read them; the logs have them all\n"


class Transcript:
    """The output of one process: bytes in, lines out to the screen and to its log.

    Args:
        screen: where to show it.
        name: name of the process, used as prefix.
        log: file to write.
        number: position of the process, which picks its color.
        live: show its unfinished line as the moving line.
        again: append to the log.
    """

    def __init__(self, screen: Screen, name: str, log: Path, number: int, live: bool, *, again: bool = False) -> None:
        self._screen = screen
        self._prefix = f"[{name}] "
        self._log = Log(log, screen.say, again=again)
        self._colour = _COLOURS[number % len(_COLOURS)]
        self._live = live
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        self._shown_s = time.monotonic()
        self.tail = deque[str](maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """Process output bytes."""
        *lines, unfinished = (self._unfinished + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._finish(line)
        shown = unfinished.rstrip("\r").rpartition("\r")[2]
        self._unfinished = shown + ("\r" if unfinished.endswith("\r") else "")
        if self._live:
            self._screen.live(_CONTROL_BUT_COLOUR.sub("", shown))
        elif "\r" in unfinished and time.monotonic() - self._shown_s > OVERWRITTEN_EVERY_S:
            self._finish(shown)

    def close(self) -> None:
        """Finish the output."""
        if self._unfinished:
            self._finish(self._unfinished)
        if self._live:
            self._screen.live("")
        self._log.close()

    def _finish(self, line: str) -> None:
        line = line.rstrip("\r").rpartition("\r")[2]
        plain = _CONTROL.sub("", line)
        if plain or not _CONTROL.search(line):  # skip lines with nothing but control sequences
            self._log.line(plain)
            self.tail.append(plain)
            if self._live:
                self._screen.live("")
            coloured = _CONTROL_BUT_COLOUR.sub("", line) if self._screen.has_colours else plain
            self._screen.line(self._prefix, coloured, self._colour)
        self._shown_s = time.monotonic()
