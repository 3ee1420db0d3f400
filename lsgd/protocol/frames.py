"""Frames between sockets: several packed into one part, and those that nobody has handled yet."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import msgpack

from lsgd.protocol.fields import MAX_ITEMS
from lsgd.protocol.messages import MAX_NBYTES

PACKED = b"\xc1"
"""First byte of several frames packed into one; no MessagePack, and so no frame, begins with it."""

_PACKING_NBYTES = 6  # most bytes before each frame of a part, and before the first


def pack(frames: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a ZeroMQ message that carries ``frames``: a frame alone as it is, several in one part.

    No part is longer than :data:`lsgd.protocol.messages.MAX_NBYTES`, as long as no frame is. Like the form of
    :class:`lsgd.protocol.messages.Refused`, this form never changes, so that any other version can read a refusal.
    """
    groups: list[list[bytes]] = []
    room = 0
    for frame in frames:
        room -= len(frame) + _PACKING_NBYTES
        if not groups or room < 0 or len(groups[-1]) == MAX_ITEMS:
            groups.append([])
            room = MAX_NBYTES - 2 * _PACKING_NBYTES - len(frame)
        groups[-1].append(frame)
    return [PACKED + msgpack.packb(group) if len(group) > 1 else group[0] for group in groups]


def unpack(parts: Sequence[bytes]) -> list[bytes]:
    """Return the frames that :func:`pack` packed; a badly packed part comes back as one invalid frame."""
    frames: list[bytes] = []
    for part in parts:
        frames += _unpacked(part) if part.startswith(PACKED) else (part,)
    return frames


def _unpacked(part: bytes) -> Sequence[bytes]:
    try:
        bounds = {"max_array_len": MAX_ITEMS, "max_map_len": 0, "max_str_len": 0, "max_ext_len": 0}
        frames = msgpack.unpackb(part[len(PACKED) :], use_list=False, **bounds)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return (part,)
    if type(frames) is not tuple or any(type(frame) is not bytes or frame.startswith(PACKED) for frame in frames):
        return (part,)
    return frames


MAX_CHUNK = 128
"""Most frames of one peer before the others have their turn."""

MAX_WAITING_NBYTES = 16 << 20
"""How much of one peer's may wait; the rest is dropped. Peers send again what is not answered."""

_PART_NBYTES = 64  # memory that a part takes besides its bytes


class Inbox:
    """Parts of messages by peer, unpacked only when their turn comes."""

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

    def drain(self, until: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield (peer, frames), a bounded number of frames for each peer in turn, until the time ``until``."""
        while self._queues:
            peer = next(iter(self._queues))
            queue = self._queues.pop(peer)
            frames = queue.get(MAX_CHUNK)
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

    def get(self, limit: int) -> list[bytes]:
        """Return the next frames; fewer than ``limit`` only if there are no more."""
        frames = list(islice(self._frames, limit))
        while len(frames) < limit and self._parts:
            part = self._parts.popleft()
            self.nbytes -= len(part) + _PART_NBYTES
            self._frames = iter(unpack([part]))
            frames += islice(self._frames, limit - len(frames))
        return frames
