"""The store of a run, as the launcher sees it: what it does before, during and after the run."""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from lsgd.errors import ConfigError
from lsgd.node.screen import LAUNCHER, show
from lsgd.output import append_line
from lsgd.store.objects import Store, StoreError
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
        ConfigError: the store cannot be read, or has no checkpoint of node 0 although one is ``required``.
    """
    store = Store(url)
    _print(f"looking for checkpoints of node {node} in {store.url}")
    found = _patiently(lambda: restore(store, folder, node, _print))
    if not found and required and node == 0:
        raise ConfigError(
            f"there is nothing to resume: {store.url} has no intact checkpoint of node 0; name the store that the run "
            f"was launched with, or begin a run there: --store {store.url}, without --resume"
        )
    return found


def check(url: str, *, new: bool) -> None:
    """Check before a run that its store can be written, and that a ``new`` run finds no other run's checkpoints there.

    Raises:
        ConfigError: it cannot, or it finds some.
    """
    store = Store(url)
    check_writable(store)
    if new and _patiently(lambda: has_checkpoints(store)):
        raise ConfigError(
            f"{store.url} has the checkpoints of an earlier run: resume it with --resume {store.url}, or give this run "
            f"another store"
        )


def _print(text: str) -> None:
    print(f"{PREFIX}{text}", flush=True)


def _patiently(read: Callable[[], bool]) -> bool:
    """Return what a function reads from a store; try it again a few times."""
    for pause_s in RESTORE_PAUSES_S:
        try:
            return read()
        except StoreError as error:
            print(f"{PREFIX}{error}; trying again in {pause_s:g} s", file=sys.stderr, flush=True)
            threading.Event().wait(pause_s)
    try:
        return read()
    except StoreError as error:
        raise ConfigError(f"{error}; check the URL, the keys and the network") from None


class Storing(threading.Thread):
    """Starts the process that uploads (:mod:`lsgd.store.upload`), shows its lines, and starts it again if it dies.

    Nothing of the run waits for it before :meth:`finish`.
    """

    def __init__(self, url: str, folder: Path, node: int, environ: Mapping[str, str]) -> None:
        super().__init__(name="lsgd-storing", daemon=True)
        self.url = url
        self.show: Callable[[str], None] = lambda line: show(f"{line}\n", sys.stdout)
        self._arguments = [sys.executable, "-P", "-m", "lsgd.store", "--url", url]
        self._arguments += ["--folder", str(folder), "--node", str(node)]
        self._environ, self._log = environ, folder / f"node{node}-store.log"
        self._folder = folder
        self._ending, self._killed = threading.Event(), False
        self._lock = threading.Lock()  # of the process: it gets to know the end once, also if it is just starting
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run the process until it has uploaded everything after the end."""
        while not self._killed:
            with self._begin() as process:
                for line in process.stdout or ():
                    self._say(line.decode(errors="replace").rstrip())
            if process.returncode == 0 or self._killed:
                return
            self._say(f"the uploading process ended with code {process.returncode}; it starts again")
            threading.Event().wait(RESTART_PAUSE_S)

    def finish(self, wait_s: float = WAIT_S) -> None:
        """Wait until the store has everything, or the time is up; a signal ends the wait."""
        self.show = lambda line: show(f"{line}\n", sys.stdout)
        with self._lock:
            self._ending.set()
            self._tell_end()
        self.join(1.0)
        if self.is_alive():
            self._launcher(f"waiting up to {wait_s:g} s until {self.url} has the rest; Ctrl-C ends the wait")
        try:
            self.join(wait_s)
        except KeyboardInterrupt:
            pass
        if not self.is_alive():
            self._launcher(f"{self.url} has the results and the newest checkpoints")
            return
        self._kill()
        self._launcher(f"{self.url} lacks files of this run, which are in {self._folder}; see {self._log}")

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
            try:
                self._process.stdin.write(END)
                self._process.stdin.flush()
            except BrokenPipeError:  # it has just died, and its successor is told
                pass

    def _kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def _say(self, text: str) -> None:
        append_line(self._log, text)
        self.show(f"{PREFIX}{text}")

    def _launcher(self, text: str) -> None:
        show(f"{LAUNCHER}{text}\n", sys.stdout)
