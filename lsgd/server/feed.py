"""What the server publishes: it puts what happens into the stream of events, and knows who reads it."""

from collections.abc import Iterable

from lsgd.protocol.events import Happening, Note, RunChanged, WorkerChanged
from lsgd.protocol.messages import Events
from lsgd.server.report import progress
from lsgd.server.state import RunState
from lsgd.server.stream import Stream

PROGRESS_EVERY_S = 1.0
"""How often the stream of events says how far the run is, in seconds."""

PROGRESS_WORKERS = 1000
"""With more workers than this, it says so less often, in proportion."""

FOLLOWS_FOR_S = 1.5
"""How long after its last question somebody still counts as following the stream of events."""


class Feed:
    """One server's stream of events, and what has yet to enter it: that leaves after the answers.

    Args:
        elections: rounds of the run before this server began.
    """

    def __init__(self, elections: Iterable[Happening]) -> None:
        self.stream = Stream()
        self._happened: list[Happening] = list(elections)
        self._departed: set[str] = set()  # workers that have left since the last progress
        self._progress_at = 0.0
        self._readers: dict[bytes, tuple[float, int]] = {}  # when they asked, and the last event that they got

    def add(self, happened: Iterable[Happening]) -> None:
        """Add facts."""
        self._happened += happened

    def note(self, words: str) -> None:
        """Add a line of the log that does not come from the coordinator."""
        self._happened.append(Note("", words))

    def answer(self, peer: bytes, after: int, now: float) -> Events:
        """Return the events after a number, for a reader."""
        events = self.stream.after(after)
        self._readers[peer] = now, events.first + len(events.items) - 1
        return events

    def is_read(self, now: float) -> bool:
        """Whether somebody reads the stream, and has not been sent the last events."""
        return any(now - at < FOLLOWS_FOR_S and last < self.stream.last for at, last in self._readers.values())

    def last_of(self, peer: bytes) -> int:
        """Return the number of the last event that a reader got."""
        return self._readers[peer][1]

    def forget_readers(self, now: float) -> None:
        """Forget those who read no more."""
        self._readers = {peer: read for peer, read in self._readers.items() if now - read[0] < FOLLOWS_FOR_S}

    def publish(self, state: RunState, now: float, *, last: bool = False) -> None:
        """Put what has happened into the stream, and now and then, and at the end, how far the run is.

        ``last``: this is the end, and the progress has who has left since it was known.
        """
        self._departed |= {w.worker for w in self._happened if isinstance(w, WorkerChanged) and w.state == "left"}
        ends = any(isinstance(what, RunChanged) and what.state == "over" for what in self._happened)
        if ends or last or now >= self._progress_at:
            self._progress_at = now + PROGRESS_EVERY_S * max(1.0, len(state.roster.members) / PROGRESS_WORKERS)
            self._happened.insert(0 if ends else len(self._happened), progress(state, now, self._departed))
            self._departed.clear()
        if self._happened:
            self.stream.add(self._happened)
            self._happened.clear()
