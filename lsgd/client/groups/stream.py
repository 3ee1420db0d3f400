"""Streams: each carries messages one way between this member and another, in the order in which they are put.

A message is a header and a tensor's bytes, which are sent from the tensor and received into a tensor. All members call
the same verbs, so both ends put the same messages in the same order. Messages need no number, and the header only
detects a program that breaks this rule. What arrives before it is expected waits in the receiver's system.

A stream is served by whoever puts something, as long as that need not wait, and then by the thread of its
:class:`~lsgd.client.groups.stream.Loop`: one for all streams that send, one for all that receive. The lock is held by
one of them at a time, and never while waiting.

A stream outlives its connection: the next one continues with the first byte that the receiver lacks. So the sender
keeps its messages: in the tensors while these belong to the group; after that, it copies what the receiver's system has
not acknowledged. The receiver sends nothing, because closing a connection with unread data loses what is under way.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

logger = logging.getLogger("lsgd")

HEADER = struct.Struct("!QI")
"""Precedes each message: its length in bytes, and a checksum of the verb's name."""

GOODBYE = HEADER.pack((1 << 64) - 1, 0)
"""Instead of a header: this was the last message."""

TURN_NBYTES = 1 << 20
"""After this many bytes it is another stream's turn."""

CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The errors if the other side, or anyone in between, has closed a TLS connection."""

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

TURN_S = 1.0
"""How often streams that are idle or waited for are checked, in seconds."""


@dataclass(eq=False)
class WireMessage:
    """A message on its way.

    Attributes:
        view: the tensor's memory.
        start: position of its header in the stream.
        done: whether it has left or arrived.
        released: whether its operation was waited for, so that the memory no longer belongs to the group.
    """

    header: bytes
    view: memoryview
    operation: Operation
    start: int = 0
    done: bool = False
    released: bool = False

    def keep(self, arrived: int) -> None:
        """Replace the tensor's memory by a copy of what comes after position ``arrived`` in the stream."""
        body = self.start + len(self.header)
        if arrived <= body:
            self.view = memoryview(bytes(self.view))
        else:
            self.start, self.header, self.view = arrived, b"", memoryview(bytes(self.view[arrived - body :]))

    @property
    def end(self) -> int:
        """Where the next one starts in the stream."""
        return self.start + len(self.header) + len(self.view)


class Operation:
    """Messages that a verb waits for together.

    Attributes:
        started_at: time when they were put, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self._puts: list[tuple[TensorStream, WireMessage]] = []
        self._left = 0
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.started_at = 0.0

    def start(self, puts: Sequence[tuple[TensorStream, memoryview]], verb: str) -> None:
        """Put these messages on their streams; call it once."""
        tag = zlib.crc32(verb.encode())
        self._puts = [(stream, WireMessage(HEADER.pack(len(view), tag), view, self)) for stream, view in puts]
        self._left, self.started_at = len(puts), time.monotonic()
        for stream, message in self._puts:
            stream.put(message)

    def wait(
        self, silence_s: float, meanwhile: Callable[[Sequence[TensorStream]], None] = lambda streams: None
    ) -> None:
        """Wait until all messages are sent and received; :meth:`release` frees their memory.

        Now and then, ``meanwhile`` is called with the streams that are waited for.

        Raises:
            OSError: it failed, or one of these streams moved no byte for ``silence_s``.
        """
        turn_s = min(TURN_S, silence_s)
        while self._left and not self._over.wait(turn_s) and self._left:
            streams = [stream for stream, message in self._puts if not message.done]
            turn_s = min(TURN_S, self._silence_left_s(streams, silence_s))
            if streams:
                meanwhile(streams)
        if self._error is not None:
            raise self._error

    def _silence_left_s(self, streams: Sequence[TensorStream], silence_s: float) -> float:
        """Return how long the streams may still be silent."""
        now = time.monotonic()
        left_s = {stream: max(self.started_at, stream.moved_at) + silence_s - now for stream in streams}
        late = {stream.peer: stream.trouble for stream in streams if left_s[stream] <= 0}
        if late:
            words = [f"{peer} did not do its part in time{f' ({why})' if why else ''}" for peer, why in late.items()]
            raise TimeoutError("; ".join(words))
        return min(left_s.values(), default=silence_s)

    def release(self) -> None:
        """Stop using the messages' memory; all must be through."""
        for stream, message in self._puts:
            stream.release(message)
        self._puts = []  # messages refer to their operation: this breaks the cycle, which would hold the memory

    def one_done(self) -> None:
        """Record that a message is through."""
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self._over.set()

    def fail(self, error: Exception) -> None:
        """Record that a message failed."""
        self._error, self._puts = self._error or error, []
        self._over.set()


class StreamProgress(NamedTuple):
    """The progress of messages with a peer."""

    peer: str
    seconds: float
    moved_nbytes: int
    left_nbytes: int

    @property
    def left_s(self) -> float:
        """How long the rest takes at the rate until now."""
        return self.left_nbytes * self.seconds / self.moved_nbytes if self.moved_nbytes else math.inf

    def __str__(self) -> str:
        done, all_ = self.moved_nbytes / 1e6, (self.moved_nbytes + self.left_nbytes) / 1e6
        left = f", about {self.left_s:.0f} s left" if self.moved_nbytes else ""
        return f"{done:.1f} of {all_:.1f} MB with {self.peer} at {8 * done / self.seconds:.2f} Mbit/s{left}"


class TensorStream:
    """One way between this member and another.

    Args:
        peer: the other's name.
        lost: called when its connection has broken.

    Attributes:
        trouble: reason for having no connection; empty before the first one is lost.
        between_nbytes: acknowledged bytes that may be lost with the connection.
        moved_at: time of the last byte that moved, by ``time.monotonic``.
    """

    def __init__(self, peer: str, loop: Loop, lost: Callable[[], None]) -> None:
        self.peer = peer
        self.trouble = ""
        self.between_nbytes = 0
        self.moved_at = 0.0
        self._loop = loop
        self._lost = lost
        self._lock = threading.Lock()
        self._messages: deque[WireMessage] = deque()
        self._rest = memoryview(b"")  # the rest of the first message's current part: its header or its body
        self._in_header = True
        self._put = 0  # bytes of the stream that were put
        self._moved = 0  # bytes of the stream that have moved
        self._busy_since = (0.0, 0)  # when the oldest message of an idle stream was put, and what had moved by then
        self._connection: socket.socket | None = None
        self._error: Exception | None = None

    def put(self, message: WireMessage) -> None:
        """Move a message after the earlier ones."""
        with self._lock:
            if self._error is not None:
                message.operation.fail(self._error)
                return
            message.start, self._put = self._put, self._put + len(message.header) + len(message.view)
            self._messages.append(message)
            if len(self._messages) == 1:
                self._busy_since = (time.monotonic(), self._moved)
                self._begin(message)
                self._advance()

    def progress(self) -> StreamProgress:
        """Return how far the messages are that the stream has been moving without a pause."""
        since, before = self._busy_since
        moved_nbytes = max(0, self._moved - before)  # less, if some is sent again
        return StreamProgress(self.peer, time.monotonic() - since, moved_nbytes, self._put - self._moved)

    def waited_since(self) -> float:
        """Return since when an operation has waited for this stream; infinity: none does."""
        with self._lock:
            return next((one.operation.started_at for one in self._messages if not one.done), math.inf)

    def release(self, message: WireMessage) -> None:
        """Stop using a message's memory: it is through, and its operation was waited for."""

    def serve(self) -> None:
        """Move what can be moved without waiting."""
        with self._lock:
            self._advance(check=True)

    def watch(self) -> None:
        """Check that the connection still works; called now and then."""

    def connect(self, connection: socket.socket, received: int) -> None:
        """Take ownership of this connection, and use it; ``received`` bytes of the stream have arrived."""
        raise NotImplementedError

    def renew(self) -> int:
        """Prepare for another connection; return how many bytes of the stream have arrived here."""
        return 0

    def close(self) -> None:
        """Close the connection for good; all messages fail."""
        self.fail(ConnectionAbortedError("the group was closed"))

    def fail(self, error: Exception) -> None:
        """Close the connection for good; all messages fail, including later ones."""
        with self._lock:
            self._fail(error)

    def _connect(self, connection: socket.socket) -> None:
        """Use this connection, with the lock held."""
        if self._error is not None:
            connection.close()
            return
        self._drop()
        self._connection = connection
        self._loop.add(connection.fileno(), self)
        self._advance()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._drop()
        while self._messages:
            self._messages.popleft().operation.fail(error)
        self._rest = memoryview(b"")

    def _drop(self) -> None:
        if (connection := self._connection) is not None:
            self._connection = None
            self._loop.remove(connection.fileno())
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            connection.close()

    def _break(self, error: Exception) -> None:
        """Drop a broken connection; another one may follow."""
        self.trouble = f"the connection with it broke: {error}"
        if isinstance(error, ssl.SSLError) and not isinstance(error, CLOSED):
            logger.warning("data from %s was changed on the way (%s); it is sent again", self.peer, error)
        self._drop()
        self._lost()

    def _advance(self, *, check: bool = False) -> None:
        if (connection := self._connection) is None:
            return
        try:
            moved = 0
            if check:
                self._check_closed(connection)
            while self._messages and (moved < TURN_NBYTES or self._has_buffered(connection)):
                count = self._move(connection, self._rest)
                moved += count
                self._moved += count
                self.moved_at = time.monotonic()
                self._rest = self._rest[count:]
                if not self._rest:
                    self._next_part()
        except WOULD_BLOCK:
            pass
        except OSError as error:
            self._break(error)
            return
        except ValueError as error:
            self._fail(ConnectionError(f"{self.peer}: {error}"))
            return
        self._arm(connection)

    def _finish(self) -> WireMessage:
        """Remove the first message, which is through, and begin the next."""
        message = self._messages.popleft()
        if self._messages:
            self._begin(self._messages[0])
        else:
            self._rest = memoryview(b"")  # an empty view of the message would keep its memory alive
        if not message.done:
            message.done = True
            message.operation.one_done()
        return message

    def _begin(self, message: WireMessage) -> None:
        raise NotImplementedError

    def _next_part(self) -> None:
        raise NotImplementedError

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        raise NotImplementedError

    def _arm(self, connection: socket.socket) -> None:
        """Make the loop serve this stream when there is something to do."""
        raise NotImplementedError

    def _check_closed(self, connection: socket.socket) -> None:
        """Notice if the other end has closed the connection."""

    def _has_buffered(self, connection: socket.socket) -> bool:
        """Whether bytes have arrived that polling the descriptor does not show."""
        return False


class Loop:
    """The thread that serves each stream whose socket is ready, if the stream has asked for it."""

    def __init__(self, name: str) -> None:
        self._streams: dict[int, TensorStream] = {}
        self._epoll = select.epoll()
        self._ended = os.eventfd(0)
        self._epoll.register(self._ended, select.EPOLLIN)
        self._ending = threading.Lock()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def add(self, descriptor: int, stream: TensorStream) -> None:
        """Watch a stream's socket from now on, whenever :meth:`arm` asks for it."""
        self._streams[descriptor] = stream
        self._epoll.register(descriptor, select.EPOLLONESHOT)

    def arm(self, descriptor: int, events: int) -> None:
        """Serve the stream once, at one of these epoll events."""
        self._epoll.modify(descriptor, events | select.EPOLLONESHOT)

    def remove(self, descriptor: int) -> None:
        """Forget a socket that is about to be closed."""
        del self._streams[descriptor]
        with suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)

    def end(self) -> None:
        """End the thread; all sockets must have been removed."""
        if self._ending.acquire(blocking=False):
            os.eventfd_write(self._ended, 1)

    def _serve(self) -> None:
        watched_at = time.monotonic()
        while True:
            for descriptor, _ in self._epoll.poll(TURN_S):
                if descriptor == self._ended:
                    self._epoll.close()
                    os.close(self._ended)
                    return
                if stream := self._streams.get(descriptor):
                    stream.serve()
            if time.monotonic() - watched_at > TURN_S:
                watched_at = time.monotonic()
                for stream in tuple(self._streams.values()):
                    stream.watch()
