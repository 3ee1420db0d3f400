"""The stream of events: what has happened, numbered and kept for a while, for whoever asks."""

import secrets
import time
from collections.abc import Callable, Iterable

from lsgd.protocol.events import Happening, encode_event
from lsgd.protocol.messages import Events

MAX_EVENTS, MAX_KEPT_NBYTES = 1 << 16, 16 << 20
"""How many events are kept, and how much of them."""

MAX_ANSWER_EVENTS, MAX_ANSWER_NBYTES = 1024, 256 << 10
"""How many events an answer has at most, and how much of them; but one if that is larger."""

_ITEM_NBYTES = 64  # what one costs besides its bytes


class Stream:
    """Keeps the last events as they travel. Whoever asks is not remembered, so nobody can keep it waiting.

    Args:
        clock: returns seconds since the epoch.

    Attributes:
        epoch: identifies this stream: numbers of another one mean something else.
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
            item = encode_event(now, what)
            self._items.append(item)
            self._nbytes += len(item) + _ITEM_NBYTES
            self.last += 1
        while len(self._items) > MAX_EVENTS or (self._nbytes > MAX_KEPT_NBYTES and len(self._items) > 1):
            gone = -(-len(self._items) // 8)  # at once: to forget one after the other would move all others each time
            self._nbytes -= sum(map(len, self._items[:gone])) + gone * _ITEM_NBYTES
            del self._items[:gone]

    def after(self, seq: int) -> Events:
        """Return what comes after the event ``seq``, as much as an answer holds; nothing if that is yet to come."""
        seq = min(max(seq, 0), self.last)
        begin = self.last - len(self._items)  # number of the event before the first one that is kept
        at = max(seq - begin, 0)
        chosen: list[bytes] = []
        room = MAX_ANSWER_NBYTES
        for item in self._items[at : at + MAX_ANSWER_EVENTS]:
            room -= len(item)
            if room < 0 and chosen:
                break
            chosen.append(item)
        return Events(self.epoch, begin + at + 1, self.last, max(begin - seq, 0), tuple(chosen))
