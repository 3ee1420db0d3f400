"""The thread that reads a run's events and tells, twice a second at most, what the page shows now."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lsgd.client.dashboard.data import encoded, snapshot
from lsgd.client.dashboard.story import Story
from lsgd.client.watch.metrics import exposition
from lsgd.client.watch.reader import Batch, Reader
from lsgd.errors import LsgdError
from lsgd.output import write_whole

TELL_EVERY_S = 0.5
"""How often the page changes at most."""

TELL_NBYTES_PER_S, TELL_SHARE = 1 << 20, 0.2
"""A large page changes more rarely: so much for each browser at most, and making it takes so much of the time."""

UNSEEN_EVERY_S = 5.0
"""How often the data are made anew while no page is open."""

READ_S = 0.25
RETRY_S = 1.0

KEPT = "dashboard.json"
"""What the page showed at the end, in the run folder: ``lsgd report`` shows it again."""


class Follower(threading.Thread):
    """Follows a run until it is told to end.

    Args:
        reader: of the run's events, which this thread closes at its end.
        story: what is known of the run so far; from now on this thread's alone.
        tell: takes the page's data as JSON, on this thread.
        seen: whether a page is open.
        folder: where to leave :data:`KEPT` at the end; None: nowhere.
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
        """Return the run's metrics in Prometheus' text format; for any thread."""
        with self._taking:
            return exposition(self._story.view)

    def stop(self) -> None:
        """Tell what is new a last time, and end within :data:`READ_S`."""
        self._stop_asked.set()

    def run(self) -> None:
        """Read, and tell."""
        with self._reader:
            changed, told_at, wait_s, state = True, float("-inf"), 0.0, ""
            while not self._stop_asked.is_set():
                changed |= self._take()
                now = time.monotonic()
                due = now - told_at >= (wait_s if self._seen() else UNSEEN_EVERY_S)
                if changed and (due or self._story.view.state != state):
                    text = self._say()
                    changed, told_at, state = False, time.monotonic(), self._story.view.state
                    wait_s = max(TELL_EVERY_S, len(text) / TELL_NBYTES_PER_S, (told_at - now) / TELL_SHARE)
        text = self._say()
        if self._folder and self._story.view.run:
            with suppress(OSError):  # a full disk costs the report its timeline, nothing else
                write_whole(self._folder / KEPT, text)

    def _take(self) -> bool:
        """Read once, and all that waits; return whether there is anything new."""
        view, before = self._story.view, (self._story.view.connected, self._story.problem)
        new = False
        try:
            end = time.monotonic() + TELL_EVERY_S
            while time.monotonic() < end:
                batch = self._reader.read(READ_S)
                self._story.problem = ""
                with self._taking:
                    self._story.take(batch)
                new |= bool(batch.events) or batch.report is not None
                if not batch.more:
                    break
        except LsgdError as error:
            self._story.problem = str(error)
            with self._taking:
                self._story.take(Batch())
            self._stop_asked.wait(RETRY_S)
        return new or before != (view.connected, self._story.problem)

    def _say(self) -> str:
        document = snapshot(self._story)
        text = encoded(document)
        self._tell(text)
        return text
