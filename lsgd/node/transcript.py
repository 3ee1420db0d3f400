"""The output of a node's processes: one thread reads it, writes the logs, and shows its lines on the screen.

A slow disk so holds up that output, and nothing else.
"""

import codecs
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lsgd.node.screen import CONTROL, CONTROL_BUT_COLOUR, TRACEBACK, Screen
from lsgd.output import DETAIL, append, stamped
from lsgd.protocol.sockets import Wakeup
from lsgd.script_lines import in_words

SAY_EVERY_S = 60.0
"""Shortest time between two reports that the same log fails."""

OVERWRITTEN_EVERY_S = 10.0
"""How often to show a line that its process keeps overwriting (a progress bar) if the output is no terminal."""

TAIL_LINES = 20
"""Last lines of each process to keep for a failure report."""

MAX_LINE_NCHARS = 1 << 16
"""A longer line is cut into several."""

CLOSE_WITHIN_S = 60.0
"""How long the end waits for a slow disk to take what was printed."""

_ENDS = re.compile(r"^lsgd: \S+ ends with exit code \d+: ")
_CALL = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_READ_NBYTES = 1 << 16
_READS = 16  # at a time, so that a process that prints much does not starve the others
_COLOURS = (36, 33, 35, 32, 34)


class Log:
    """Lines in a file. Lines that cannot be written are counted; each new line is another attempt."""

    def __init__(self, path: Path, say: Callable[[str], None], *, again: bool) -> None:
        self._path = path
        self._say = say
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if again else os.O_TRUNC)
        self._descriptor: int | None = None
        self._lost = 0
        self._why = ""
        self._said_at: float | None = None
        self._is_said = False

    def open(self) -> None:
        """Create the file, if that is possible now."""
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


class Transcript:
    """The output of one process: bytes in, lines out to the screen and to its log.

    Args:
        name: name of the process, used as prefix.
        number: position of the process, which picks its color.
        live: whether its unfinished line is shown as the moving line.
        again: whether to append to the log.

    Attributes:
        tail: its last lines.
        mistake: the last line of the last traceback, or with which lsgd has ended it, which the screen has shown.
        closed: event that is set when all of it is written.
    """

    def __init__(self, screen: Screen, name: str, log: Path, number: int, live: bool, *, again: bool = False) -> None:
        self.tail = deque[str](maxlen=TAIL_LINES)
        self.mistake = ""
        self.closed = threading.Event()
        self._screen = screen
        self._prefix = f"[{name}] "
        self._path = log
        self._log = Log(log, screen.say, again=again)
        self._colour = _COLOURS[number % len(_COLOURS)]
        self._live = live
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pieces: list[str] = []  # of the unfinished line
        self._nchars = 0
        self._traceback: list[str] = []  # of which the last line has not come
        self._returned = False  # what comes next overwrites the line
        self._shown_s = time.monotonic()

    def open(self) -> None:
        """Create the log."""
        self._log.open()

    def feed(self, data: bytes) -> None:
        """Process output bytes."""
        *lines, unfinished = self._decoder.decode(data).split("\n")
        for line in lines:
            self._add(line)
            self._finish()
        overwritten = self._returned or "\r" in unfinished
        self._add(unfinished)
        if self._live:
            line = self._line()
            self._screen.live("" if line.startswith(DETAIL) else CONTROL_BUT_COLOUR.sub("", line))
        elif overwritten and time.monotonic() - self._shown_s > OVERWRITTEN_EVERY_S:
            self._finish()

    def close(self) -> None:
        """Finish the output."""
        if self._nchars:
            self._finish()
        if self._traceback:
            self._show_traceback()
        if self._live:
            self._screen.live("")
        self._log.close()
        self.closed.set()

    def _show(self, line: str, plain: str) -> None:
        """Show a line, or of a traceback all of it, unless another process has just said the same."""
        if _ENDS.search(plain):
            self.mistake = plain
        if self._screen.is_known(plain):
            return
        if who := self._screen.repeats(self._prefix, plain):
            line = f"the same mistake as in {who.strip()}"
        if not who or plain.startswith(TRACEBACK):
            for each in line.split("\n"):
                self._screen.line(self._prefix, each, self._colour)

    def _holds(self, line: str, plain: str) -> bool:
        """Return whether a line is part of a traceback, which is shown when its last line has come."""
        if not self._traceback and not plain.startswith(TRACEBACK):
            return False
        self._traceback.append(line)
        if len(self._traceback) == 1 or plain.startswith(" "):
            return True
        self._show_traceback()
        return True

    def _show_traceback(self) -> None:
        text, self._traceback = "\n".join(_without_own_frames(self._traceback)), []
        plain = CONTROL.sub("", text)
        self.mistake = plain.rpartition("\n")[2]
        calls = ((file, int(line)) for file, line in _CALL.findall(plain))
        brief = f"{self.mistake}{in_words(calls)} (the traceback: {self._path})"
        self._show(brief if self._screen.brief else text, plain)

    def _add(self, text: str) -> None:
        """Add to the unfinished line. What follows a carriage return replaces it."""
        if shown := text.rstrip("\r"):
            _, mark, last = shown.rpartition("\r")
            if mark or self._returned:
                self._pieces, self._nchars = [], 0
            self._pieces.append(last)
            self._nchars += len(last)
        self._returned = text.endswith("\r") or (self._returned and not text)
        if self._nchars > MAX_LINE_NCHARS:
            self._finish()

    def _line(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def _finish(self) -> None:
        line = self._line()
        self._pieces, self._nchars, self._returned = [], 0, False
        plain = CONTROL.sub("", line)
        is_detail, plain, line = plain.startswith(DETAIL), plain.removeprefix(DETAIL), line.removeprefix(DETAIL)
        if plain or not CONTROL.search(line):  # skip lines with nothing but control sequences
            self._log.line(plain)
            self.tail.append(plain)
            if self._live:
                self._screen.live("")
            coloured = CONTROL_BUT_COLOUR.sub("", line) if self._screen.has_colours else plain
            if self._screen.verbose:
                self._screen.line(self._prefix, coloured, self._colour)
            elif not (is_detail or self._holds(coloured, plain)):
                self._show(coloured, plain)
        self._shown_s = time.monotonic()


def _without_own_frames(traceback: Sequence[str]) -> Sequence[str]:
    """Return the lines of a traceback without lsgd's own calls, if lsgd says with it what the script has to change."""
    if not CONTROL.sub("", traceback[-1]).startswith("lsgd.errors."):
        return traceback
    kept, own = list[str](), False
    for line in traceback:
        if (plain := CONTROL.sub("", line)).startswith('  File "') or not plain.startswith(" "):
            own = plain.startswith(f'  File "{_PACKAGE}')
        kept += [line] * (not own)
    return kept


class Reading(threading.Thread):
    """The thread that reads the output of all processes into their transcripts."""

    def __init__(self) -> None:
        super().__init__(name="lsgd-reading", daemon=True)
        self._selector = selectors.EpollSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._new: deque[tuple[int, Transcript]] = deque()
        self._ended: deque[Transcript] = deque()
        self._closing = False

    def add(self, descriptor: int, transcript: Transcript) -> None:
        """Read from a descriptor until its end, and close it then."""
        if not self.ident:
            self.start()
        self._new.append((descriptor, transcript))
        self._wakeup.set()

    def end(self, transcript: Transcript) -> None:
        """Read only what is there already: its process has ended."""
        self._ended.append(transcript)
        self._wakeup.set()

    def close(self) -> None:
        """Read what is there, and end the thread."""
        self._closing = True
        self._wakeup.set()
        if self.ident:
            self.join(CLOSE_WITHIN_S)

    def run(self) -> None:
        """Read until :meth:`close`."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._wakeup.clear()
                elif not self._read(key.fd, key.data):
                    self._close(key.fd)
            ended = {self._ended.popleft() for _ in range(len(self._ended))}  # none is new later
            for descriptor, transcript in [self._new.popleft() for _ in range(len(self._new))]:
                transcript.open()
                os.set_blocking(descriptor, False)
                self._selector.register(descriptor, selectors.EVENT_READ, transcript)
            for key in list(self._selector.get_map().values()):
                if key.data and (self._closing or key.data in ended):
                    self._read(key.fd, key.data)
                    self._close(key.fd)
            if self._closing:
                return

    def _read(self, descriptor: int, transcript: Transcript) -> bool:
        """Read the available output, or part of it; return False at its end."""
        for _ in range(_READS):
            try:
                data = os.read(descriptor, _READ_NBYTES)
            except BlockingIOError:
                return True
            except OSError:  # the end of a terminal
                return False
            if not data:
                return False
            transcript.feed(data)
        return True

    def _close(self, descriptor: int) -> None:
        self._selector.unregister(descriptor).data.close()
        os.close(descriptor)


def own_lines(transcript: Transcript, reading: Reading) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Return functions that print a line, or a detail, of this process with the time of day; lost if too many wait."""
    descriptor, writing = os.pipe()
    os.set_blocking(writing, False)
    reading.add(descriptor, transcript)

    def say(text: str) -> None:
        with suppress(OSError):
            os.write(writing, stamped(text))

    def note(text: str) -> None:
        with suppress(OSError):
            os.write(writing, DETAIL.encode() + stamped(text))

    return say, note
