"""Lines: each carries messages one way between this member and another, in the order in which they are put.

A message is a header and a tensor's bytes, which are sent from the tensor and received into a tensor. All members call
the same verbs, so both ends put the same messages in the same order. Messages need no number, and the header only
detects a program that breaks this rule. What arrives before it is expected waits in the receiver's system.

A line is served by whoever puts something, as long as that need not wait, and then by the thread of its
:class:`~lsgd.client.groups.tcp.loop.Loop`: one for all lines that send, one for all that receive. The lock is held by
one of them at a time, and never while waiting.

A line outlives its connection: the next one continues with the first byte that the receiver lacks. So the sender keeps
its messages: in the tensors while these belong to the group; after that, it copies what the receiver's system has not
acknowledged. The receiver sends nothing, because closing a connection with unread data loses what is under way.
"""

import logging
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lsgd.client.groups.tcp.loop import Loop
from lsgd.client.groups.tcp.work import Parcel

logger = logging.getLogger("lsgd")

TURN_NBYTES = 1 << 20
"""After this many bytes it is another line's turn."""

CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""The errors if the other side, or anyone in between, has closed a TLS connection."""

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Line:
    """One way between this member and another.

    Args:
        peer: the other's name.
        loop: that serves it.
        lost: called when its connection has broken.

    Attributes:
        trouble: why it has no connection; empty before the first one is lost.
        between_nbytes: how many acknowledged bytes may be lost with the connection.
    """

    def __init__(self, peer: str, loop: Loop, lost: Callable[[], None]) -> None:
        self.peer = peer
        self.trouble = ""
        self.between_nbytes = 0
        self._loop = loop
        self._lost = lost
        self._lock = threading.Lock()
        self._parcels: deque[Parcel] = deque()
        self._rest = memoryview(b"")  # the rest of the first parcel's current part: its header or its body
        self._in_header = True
        self._put = 0  # bytes of the stream that were put
        self._moved = 0  # bytes of the stream that have moved
        self._connection: socket.socket | None = None
        self._error: Exception | None = None

    def put(self, parcel: Parcel) -> None:
        """Move a message after the earlier ones."""
        with self._lock:
            if self._error is not None:
                parcel.work.fail(self._error)
                return
            parcel.start, self._put = self._put, self._put + len(parcel.header) + len(parcel.view)
            self._parcels.append(parcel)
            if len(self._parcels) == 1:
                self._begin(parcel)
                self._advance()

    def release(self, parcel: Parcel) -> None:
        """Stop using a message's memory: it is through, and its work was waited for."""

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
        while self._parcels:
            self._parcels.popleft().work.fail(error)

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
            while self._parcels and (moved < TURN_NBYTES or self._has_buffered(connection)):
                count = self._move(connection, self._rest)
                moved += count
                self._moved += count
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

    def _finish(self) -> Parcel:
        """Remove the first message, which is through, and begin the next."""
        parcel = self._parcels.popleft()
        if self._parcels:
            self._begin(self._parcels[0])
        else:
            self._rest = memoryview(b"")  # an empty view of the message would keep its memory alive
        if not parcel.done:
            parcel.done = True
            parcel.work.one_done()
        return parcel

    def _begin(self, parcel: Parcel) -> None:
        raise NotImplementedError

    def _next_part(self) -> None:
        raise NotImplementedError

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        raise NotImplementedError

    def _arm(self, connection: socket.socket) -> None:
        """Make the loop serve this line when there is something to do."""
        raise NotImplementedError

    def _check_closed(self, connection: socket.socket) -> None:
        """Notice if the other end has closed the connection."""

    def _has_buffered(self, connection: socket.socket) -> bool:
        """Whether bytes have arrived that polling the descriptor does not show."""
        return False
