"""The receiving end of a line."""

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from lsgd.client.groups.tcp.line import TURN_NBYTES, Line
from lsgd.client.groups.tcp.loop import Loop
from lsgd.client.groups.tcp.work import GOODBYE, HEADER, Parcel

AT_ONCE_NBYTES = 16 << 10
"""How many bytes of a larger message must have arrived before they are read, for fewer reads. More would close TCP's
window. TLS may already hold the start of a record, which is at most this long; then as much is still to come."""


class Incoming(Line):
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

    def _begin(self, parcel: Parcel) -> None:
        self._in_header, self._rest = True, memoryview(self._header)

    def _next_part(self) -> None:
        parcel = self._parcels[0]
        if not self._in_header:
            self._finish()
            return
        if self._header == GOODBYE:
            raise ValueError("it has left the group")
        if self._header != parcel.header:
            theirs, ours = (HEADER.unpack(header) for header in (self._header, parcel.header))
            raise ValueError(
                f"it sends {theirs[0]} bytes where {ours[0]} are expected"
                if theirs[0] != ours[0]
                else "it is in a different operation than this member"
            )
        self._in_header, self._rest = False, parcel.view

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
        if not self._parcels:
            return
        large = len(self._rest) > 2 * AT_ONCE_NBYTES and not self._in_header
        waits_for = AT_ONCE_NBYTES if large else 1
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, waits_for)
        self._loop.arm(connection.fileno(), select.EPOLLIN)

    def _has_buffered(self, connection: socket.socket) -> bool:
        return bool(self._ahead) or (isinstance(connection, ssl.SSLSocket) and connection.pending() > 0)
