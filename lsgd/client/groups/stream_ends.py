"""The two ends of a stream."""

import fcntl
import select
import socket
import ssl
import struct
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lsgd.client.groups.stream import GOODBYE, HEADER, TURN_NBYTES, WOULD_BLOCK, Loop, TensorStream, WireMessage

AT_ONCE_NBYTES = 16 << 10
"""How many bytes of a larger message must have arrived before they are read, for fewer reads. More would close TCP's
window. TLS may already hold the start of a record, which is at most this long; then as much is still to come."""

JOINED_NBYTES = 16 << 10
"""Messages up to this size are copied behind their headers, to leave in one packet or TLS record."""

RECORD_NBYTES = 16 << 10
"""The longest record of TLS. The start of one is lost with its connection, although the receiver's system has it."""

SENT_NBYTES = 16 * RECORD_NBYTES
"""How much is given to TLS at a time: it says nothing of what has left before all of that has."""

STALLED_S = 5.0
"""A connection is given up if nothing is acknowledged for this long although bytes are under way, in seconds."""

_UNACKED_OFFSET = 24  # of tcpi_unacked, packets under way, in Linux's struct tcp_info


class OutgoingStream(TensorStream):
    """Carries messages to the other member."""

    def __init__(self, peer: str, loop: Loop, lost: Callable[[], None]) -> None:
        super().__init__(peer, loop, lost)
        self._kept: deque[WireMessage] = deque()  # have left, but may not have arrived
        self._arrived = 0  # at least so many bytes of the stream
        self._under_way = (0, 0)  # as it was when it last changed
        self._changed_at = 0.0

    def connect(self, connection: socket.socket, received: int) -> None:
        """Take ownership of this connection, and use it; ``received`` bytes of the stream have arrived."""
        with self._lock:
            self._messages.extendleft(reversed(self._kept))
            self._kept.clear()
            while self._messages and self._messages[0].end <= received:
                self._finish()
            first = self._messages[0].start if self._messages else self._put
            if not first <= received <= self._put:
                connection.close()
                self._fail(ConnectionError(f"{self.peer} lacks {first - received} bytes that are no longer here"))
                return
            self._moved, self._arrived = first, received
            self._under_way = (-1, 0)  # that of another connection says nothing
            if self._messages:
                self._begin(self._messages[0])
                self._skip(received - first)
            self._connect(connection)

    def release(self, message: WireMessage) -> None:
        """Keep a copy of what is not acknowledged, and stop using the tensor's memory."""
        with self._lock:
            message.released = True
            arrived = self._note_arrived()
            while self._kept and self._kept[0].released and self._kept[0].end <= arrived:
                self._kept.popleft()
            if message not in self._messages:
                message.keep(arrived)
            else:  # it is sent again
                message.keep(message.start)
                if message is self._messages[0] and not self._in_header and len(message.view) > JOINED_NBYTES:
                    self._rest = message.view[len(message.view) - len(self._rest) :]

    def watch(self) -> None:
        """Give up a connection whose other end is silent: a new one may be routed differently, or be made at once."""
        with self._lock:
            if (connection := self._connection) is None:
                return
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_OFFSET + 4)
            (packets,) = struct.unpack_from("=I", state, _UNACKED_OFFSET)  # 0 if the receiver's window is full
            now, under_way = time.monotonic(), (self._moved, _unacknowledged_nbytes(connection))
            if not packets or under_way != self._under_way:
                self._under_way, self._changed_at = under_way, now
            elif now - self._changed_at > STALLED_S:
                self._break(TimeoutError(f"nothing has arrived for {STALLED_S:g} s"))

    def close(self) -> None:
        """Close the connection for good, and tell the other end if that is possible now."""
        with self._lock, suppress(OSError):
            if (connection := self._connection) is not None and not self._messages:
                connection.send(GOODBYE)
        super().close()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._kept.clear()

    def _drop(self) -> None:
        self._note_arrived()
        super()._drop()

    def _note_arrived(self) -> int:
        """Return how many bytes of the stream have certainly arrived; without a connection, as of the last one."""
        if (connection := self._connection) is not None:
            record = RECORD_NBYTES if isinstance(connection, ssl.SSLSocket) else 0
            lost_nbytes = _unacknowledged_nbytes(connection) + self.between_nbytes + record
            self._arrived = max(self._arrived, self._moved - lost_nbytes)
        return self._arrived

    def _skip(self, count: int) -> None:
        """Continue the first message after ``count`` of its bytes."""
        self._moved += count
        if self._in_header and count >= len(self._rest):
            count -= len(self._rest)
            self._in_header, self._rest = False, self._messages[0].view
        self._rest = self._rest[count:]

    def _begin(self, message: WireMessage) -> None:
        self._in_header = bool(message.header) and len(message.view) > JOINED_NBYTES
        if self._in_header:
            self._rest = memoryview(message.header)
        else:
            self._rest = memoryview(message.header + message.view) if message.header else message.view

    def _next_part(self) -> None:
        if self._in_header:
            self._in_header, self._rest = False, self._messages[0].view
        else:
            self._kept.append(self._finish())

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        return connection.send(view[:SENT_NBYTES] if isinstance(connection, ssl.SSLSocket) else view)

    def _arm(self, connection: socket.socket) -> None:
        moving = select.EPOLLOUT if self._messages else 0
        self._loop.arm(connection.fileno(), moving | select.EPOLLIN | select.EPOLLRDHUP)

    def _check_closed(self, connection: socket.socket) -> None:
        """Notice if the other end, which sends nothing, has closed the connection."""
        with suppress(*WOULD_BLOCK):
            if not connection.recv(1):
                raise ConnectionResetError("it was closed at the other end")


def _unacknowledged_nbytes(connection: socket.socket) -> int:
    """Return how many bytes the receiver's system has not acknowledged, those of TLS included."""
    (nbytes,) = struct.unpack("=i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))
    return int(nbytes)


class IncomingStream(TensorStream):
    """Carries messages from the other member."""

    def __init__(self, peer: str, loop: Loop, lost: Callable[[], None]) -> None:
        super().__init__(peer, loop, lost)
        self._header = bytearray(HEADER.size)
        self._ahead = memoryview(b"")  # arrived over an earlier connection before it was expected
        self._waits_for = 1  # bytes that must have arrived before the socket counts as ready

    def connect(self, connection: socket.socket, received: int) -> None:
        """Take ownership of this connection, and use it."""
        with self._lock:
            self._waits_for = 1
            self._connect(connection)

    def renew(self) -> int:
        """Read what has arrived, close the connection, and return how many bytes of the stream have arrived."""
        with self._lock:
            self._advance()
            if (connection := self._connection) is not None:
                ahead = bytearray(self._ahead)
                with suppress(OSError):
                    while more := connection.recv(TURN_NBYTES):
                        ahead += more
                self._ahead = memoryview(ahead)
                self._drop()
            return self._moved + len(self._ahead)

    def _begin(self, message: WireMessage) -> None:
        self._in_header, self._rest = True, memoryview(self._header)

    def _next_part(self) -> None:
        message = self._messages[0]
        if not self._in_header:
            self._finish()
            return
        if self._header == GOODBYE:
            raise ValueError("it has left the group")
        if self._header != message.header:
            theirs, ours = (HEADER.unpack(header) for header in (self._header, message.header))
            raise ValueError(
                f"it sends {theirs[0]} bytes where {ours[0]} are expected"
                if theirs[0] != ours[0]
                else "it is in a different operation than this member"
            )
        self._in_header, self._rest = False, message.view

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        if self._ahead:
            count = min(len(view), len(self._ahead))
            view[:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            return count
        if not (count := connection.recv_into(view)):
            raise ConnectionResetError("it was closed at the other end")
        return count

    def _arm(self, connection: socket.socket) -> None:
        if not self._messages:
            return
        large = len(self._rest) > 2 * AT_ONCE_NBYTES and not self._in_header
        waits_for = AT_ONCE_NBYTES if large else 1
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, waits_for)
        self._loop.arm(connection.fileno(), select.EPOLLIN)

    def _has_buffered(self, connection: socket.socket) -> bool:
        return bool(self._ahead) or (isinstance(connection, ssl.SSLSocket) and connection.pending() > 0)
