"""The thread that reads a run's events and updates the page's data, at most twice a second."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lsgd.errors import LsgdError
from lsgd.output import write_whole
from lsgd.watch.dashboard.data import Story, encoded, snapshot
from lsgd.watch.metrics import exposition
from lsgd.watch.reader import Batch, Reader

TELL_EVERY_S = 0.5
"""Shortest time between updates of the page."""

TELL_NBYTES_PER_S, TELL_SHARE = 1 << 20, 0.2
"""A large page changes less often: these limit the bytes to each browser, and the share of time to build it."""

UNSEEN_EVERY_S = 5.0
"""Time between updates while no page is open."""

READ_S = 0.25
RETRY_S = 1.0

KEPT = "dashboard.json"
"""The page's final data, in the run folder, for ``lsgd report``."""


class Follower(threading.Thread):
    """Follows a run until :meth:`stop`.

    Args:
        reader: reader of the run's events, which this thread closes at its end.
        story: history so far; from now on only this thread uses it.
        tell: callback for the page's data as JSON, on this thread.
        seen: callback that returns whether a page is open.
        folder: folder for :data:`KEPT` at the end; None: it is not written.
    """

    def __init__(
        self,
        reader: Reader,
        story: Story,
        tell: Callable[[str], None],
        seen: Callable[[], bool],
        folder: Path | None = None,
    ) -> None:
        super().__init__(name="follower", daemon=True)
        self._reader = reader
        self._story, self._tell, self._seen, self._folder = story, tell, seen, folder
        self._stop_asked = threading.Event()
        self._taking = threading.Lock()

    def metrics(self) -> bytes:
        """Return the run's metrics in Prometheus's text format; callable from any thread."""
        with self._taking:
            return exposition(self._story.view)

    def stop(self) -> None:
        """Send the last update, and end within :data:`READ_S`."""
        self._stop_asked.set()

    def run(self) -> None:
        """Serve the page's data until the end."""
        with self._reader:
            changed, told_at, wait_s, state = True, float("-inf"), 0.0, ""
            while not self._stop_asked.is_set():
                changed |= self._take()
                now = time.monotonic()
                due = now - told_at >= (wait_s if self._seen() else UNSEEN_EVERY_S)
                if changed and (due or self._story.view.now.state != state):
                    text = self._say()
                    changed, told_at, state = False, time.monotonic(), self._story.view.now.state
                    wait_s = max(TELL_EVERY_S, len(text) / TELL_NBYTES_PER_S, (told_at - now) / TELL_SHARE)
        text = self._say()
        if self._folder and self._story.view.now.run:
            with suppress(OSError):  # a full disk costs the report its timeline, nothing else
                write_whole(self._folder / KEPT, text)

    def _take(self) -> bool:
        """Read until nothing is waiting; return whether there is anything new."""
        view, before = self._story.view, (self._story.view.connected, self._story.problem)
        new = False
        try:
            end = time.monotonic() + TELL_EVERY_S
            while time.monotonic() < end:
                batch = self._reader.read(READ_S)
                with self._taking:
                    self._story.apply(batch)
                if batch.events or batch.report is not None:
                    new, self._story.problem = True, ""
                if not batch.more:
                    break
        except LsgdError as error:
            self._story.problem = str(error)
            with self._taking:
                self._story.apply(Batch())
            self._stop_asked.wait(RETRY_S)
        return new or before != (view.connected, self._story.problem)

    def _say(self) -> str:
        document = snapshot(self._story)
        text = encoded(document)
        self._tell(text)
        return text
