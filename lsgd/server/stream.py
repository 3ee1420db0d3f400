"""The stream of events: numbered, and kept for a while for whoever asks."""

import secrets
import time
from collections.abc import Callable, Iterable

from lsgd.protocol.events import Happening, Note, encode_event
from lsgd.protocol.messages import Events

MAX_EVENTS, MAX_KEPT_NBYTES = 1 << 16, 16 << 20
"""Most events that are kept, and their size."""

MAX_ANSWER_EVENTS, MAX_ANSWER_NBYTES = 1024, 256 << 10
"""Most events in an answer, and their size; a single larger event is still sent."""

_ITEM_NBYTES = 64  # memory that one takes besides its bytes


class Stream:
    """Keeps the last events in encoded form. It keeps no state for readers, so none can slow it.

    Attributes:
        epoch: identifies this stream, because another one has other numbers.
        last: number of the last event; 0: there is none.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.epoch = secrets.token_hex(8)
        self.last = 0
        self._clock = clock
        self._items: list[bytes] = []
        self._nbytes = 0

    def add(self, happened: Iterable[Happening]) -> None:
        """Add events that have happened now, in order."""
        now = self._clock()
        for what in happened:
            item = _encoded(now, what)
            self._items.append(item)
            self._nbytes += len(item) + _ITEM_NBYTES
            self.last += 1
        while len(self._items) > MAX_EVENTS or (self._nbytes > MAX_KEPT_NBYTES and len(self._items) > 1):
            gone = -(-len(self._items) // 8)  # many at once, because each deletion moves all others
            self._nbytes -= sum(map(len, self._items[:gone])) + gone * _ITEM_NBYTES
            del self._items[:gone]

    def after(self, seq: int) -> Events:
        """Return the events after number ``seq``, as many as an answer holds; none if there are none yet."""
        seq = min(max(seq, 0), self.last)
        begin = self.last - len(self._items)  # number of the event before the first kept one
        at = max(seq - begin, 0)
        chosen: list[bytes] = []
        room = MAX_ANSWER_NBYTES
        for item in self._items[at : at + MAX_ANSWER_EVENTS]:
            room -= len(item)
            if room < 0 and chosen:
                break
            chosen.append(item)
        return Events(self.epoch, begin + at + 1, self.last, max(begin - seq, 0), tuple(chosen))


def _encoded(now: float, what: Happening) -> bytes:
    """Return an event's bytes; in place of one that cannot be encoded, those of a note about it."""
    try:
        return encode_event(now, what)
    except (OverflowError, ValueError) as error:  # a number of more than 64 bits, a text that is no Unicode
        return encode_event(now, Note("", f"a {type(what).__name__} cannot be encoded: {type(error).__name__}"))
