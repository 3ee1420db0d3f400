"""Lines: each carries messages one way between this member and another, in the order in which they are put.

A message is a header and a tensor's bytes, which are sent from where they lie and received to where they belong.
Both ends put the same messages in the same order, since all members call the same verbs; so a message needs no number,
and the header only shows a program that does otherwise. A receiver's system takes in what comes before it is expected.

A line is served by whoever puts something, as long as that does not have to wait, and then by the thread of its
:class:`Loop`: one for all lines that send, and one for all that receive. Its lock is held by one of them at a time,
and never while waiting.
"""

import os
import select
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

TURN_NBYTES = 1 << 20
"""After so many bytes it is another line's turn."""

JOINED_NBYTES = 16 << 10
"""Messages of up to so many bytes are copied to their headers, so that they leave in one packet or TLS record."""

_HEADER = struct.Struct("!QI")  # bytes of the message, and a checksum of the verb's name
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Work:
    """Messages that are waited for together."""

    def __init__(self) -> None:
        self._parcels: list[Parcel] = []
        self._left = 0
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()

    def start(self, puts: Sequence[tuple["Line", memoryview]], verb: str) -> None:
        """Put a message on each of some lines; once only."""
        self._parcels = [Parcel(line.peer, view, zlib.crc32(verb.encode()), self) for line, view in puts]
        self._left = len(puts)
        for (line, _), parcel in zip(puts, self._parcels, strict=True):
            line.put(parcel)

    def wait(self, deadline: float) -> None:
        """Wait until all messages are sent and received.

        Raises:
            OSError: it failed, or ``deadline`` (of ``time.monotonic``) has passed.
        """
        if self._left and not self._over.wait(max(0.0, deadline - time.monotonic())) and self._left:
            missing = [parcel.peer for parcel in self._parcels if not parcel.done]
            raise TimeoutError(f"{', '.join(dict.fromkeys(missing))} did not do its part in time")
        if self._error is not None:
            raise self._error

    def one_done(self) -> None:
        """Note that a message is through."""
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self._over.set()

    def fail(self, error: Exception) -> None:
        """Note that a message will not come through."""
        self._error = self._error or error
        self._over.set()


class Parcel:
    """A message on its way: what is left of it to be moved."""

    def __init__(self, peer: str, view: memoryview, tag: int, work: Work) -> None:
        self.peer = peer
        self.view = view
        self.header = _HEADER.pack(len(view), tag)
        self.work = work
        self.done = False


class Loop:
    """A thread that serves the lines of one direction."""

    def __init__(self, name: str, event: int) -> None:
        self._event = event
        self._lines: dict[int, Line] = {}
        self._epoll = select.epoll()
        self._ended = os.eventfd(0)
        self._epoll.register(self._ended, select.EPOLLIN)
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def add(self, descriptor: int, line: "Line") -> None:
        """Serve a line's socket from now on, each time that :meth:`arm` asks for it."""
        self._lines[descriptor] = line
        self._epoll.register(descriptor, select.EPOLLONESHOT)

    def arm(self, descriptor: int) -> None:
        """Serve the line once, as soon as its socket is ready."""
        self._epoll.modify(descriptor, self._event | select.EPOLLONESHOT)

    def remove(self, descriptor: int) -> None:
        """Forget a socket that is about to be closed."""
        del self._lines[descriptor]
        with suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)

    def end(self) -> None:
        """End the thread."""
        with suppress(OSError):
            os.eventfd_write(self._ended, 1)

    def _serve(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._ended:
                    self._epoll.close()
                    os.close(self._ended)
                    return
                if line := self._lines.get(descriptor):
                    line.serve()


class Line:
    """One way between this member and another.

    Args:
        peer: the other's name.
        loop: that serves it.
    """

    def __init__(self, peer: str, loop: Loop) -> None:
        self.peer = peer
        self._loop = loop
        self._lock = threading.Lock()
        self._parcels: deque[Parcel] = deque()
        self._rest = memoryview(b"")  # what is left of the part of the first parcel that moves
        self._in_header = True
        self._connection: socket.socket | None = None
        self._error: Exception | None = None

    @property
    def connected(self) -> bool:
        """Whether it has its connection."""
        return self._connection is not None

    def put(self, parcel: Parcel) -> None:
        """Move a message after those before it."""
        with self._lock:
            if self._error is not None:
                parcel.work.fail(self._error)
                return
            self._parcels.append(parcel)
            if len(self._parcels) == 1:
                self._begin(parcel)
                self._advance()

    def connect(self, connection: socket.socket) -> None:
        """Use this connection, which belongs to the line from now on."""
        with self._lock:
            if self._error is not None or self._connection is not None:
                connection.close()
                return
            self._connection = connection
            self._loop.add(connection.fileno(), self)
            self._advance()

    def serve(self) -> None:
        """Move what can be moved without waiting."""
        with self._lock:
            self._advance()

    def fail(self, error: Exception) -> None:
        """Close the connection, and let all messages fail, those to come too."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        if (connection := self._connection) is not None:
            self._connection = None
            self._loop.remove(connection.fileno())
            with suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            connection.close()
        while self._parcels:
            self._parcels.popleft().work.fail(error)

    def _advance(self) -> None:
        connection = self._connection
        if connection is None or not self._parcels:
            return
        try:
            moved = 0
            while self._parcels and (moved < TURN_NBYTES or self._holds_some(connection)):
                count = self._move(connection, self._rest)
                moved += count
                self._rest = self._rest[count:]
                if not self._rest:
                    self._next_part()
        except _WOULD_BLOCK:
            pass
        except (OSError, ValueError) as error:
            self._fail(ConnectionError(f"the connection with {self.peer} failed: {error}"))
            return
        if self._parcels:
            self._loop.arm(connection.fileno())

    def _finish(self) -> None:
        """The first message is through; begin with the next."""
        parcel = self._parcels.popleft()
        parcel.done = True
        if self._parcels:
            self._begin(self._parcels[0])
        parcel.work.one_done()

    def _begin(self, parcel: Parcel) -> None:
        raise NotImplementedError

    def _next_part(self) -> None:
        raise NotImplementedError

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        raise NotImplementedError

    def _holds_some(self, connection: socket.socket) -> bool:
        """Whether there are bytes in the connection that its descriptor does not show."""
        return False


class Outgoing(Line):
    """Carries messages to the other member."""

    def _begin(self, parcel: Parcel) -> None:
        self._in_header = len(parcel.view) > JOINED_NBYTES
        self._rest = memoryview(parcel.header if self._in_header else parcel.header + parcel.view)

    def _next_part(self) -> None:
        if self._in_header:
            self._in_header, self._rest = False, self._parcels[0].view
        else:
            self._finish()

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        return connection.send(view)


class Incoming(Line):
    """Carries messages from the other member."""

    def __init__(self, peer: str, loop: Loop) -> None:
        super().__init__(peer, loop)
        self._header = bytearray(_HEADER.size)

    def _begin(self, parcel: Parcel) -> None:
        self._in_header, self._rest = True, memoryview(self._header)

    def _next_part(self) -> None:
        parcel = self._parcels[0]
        if not self._in_header:
            self._finish()
            return
        if self._header != parcel.header:
            theirs, ours = (_HEADER.unpack(header) for header in (self._header, parcel.header))
            raise ValueError(
                f"{theirs[0]} bytes come where {ours[0]} are expected"
                if theirs[0] != ours[0]
                else "it is at another verb of the algorithm than this member"
            )
        self._in_header, self._rest = False, parcel.view

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        if not (count := connection.recv_into(view)):
            raise ConnectionResetError("it was closed at the other end")
        return count

    def _holds_some(self, connection: socket.socket) -> bool:
        return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0
