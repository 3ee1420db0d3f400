"""The store of a run, as the launcher sees it: what it does before, during and after the run."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lsgd.errors import ConfigError
from lsgd.node.screen import LAUNCHER, show
from lsgd.output import append_line
from lsgd.store.objects import Store, StoreError, patiently
from lsgd.store.restore import check_writable, has_checkpoints, restore
from lsgd.store.upload import END

WAIT_S = 600.0
"""How long the end of a run waits until the store has everything, in seconds."""

RESTORE_PAUSES_S = (2.0, 8.0)
"""Pauses between the attempts to read a store before a run, in seconds."""

RESTART_PAUSE_S = 5.0
"""How long to wait before the uploading process is started again, in seconds."""

PREFIX = "[store] "
"""Prefix of the lines of the uploading process."""


def bring(url: str, folder: Path, node: int, *, required: bool) -> bool:
    """Download the newest checkpoints of a node into its run folder; return whether there are any.

    Raises:
        ConfigError: the store cannot be read, or has no checkpoint of node 0 although one is ``required``, or the run
            folder cannot be written.
    """
    store = Store(url)
    _print(f"looking for checkpoints of node {node} in {store.url}")
    try:
        found = _patiently(lambda: restore(store, folder, node, _print))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}; free space there, or name another --run-dir"
        ) from None
    if not found and required and node == 0:
        raise ConfigError(
            f"there is nothing to resume: {store.url} has no intact checkpoint of node 0; name the store that the run "
            f"was launched with, or begin a run there: --store {store.url}, without --resume"
        )
    return found


def check(url: str, *, new: bool, node: int | None = None) -> None:
    """Check before a run that its store can be written, and that a ``new`` run finds no other run's checkpoints there.

    ``node``: whose checkpoints those would be; None: any node's.

    Raises:
        ConfigError: it cannot, or it finds some.
    """
    store = Store(url)
    check_writable(store)
    if new and _patiently(lambda: has_checkpoints(store, node)):
        raise ConfigError(
            f"{store.url} has the checkpoints of an earlier run: resume it with --resume {store.url}, or give this run "
            f"another store"
        )


def _print(text: str) -> None:
    print(f"{PREFIX}{text}", flush=True)


def _patiently(read: Callable[[], bool]) -> bool:
    """Return what a function reads from a store; try it again a few times."""
    try:
        return patiently(read, RESTORE_PAUSES_S, lambda text: print(f"{PREFIX}{text}", file=sys.stderr, flush=True))
    except StoreError as error:
        raise ConfigError(f"{error}; check the URL, the keys and the network") from None


class Storing(threading.Thread):
    """Starts the process that uploads (:mod:`lsgd.store.upload`), shows its lines, and starts it again if it dies.

    Nothing of the run waits for it before :meth:`finish`.
    """

    def __init__(self, url: str, folder: Path, node: int, environ: Mapping[str, str]) -> None:
        super().__init__(name="lsgd-storing", daemon=True)
        self.url = url
        self.show: Callable[[str], None] = _show
        self._arguments = [sys.executable, "-P", "-m", "lsgd.store", "--url", url]
        self._arguments += ["--folder", str(folder), "--node", str(node)]
        self._environ, self._log = environ, folder / f"node{node}-store.log"
        self._folder = folder
        self._ending, self._pause = threading.Event(), threading.Event()
        self._complete = self._killed = False
        self._lock = threading.Lock()  # of the process: it gets to know the end once, also if it is just starting
        self._process: subprocess.Popen[bytes] | None = None
        self._terms, self._waits = 0, False

    def begin(self, show: Callable[[str], None]) -> None:
        """Start, with a function that shows a line."""
        self.show = show
        self.start()

    def detach(self) -> None:
        """Show lines without that function from now on."""
        self.show = _show

    def run(self) -> None:
        """Run the process until it has uploaded everything after the end."""
        while not (self._complete or self._killed):
            try:
                code = self._upload()
            except OSError as error:
                self._say(f"the uploading process cannot be started: {error.strerror}")
            else:
                self._complete = code == 0
                if not (self._complete or self._killed):
                    self._say(f"the uploading process ended with code {code}; it starts again")
            if not self._complete:
                self._pause.wait(RESTART_PAUSE_S)

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Take SIGTERM and SIGHUP, unless it is ignored, for notices that time is short: the store gets the rest first.

        They end nothing but the wait of :meth:`finish`: a second SIGTERM does, also one from before it. Hang-ups do
        not, because one terminal may send several.
        """
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._notice) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._terms += number == signal.SIGTERM
        if self._terms < 2:
            name = signal.Signals(number).name
            _show(f"{LAUNCHER}{name}: {self.url} gets the last files of this run first; a second SIGTERM ends the wait")
        elif self._waits:
            raise KeyboardInterrupt

    def finish(self, wait_s: float = WAIT_S) -> None:
        """Wait until the store has everything, or the time is up; Ctrl-C or a second SIGTERM ends the wait."""
        with self._lock:
            self._ending.set()
            self._tell_end()
        with suppress(KeyboardInterrupt):
            self._wait(wait_s)
        if self._complete:
            _show(f"{LAUNCHER}{self.url} has the results and the newest checkpoints")
        else:
            self._kill()
            _show(f"{LAUNCHER}{self.url} lacks files of this run, which are in {self._folder}; see {self._log}")

    def _wait(self, wait_s: float) -> None:
        self._waits = True
        try:
            if self._terms > 1:
                return
            self.join(min(1.0, wait_s))
            if self.is_alive():
                _show(f"{LAUNCHER}waiting up to {wait_s:g} s until {self.url} has the rest; Ctrl-C ends the wait")
                self.join(wait_s)
        finally:
            self._waits = False

    def _upload(self) -> int:
        """Run the process once; return its exit code."""
        with self._begin() as process:
            for line in process.stdout or ():
                self._say(line.decode(errors="replace").rstrip())
        return process.returncode

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._lock:
            self._process = subprocess.Popen(
                self._arguments,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if self._ending.is_set():
                self._tell_end()
            return self._process

    def _tell_end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it has just died, and its successor is told
                self._process.stdin.write(END)
                self._process.stdin.flush()

    def _kill(self) -> None:
        with self._lock:
            self._killed = True
            self._pause.set()
            if self._process is not None:
                self._process.kill()

    def _say(self, text: str) -> None:
        append_line(self._log, text)
        self.show(f"{PREFIX}{text}")


def _show(line: str) -> None:
    show(f"{line}\n", sys.stdout)
