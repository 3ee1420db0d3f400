"""Every ZeroMQ socket of lsgd: a listener for many peers, a link to one, and the poll over them.

All calls return at once except :func:`wait_for`. Frames are whole messages (messages.py); several travel together,
packed into one (frames.py). A socket belongs to the thread that uses it; :class:`Wakeup` is for the others.

With keys a connection is encrypted and authenticated at both ends (CurveZMQ, https://rfc.zeromq.org/spec/26/), and
the listener knows each peer by the name of its key. :mod:`lsgd.protocol.keys` decides where keys are needed.
"""

import contextlib
import errno
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import zmq
from zmq.utils import z85

from lsgd.errors import ConfigError
from lsgd.protocol.frames import Inbox, pack, unpack
from lsgd.protocol.gate import Gate, Monitor, max_strangers, property_of
from lsgd.protocol.messages import MAX_NBYTES
from lsgd.protocol.ports import user_of, user_of_socket
from lsgd.protocol.socket_folder import MAX_SOCKET_PATH_NBYTES

if TYPE_CHECKING:
    from _typeshed import HasFileno

    from lsgd.protocol.keys import KeyRing

MAX_BATCH = 256
"""Most messages taken from one socket before the others have their turn."""

MAX_PARTS = 4096
"""Most parts of messages that a listener takes from its socket in one turn."""

TURN_S = 0.1
"""How long a listener hands out messages before signals and other sockets have their turn."""

KEY_NBYTES = 32
"""Length of a key of Curve25519."""

_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)  # as enumerations they cost a microsecond
_MORE, _SOURCE = int(zmq.RCVMORE), int(zmq.SRCFD)
_LINGER_MS = 1000
_HEARTBEAT_MS = 2000
_DEAD_MS = 10_000
_HANDSHAKE_MS = 5000  # a peer that connects and says nothing holds a descriptor for this long
_BACKLOG = 512


@dataclass(frozen=True)
class ConnectorKeys:
    """What a link needs: the listener's public key, and a pair of its own, which the listener knows as ``name``."""

    name: str
    server: bytes
    public: bytes
    secret: bytes


def keys_for(keys: ConnectorKeys | None, server: bytes) -> ConnectorKeys | None:
    """Return the keys with another listener's public key; unchanged if that is empty, and None without keys."""
    return replace(keys, server=server) if keys and server else keys


def new_key_pair() -> tuple[bytes, bytes]:
    """Return a new public and secret key."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


def public_key(secret: bytes) -> bytes:
    """Return the public key of a secret one."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def default_local_address() -> str:
    """Return the default address of this machine's local server: a socket of this user.

    Raises:
        ConfigError: its folder is where others could have made it, and they have, or can write it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not base:
        base = f"{tempfile.gettempdir()}/lsgd-{os.getuid()}"
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(base)
            if status.st_uid != os.getuid() or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
                raise ConfigError(
                    f"the folder of the local server's socket, {base}, is not yours alone: another user may have made "
                    f"it, or can write it. Remove it, or choose another address: LSGD_LOCAL=ipc://PATH for the "
                    f"workers, --listen ipc://PATH for the server"
                )
    return f"ipc://{base}/lsgd-local.sock"


class _Socket:
    def __init__(self, kind: int, address: str) -> None:
        self._shared = address.startswith("inproc://")  # both ends have one context
        self._context = zmq.Context.instance() if self._shared else zmq.Context(1)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_NBYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
        self._socket.setsockopt(zmq.IPV6, address.count(":") > 2)  # also one that is typed without its brackets
        self._monitor = Monitor(self._context, self._socket) if address.startswith("tcp://") else None

    def close(self) -> None:
        """Send what is still under way, for a second at most, and close."""
        if self._socket.closed:
            return
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close()
        if not self._shared:
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _readable(self) -> bool:
        return bool(int(self._socket.get(_EVENTS)) & _READABLE)  # a quarter of the time that an Again takes


class Listener(_Socket):
    """A socket that many peers connect to.

    Args:
        address: ``tcp://host:port`` (port 0: a free one) or ``ipc://path``, whose folder is created if needed, for
            this user alone.
        keys: those of peers that may connect; None: whoever can reach the address may.

    Raises:
        ConfigError: the address is wrong, taken, or another machine's.
    """

    def __init__(self, address: str, keys: "KeyRing | None" = None) -> None:
        self._open(address, keys)

    def _open(self, address: str, keys: "KeyRing | None") -> None:
        super().__init__(zmq.ROUTER, address)
        self._keys = keys
        self._inbox = Inbox()
        self._sender = b""  # of the message that is read in part
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Names contain a random number: only the same peer can come again.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._gate = Gate(self._context, self._socket, keys) if keys else None
        try:
            if address.startswith("ipc://"):
                _claim_path(Path(address.removeprefix("ipc://")))
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(_bind_failure(address, error)) from None
        except ConfigError:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def secured(self) -> bool:
        """Whether a peer's name, up to a ``#``, is that of its key."""
        return self._gate is not None

    def close(self) -> None:
        """Send what is still under way, for a second at most, and close."""
        if self._gate is not None:
            self._gate.close()
        super().close()

    def reopen(self) -> None:
        """Drop all connections and incomplete messages, and listen again; peers reconnect by themselves.

        Nothing else frees the parts of a message without an end.
        """
        self._socket.setsockopt(zmq.LINGER, 0)
        self.close()
        self._open(self.address, self._keys)

    @property
    def waiting(self) -> bool:
        """Whether :meth:`receive` could not yield everything in its turn."""
        return bool(self._inbox or self._sender)

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield (peer, frames) of waiting messages, for :data:`TURN_S`; the rest comes with the next call.

        The frames of a peer come in order, many of them in pieces, and the peers in turns.
        """
        now = time.monotonic()
        if self._monitor is not None:
            self._monitor.look(now)
        self._take_in()
        yield from self._inbox.drain(now + TURN_S)

    def _take_in(self) -> None:
        """Move a bounded number of parts from the socket to the inbox; the rest of a long message comes later."""
        gate, monitor = self._gate, self._monitor
        strangers = monitor is not None and monitor.strangers
        copy = gate is None and not strangers
        messages, parts = MAX_BATCH, MAX_PARTS
        while self._sender or (messages and self._readable()):
            if not self._sender:
                messages -= 1
                try:
                    self._sender = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return
            while self._socket.get(_MORE):
                if not parts:
                    return
                parts -= 1
                part: Any = self._socket.recv(zmq.NOBLOCK, copy=copy)
                if copy:
                    self._inbox.put(self._sender, part)
                    continue
                if gate is not None and not gate.admits(self._sender, part):
                    continue
                if strangers and monitor is not None:
                    monitor.recognize(property_of(part, _SOURCE), self._sender)
                self._inbox.put(self._sender, part.bytes)
            self._sender = b""

    def closed(self) -> list[bytes]:
        """Return the peers whose connections over TCP have closed since the last call, and are not made again."""
        if self._monitor is None:
            return []
        closed, self._monitor.closed = self._monitor.closed, []
        return closed

    def refusals(self) -> Iterator[str]:
        """Yield a line for each kind of message or connection that was refused, dropped or cut since the last call."""
        yield from self._inbox.losses()
        refused = cut = 0
        if self._monitor is not None:
            self._monitor.read()
            refused, self._monitor.refused = self._monitor.refused, 0
            cut, self._monitor.cut = self._monitor.cut, 0
        if cut:
            yield (
                f"{_connections(cut)} cut: no known peer had spoken over them, and more than {max_strangers()} such "
                f"connections were open"
            )
        if self._gate is None:
            return
        yield from self._gate.refusals()
        if refused:
            yield (
                f"{_connections(refused)} refused: the peer has no key, an unknown one, or another server's; it needs "
                f"the token that `lsgd keygen` made for it here"
            )

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        """Send to ``peer``; return False if it is not connected or accepts nothing now."""
        try:
            self._socket.send_multipart([peer, *pack(frames)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


class Connector(_Socket):
    """A socket that connects to one listener, and reconnects whenever the connection is lost.

    Args:
        name: unique at the listener. With keys, it begins with their name and a ``#``.
        keys: for a listener that requires them.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, address: str, name: bytes, keys: ConnectorKeys | None = None) -> None:
        super().__init__(zmq.DEALER, address)
        self._socket.setsockopt(zmq.IDENTITY, name)
        # Queue nothing for a listener that is away: it would arrive stale.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._keys = keys
        try:
            self._socket.connect(_never_to_itself(address))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{address!r} is not an address: {error.strerror}; write tcp://host:port or ipc://path"
            ) from None
        self.address = address

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the frames of each waiting message, of a bounded number of messages."""
        if self._monitor is not None:
            self._monitor.look(time.monotonic())
        for _ in range(MAX_BATCH):
            if not self._readable():
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield unpack(parts)

    def trouble(self) -> str:
        """Return why the listener refuses us, as far as the last handshake tells; empty if it does not."""
        if self._monitor is None:
            return ""
        self._monitor.read()
        event = self._monitor.handshake
        return "" if event in (0, zmq.EVENT_HANDSHAKE_SUCCEEDED) else self._why(event)

    def _why(self, event: int) -> str:
        if self._keys is None:
            return (
                "it requires a token (LSGD_TOKEN, or --token FILE; `lsgd keygen` makes it there), or is not an lsgd "
                "server"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"it does not know the key of our token, {self._keys.name}; use the one that `lsgd keygen` made for "
                f"this run's keys"
            )
        return (
            "its key is not the one in our token, or it has none; use the token that `lsgd keygen` made for its keys, "
            "or --insecure if it was started so"
        )

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; return False if the listener is not connected or accepts nothing now."""
        try:
            self._socket.send_multipart(pack(frames), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class Wakeup:
    """Lets any thread, or a signal handler, end a wait for it (:func:`wait_for`)."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._event

    def set(self) -> None:
        """End the wait."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """Wait again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self._event)


def wait_for(timeout_s: float, *sources: "Listener | Connector | HasFileno") -> None:
    """Return when one of these sources has something to receive, or after ``timeout_s``."""
    left_over = any(isinstance(source, Listener) and source.waiting for source in sources)
    polled: list[tuple[Any, int]] = [(getattr(source, "_socket", source), zmq.POLLIN) for source in sources]
    zmq.zmq_poll(polled, 0 if left_over else round(timeout_s * 1000))


def _never_to_itself(address: str) -> str:
    """Return a TCP address of this machine with another source address, and any other as it is.

    A call from a machine to itself, where nobody listens yet, may get the very port that it calls: then TCP connects it
    to itself, and the server cannot listen there for a minute.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or sys.platform != "linux":
        return address
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host.strip("[]"), 0))  # works for addresses of this machine only
    except OSError:
        return address
    source = "[::1]" if ":" in host else "127.0.0.1"
    if host == source:  # IPv6 has one loopback address only
        source = "[::1]" if ":" in host else "127.0.0.2"
    return address if source == host else f"tcp://{source}:0;{host}:{port}"


def _connections(count: int) -> str:
    return f"{count} connection{'s' * (count > 1)}"


def _claim_path(path: Path) -> None:
    """Create the folder of a socket, and remove a socket that nobody listens on; refuse one that is in use."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_NBYTES:
        raise ConfigError(
            f"the socket path {path} is longer than the system allows ({MAX_SOCKET_PATH_NBYTES} bytes); choose a "
            f"shorter one"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unused(path)
    except OSError as error:
        raise ConfigError(
            f"the socket {path} cannot be used: {error.strerror}; give --listen ipc:// another path"
        ) from None


def _remove_unused(path: Path) -> None:
    """Remove a socket that nobody listens on; raise ConfigError for one that is in use, OSError for another user's."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} exists and is not a socket; give --listen ipc:// another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        who = user_of_socket(probe)
    raise ConfigError(f"{who} listens on ipc://{path}; stop it, or give this one another --listen")


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        who = user_of(host.strip("[]"), int(port))
        return f"{address} is taken by {who}; stop that, or choose another port with --listen"
    if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
        return f"{address} is not an address of this machine; `ip -br address` lists them"
    return f"cannot listen on {address!r}: {error.strerror}; write tcp://host:port or ipc://path"
