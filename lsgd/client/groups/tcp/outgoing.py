"""The sending end of a line."""

import fcntl
import select
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lsgd.client.groups.tcp.line import WOULD_BLOCK, Line
from lsgd.client.groups.tcp.loop import Loop
from lsgd.client.groups.tcp.work import GOODBYE, Parcel

JOINED_NBYTES = 16 << 10
"""Messages up to this size are copied behind their headers, to leave in one packet or TLS record."""

STALLED_S = 5.0
"""A connection is given up if nothing is acknowledged for this long although bytes are under way, in seconds."""

_UNACKED_OFFSET = 24  # of tcpi_unacked, packets under way, in Linux's struct tcp_info


class Outgoing(Line):
    """Carries messages to the other member."""

    def __init__(self, peer: str, loop: Loop, lost: Callable[[], None]) -> None:
        super().__init__(peer, loop, lost)
        self._kept: deque[Parcel] = deque()  # have left, but may not have arrived
        self._under_way = (0, 0)  # as it was when it last changed
        self._changed_at = 0.0

    def connect(self, connection: socket.socket, received: int) -> None:
        """Take ownership of this connection, and use it; ``received`` bytes of the stream have arrived."""
        with self._lock:
            self._parcels.extendleft(reversed(self._kept))
            self._kept.clear()
            while self._parcels and self._parcels[0].end <= received:
                self._finish()
            first = self._parcels[0].start if self._parcels else self._put
            if not first <= received <= self._put:
                connection.close()
                self._fail(ConnectionError(f"{self.peer} lacks {first - received} bytes that are no longer here"))
                return
            self._moved = first
            if self._parcels:
                self._begin(self._parcels[0])
                self._skip(received - first)
            self._connect(connection)

    def release(self, parcel: Parcel) -> None:
        """Keep a copy of what is not acknowledged, and stop using the tensor's memory."""
        with self._lock:
            parcel.released = True
            arrived = max(0, self._moved - self._under_way_nbytes() - self.between_nbytes)
            while self._kept and self._kept[0].released and self._kept[0].end <= arrived:
                self._kept.popleft()
            if parcel not in self._parcels:
                parcel.keep(arrived)
            else:  # it is sent again
                parcel.keep(parcel.start)
                if parcel is self._parcels[0] and not self._in_header and len(parcel.view) > JOINED_NBYTES:
                    self._rest = parcel.view[len(parcel.view) - len(self._rest) :]

    def watch(self) -> None:
        """Give up a connection whose other end is silent: a new one may be routed differently, or be made at once."""
        with self._lock:
            if (connection := self._connection) is None:
                return
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_OFFSET + 4)
            (packets,) = struct.unpack_from("=I", state, _UNACKED_OFFSET)  # 0 if the receiver's window is full
            now, under_way = time.monotonic(), (self._moved, self._under_way_nbytes())
            if not packets or under_way != self._under_way:
                self._under_way, self._changed_at = under_way, now
            elif now - self._changed_at > STALLED_S:
                self._break(TimeoutError(f"nothing has arrived for {STALLED_S:g} s"))

    def close(self) -> None:
        """Close the connection for good, and tell the other end if that is possible now."""
        with self._lock, suppress(OSError):
            if (connection := self._connection) is not None and not self._parcels:
                connection.send(GOODBYE)
        super().close()

    def _under_way_nbytes(self) -> int:
        """Return an upper bound of the bytes that the receiver's system has not acknowledged."""
        if self._connection is None:
            return self._moved
        (nbytes,) = struct.unpack("=i", fcntl.ioctl(self._connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))
        return int(nbytes)

    def _skip(self, count: int) -> None:
        """Continue the first message after ``count`` of its bytes."""
        self._moved += count
        if self._in_header and count >= len(self._rest):
            count -= len(self._rest)
            self._in_header, self._rest = False, self._parcels[0].view
        self._rest = self._rest[count:]

    def _begin(self, parcel: Parcel) -> None:
        self._in_header = bool(parcel.header) and len(parcel.view) > JOINED_NBYTES
        if self._in_header:
            self._rest = memoryview(parcel.header)
        else:
            self._rest = memoryview(parcel.header + parcel.view) if parcel.header else parcel.view

    def _next_part(self) -> None:
        if self._in_header:
            self._in_header, self._rest = False, self._parcels[0].view
        else:
            self._kept.append(self._finish())

    def _move(self, connection: socket.socket, view: memoryview) -> int:
        return connection.send(view)

    def _arm(self, connection: socket.socket) -> None:
        moving = select.EPOLLOUT if self._parcels else 0
        self._loop.arm(connection.fileno(), moving | select.EPOLLIN | select.EPOLLRDHUP)

    def _check_closed(self, connection: socket.socket) -> None:
        """Notice if the other end, which sends nothing, has closed the connection."""
        with suppress(*WOULD_BLOCK):
            if not connection.recv(1):
                raise ConnectionResetError("it was closed at the other end")
