"""Every ZeroMQ socket of lsgd: a listener for many peers, a link to one, and the poll over them.

All calls return at once except :meth:`Poller.wait`. Frames are whole messages (:mod:`lsgd.messages`); several travel
together, packed into one (:func:`pack`). A socket belongs to the thread that uses it; :class:`Wakeup` is for the
others.

With keys a connection is encrypted and authenticated at both ends (CurveZMQ, https://rfc.zeromq.org/spec/26/), and
the listener knows each peer by the name that its key has. :mod:`lsgd.keys` decides where keys are needed.
"""

import contextlib
import errno
import os
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgpack
import zmq
from zmq.utils import z85

from lsgd.errors import ConfigError
from lsgd.messages import MAX_ITEMS, MAX_NBYTES

DEFAULT_PORT = 47400
"""TCP port of the global server."""

MAX_BATCH = 256
"""Most messages taken from one socket before the others have their turn."""

PACKED = b"\xc1"
"""First byte of several frames packed into one; no MessagePack begins with it, and so no frame of lsgd.messages."""

KEY_NBYTES = 32
"""Length of a key of Curve25519."""

_PACKING_NBYTES = 6  # at most, before each frame of a part, and before the first
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)  # as enumerations they cost a microsecond
_LINGER_MS = 1000
_HEARTBEAT_MS = 2000
_DEAD_MS = 10_000
_HANDSHAKE_MS = 5000  # a peer that connects and says nothing holds a descriptor for so long
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True)
class LinkKeys:
    """What a link needs: the listener's public key, and a pair of its own, as bytes.

    Args:
        name: that the listener knows the public key by.
    """

    name: str
    server: bytes
    public: bytes
    secret: bytes


class ListenerKeys(Protocol):
    """What a listener needs: its secret key, and who may connect."""

    @property
    def secret(self) -> bytes:
        """Its secret key."""

    def allowed(self, public: bytes) -> str:
        """Return the name of a key that may connect now, or an empty text. Called in a thread of the listener's."""


def pack(frames: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a ZeroMQ message that carries ``frames``: a frame alone as it is, several in one part.

    ZeroMQ takes 2 microseconds for a part, which is longer than all else that a local server does with a frame. No
    part is longer than :data:`lsgd.messages.MAX_NBYTES`, as long as no frame is. Like the form of
    :class:`lsgd.messages.Refused`, this never changes: it is how another version is told that it is one.
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
    """Return the frames that :func:`pack` packed; what is packed wrongly is a frame, which no message is made of."""
    frames: list[bytes] = []
    for part in parts:
        frames += _unpacked(part) if part.startswith(PACKED) else (part,)
    return frames


def _unpacked(part: bytes) -> Sequence[bytes]:
    try:
        frames = msgpack.unpackb(
            part[len(PACKED) :],
            use_list=False,
            max_array_len=MAX_ITEMS,
            max_map_len=0,
            max_str_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return (part,)
    if type(frames) is not tuple:
        return (part,)
    if any(type(frame) is not bytes or frame.startswith(PACKED) for frame in frames):
        return (part,)
    return frames


def new_key_pair() -> tuple[bytes, bytes]:
    """Return a new public and secret key."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public), z85.decode(secret)


def public_key(secret: bytes) -> bytes:
    """Return the public key of a secret one."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def default_local_address() -> str:
    """Return the address of this machine's local server where none is given: a socket of this user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/lsgd-{os.getuid()}"
    return f"ipc://{base}/lsgd-local.sock"


class _Socket:
    def __init__(self, kind: int, address: str) -> None:
        self._context = zmq.Context(1)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_NBYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._monitor: zmq.Socket[bytes] | None = None
        if address.startswith("tcp://"):
            self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def close(self) -> None:
        """Send what is still under way, for a second at most, and close."""
        if self._socket.closed:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, *, copy: bool = True) -> Iterator[Any]:
        """Yield the parts of each message that waits, as bytes, or as ``zmq.Frame`` if they are not copied."""
        for _ in range(MAX_BATCH):
            if not int(self._socket.get(_EVENTS)) & _READABLE:  # a quarter of the time that an Again takes
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=copy)
            except zmq.Again:
                return
            yield parts

    def _handshakes(self) -> Iterator[int]:
        """Yield the events of handshakes since the last call."""
        while self._monitor is not None and self._monitor.poll(0):
            event, _ = self._monitor.recv_multipart()
            yield struct.unpack_from("=H", event)[0]


class Listener(_Socket):
    """A socket that many peers connect to.

    Args:
        address: ``tcp://host:port`` (port 0: a free one) or ``ipc://path``, whose folder is made if need be, for
            this user alone.
        keys: who may connect; None: whoever can reach the address.

    Raises:
        ConfigError: the address is wrong, taken, or not of this machine.
    """

    def __init__(self, address: str, keys: ListenerKeys | None = None) -> None:
        self._open(address, keys)

    def _open(self, address: str, keys: ListenerKeys | None) -> None:
        super().__init__(zmq.ROUTER, address)
        self._keys = keys
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(
            zmq.ROUTER_HANDOVER, 1
        )  # names hold a random number: only the peer itself comes again
        self._gate = _Gate(self._context, self._socket, keys) if keys else None
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
        """Drop all connections, with what has come by halves, and listen again; peers connect again by themselves.

        Nothing else frees what a multipart message without an end has piled up. Pollers have to be made anew.
        """
        self._socket.setsockopt(zmq.LINGER, 0)
        self.close()
        self._open(self.address, self._keys)

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield (peer, frames) of the messages that wait, a bounded number of them."""
        gate = self._gate
        messages = self._receive() if gate is None else map(gate.pass_on, self._receive(copy=False))
        for peer, *parts in messages:
            yield peer, unpack(parts)

    def refusals(self) -> Iterator[str]:
        """Yield a line for each connection since the last call that was refused, or whose peer lied."""
        failed = sum(event & _HANDSHAKE_FAILED != 0 for event in self._handshakes())
        if self._gate is None:
            return
        yield from self._gate.refusals()
        if failed:
            yield (
                f"{failed} connection{'s' * (failed > 1)} refused: the peer has no key, an unknown one, or that of "
                f"another server; it needs the token that `lsgd keygen` made for it here"
            )

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        """Send to ``peer``; return False if it is not connected or takes nothing now."""
        try:
            self._socket.send_multipart([peer, *pack(frames)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


class _Gate:
    """Lets only known keys connect to a listener, each under the name of its key."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", listener: "zmq.Socket[bytes]", keys: ListenerKeys
    ):
        from zmq.auth.thread import ThreadAuthenticator  # asyncio: for listeners with keys only

        self._keys = keys
        self._names: dict[str, bytes] = {}
        self._refusals: deque[str] = deque(maxlen=MAX_BATCH)
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

    def pass_on(self, message: "list[zmq.Frame]") -> list[bytes]:
        """Return the frames of a message, without any but the first if its peer has another's name."""
        frames = [frame.bytes for frame in message]
        name = self._names.get(str(message[-1].get("User-Id")), b"")
        if name and frames[0].partition(b"#")[0] == name:
            return frames
        self._refusals.append(f"dropped a message of {name.decode()}, which calls itself {frames[0]!r}")
        return frames[:1]

    def refusals(self) -> Iterator[str]:
        """Yield a line for each lie since the last call."""
        while self._refusals:
            yield self._refusals.popleft()

    def close(self) -> None:
        """End the thread."""
        self._authenticator.stop()


class Link(_Socket):
    """A socket that connects to one listener, and again whenever the connection is lost.

    Args:
        address: as the listener's.
        name: what the listener knows this peer by; unique, and with keys, their name and a ``#`` first.
        keys: for a listener that wants them.

    Raises:
        ConfigError: the address is not one.
    """

    def __init__(self, address: str, name: bytes, keys: LinkKeys | None = None) -> None:
        super().__init__(zmq.DEALER, address)
        self._trouble = ""
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(
            zmq.IMMEDIATE, 1
        )  # nothing is queued for a listener that is away, to arrive stale
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._keys = keys
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{address!r} is no address: {error.strerror}; write tcp://host:port or ipc://path"
            ) from None
        self.address = address

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the frames of each message that waits, a bounded number of them."""
        yield from map(unpack, self._receive())

    def trouble(self) -> str:
        """Return why the listener does not take us in, as far as the last handshake tells; empty if it does."""
        for event in self._handshakes():
            self._trouble = "" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._why(event)
        return self._trouble

    def _why(self, event: int) -> str:
        if self._keys is None:
            return "it wants a token (LSGD_TOKEN, or --token FILE; `lsgd keygen` makes it there), or is no lsgd server"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"it does not know the key of our token, {self._keys.name}; take the one that `lsgd keygen` made "
                f"for this run's keys"
            )
        return "it has another key than our token says, or none; take the token that `lsgd keygen` made for its keys"

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; return False if the listener is not connected or takes nothing now."""
        try:
            self._socket.send_multipart(pack(frames), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class Wakeup:
    """Lets any thread, or a signal handler, end the wait of a :class:`Poller`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._read

    def set(self) -> None:
        """End the wait."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Wait again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        """Free the descriptors."""
        os.close(self._read)
        os.close(self._write)


class Poller:
    """Waits until one of some sockets has something to receive."""

    def __init__(self, *sources: Listener | Link | Wakeup) -> None:
        self._poller = zmq.Poller()
        for source in sources:
            self._poller.register(
                source.fileno() if isinstance(source, Wakeup) else source._socket, zmq.POLLIN
            )

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to receive, or after ``timeout_s``."""
        self._poller.poll(round(timeout_s * 1000))


def _claim_path(path: Path) -> None:
    """Make the folder of a socket, and remove a socket that nobody listens on; refuse one that is in use."""
    if len(str(path)) > 100:
        raise ConfigError(
            f"the socket path {path} is longer than the system allows (100 bytes); choose a shorter one"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder of the socket {path} cannot be made: {error.strerror}") from None
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} is there and is no socket; give --listen ipc:// another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"another server listens on ipc://{path}; end it, or give this one another --listen")


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        port = address.rpartition(":")[2]
        return (
            f"{address} is taken by another program (`ss -ltnp 'sport = :{port}'` names it); end it, or choose "
            f"another port with --listen"
        )
    if error.errno in (zmq.EADDRNOTAVAIL, errno.ENODEV):
        return f"{address} is not an address of this machine; `ip -br address` lists them"
    return f"cannot listen on {address!r}: {error.strerror}; write tcp://host:port or ipc://path"
