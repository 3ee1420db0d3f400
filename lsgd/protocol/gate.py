"""Who may connect to a listener: known keys, each under its name, and a bounded number of unknown peers."""

import errno
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from lsgd.protocol.keys import KeyRing

MAX_LIES = 256
"""Most lines about lying peers that are kept until they are reported."""


class Gate:
    """Lets only known keys connect to a listener, each under the name of its key."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", listener: "zmq.Socket[bytes]", keys: "KeyRing"):
        from zmq.auth.thread import ThreadAuthenticator  # asyncio: for listeners with keys only

        self._keys = keys
        self._names: dict[str, bytes] = {}
        self._refusals: deque[str] = deque(maxlen=MAX_LIES)
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key, in Z85, may connect; in the authenticator's thread."""
        name = self._keys.allowed(z85.decode(key))
        if name:
            self._names[key.decode()] = name.encode()
        return bool(name)

    def admits(self, peer: bytes, part: zmq.Frame) -> bool:
        """Return whether a part of a message came from the peer that it claims to be from."""
        name = self._names.get(property_of(part, "User-Id"), b"")
        if name and peer.partition(b"#")[0] == name:
            return True
        lie = f"dropped a message from {name.decode()}, which calls itself {peer!r}"
        if lie not in self._refusals:
            self._refusals.append(lie)
        return False

    def refusals(self) -> Iterator[str]:
        """Yield a line for each lie since the last call, and one if the list of keys is unusable."""
        if trouble := self._keys.trouble:
            yield trouble
        while self._refusals:
            yield self._refusals.popleft()

    def close(self) -> None:
        """Stop the thread."""
        self._authenticator.stop()


def property_of(part: zmq.Frame, name: int | str) -> Any:
    """Return a property of the connection that a part came over; None if the peer speaks an old ZeroMQ."""
    try:
        return part.get(name)
    except zmq.ZMQError:
        return None


MAX_STRANGERS = 1024
"""Most connections over which no known peer has spoken yet; beyond that, the oldest are cut."""

MAX_REPORTS = 16_384
"""Most reports read in one turn. libzmq accepts some 10,000 connections a second, and a daemon has ten turns."""

LOOK_EVERY_S = 0.02
"""How often reports are read while messages arrive: each look is a system call."""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ALL = int(_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_ACCEPTED, _DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


class Monitor:
    """Reads libzmq's reports about one TCP socket, in the thread that uses the socket.

    The reports say how handshakes end, and which connections no known peer has used. If nobody reads them, libzmq
    blocks when their queue is full, and serves nobody. So the queue has no limit, and the socket's owner empties it at
    every turn.

    ``watched`` is the socket before it binds or connects.

    Attributes:
        handshake: event that the last handshake ended with; 0 if there was none, or if the peer was silent until the
            handshake's deadline: it may be frozen, and has refused nobody.
        refused: number of handshakes that failed.
        closed: peers whose last connection has closed since somebody looked.
        cut: number of connections of unknown peers that were cut because there were too many.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", watched: "zmq.Socket[bytes]") -> None:
        address = f"inproc://monitor-{id(self)}"
        watched.monitor(address, _ALL)
        self._watched = watched
        self._reports = context.socket(zmq.PAIR)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.connect(address)
        self._strangers: dict[int, int] = {}  # descriptor -> inode, the oldest first
        self._known: dict[int, bytes] = {}  # descriptor -> peer
        self._looked_at = 0.0
        self.handshake = 0
        self.refused = 0
        self.closed: list[bytes] = []
        self.cut = 0

    @property
    def strangers(self) -> bool:
        """Whether there are connections over which no known peer has spoken yet."""
        return bool(self._strangers)

    def recognize(self, descriptor: int | None, peer: bytes) -> None:
        """Count a connection as a known peer's: it has said something."""
        if descriptor is not None and self._strangers.pop(descriptor, None) is not None:
            self._known[descriptor] = peer

    def look(self, now: float) -> None:
        """Read the reports, unless that was done a moment ago."""
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self.read()

    def read(self) -> None:
        """Read the reports since the last call, and cut the oldest connections of unknown peers beyond the limit."""
        for _ in range(MAX_REPORTS):
            if not int(self._reports.get(_EVENTS)) & _READABLE:
                break
            kind, value = struct.unpack_from("=HI", self._reports.recv_multipart()[0])
            if kind in (_ACCEPTED, _DISCONNECTED):
                self._strangers.pop(value, None)
                peer = self._known.pop(value, None)
                if peer is not None and peer not in self._known.values():
                    self.closed.append(peer)
            if kind == _ACCEPTED:
                self._strangers[value] = _inode(value)
            elif kind != _DISCONNECTED:
                # The value is the errno of libzmq's last read: no data, or the peer hung up.
                silent = kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN
                self.handshake = 0 if silent else kind
                self.refused += bool(kind & _FAILED)
        excess = len(self._strangers) - max_strangers() if self._strangers else 0
        for descriptor in list(islice(self._strangers, max(0, excess))):
            self.cut += _shut_down(descriptor, self._strangers.pop(descriptor))

    def close(self) -> None:
        """Stop the reports."""
        self._watched.disable_monitor()
        self._reports.close()


def max_strangers() -> int:
    """Return how many connections unknown peers may hold: at most half of the descriptors of this process."""
    return min(MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _inode(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0  # it is closed already


def _shut_down(descriptor: int, inode: int) -> bool:
    """Shut down one of libzmq's connections, which libzmq then closes; leave another one that has its number now."""
    if _inode(descriptor) != inode:
        return False
    try:
        connection = socket.socket(fileno=descriptor)  # not a copy: there may be no descriptor left
    except OSError:
        return False
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    finally:
        connection.detach()
    return True
