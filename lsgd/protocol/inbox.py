"""Messages that nobody has handled yet: each peer's in order, and the peers in turns."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice

from lsgd.protocol.packing import unpack

MAX_CHUNK = 128
"""Most frames of one peer before the others have their turn."""

MAX_WAITING_NBYTES = 16 << 20
"""How much of one peer's may wait; the rest is dropped. Peers send again what is not answered."""

_PART_NBYTES = 64  # memory that a part takes besides its bytes


class Inbox:
    """Parts of messages by peer, unpacked only when their turn comes.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queues: dict[bytes, _Queue] = {}  # the next in turn first
        self._dropped: Counter[bytes] = Counter()

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._queues)

    def put(self, peer: bytes, part: bytes) -> None:
        """Add a part of a peer's message, or drop it if too much of that peer waits."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _Queue()
        if queue.nbytes > MAX_WAITING_NBYTES:
            self._dropped[peer] += 1
        else:
            queue.put(part)

    def take(self, until: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield (peer, frames), a bounded number of frames for each peer in turn, until the time ``until``."""
        while self._queues:
            peer = next(iter(self._queues))
            queue = self._queues.pop(peer)
            frames = queue.take(MAX_CHUNK)
            if len(frames) == MAX_CHUNK:  # there may be more
                self._queues[peer] = queue
            if frames:
                yield peer, frames
            if self._clock() >= until:
                return

    def losses(self) -> Iterator[str]:
        """Yield a line for each peer whose messages were dropped since the last call."""
        for peer, count in self._dropped.items():
            yield f"dropped {count} messages from {peer!r}: it sends faster than they can be handled"
        self._dropped.clear()


class _Queue:
    def __init__(self) -> None:
        self.nbytes = 0
        self._parts: deque[bytes] = deque()
        self._frames: Iterator[bytes] = iter(())

    def put(self, part: bytes) -> None:
        self.nbytes += len(part) + _PART_NBYTES
        self._parts.append(part)

    def take(self, limit: int) -> list[bytes]:
        """Return the next frames; fewer than ``limit`` only if there are no more."""
        frames = list(islice(self._frames, limit))
        while len(frames) < limit and self._parts:
            part = self._parts.popleft()
            self.nbytes -= len(part) + _PART_NBYTES
            self._frames = iter(unpack([part]))
            frames += islice(self._frames, limit - len(frames))
        return frames
