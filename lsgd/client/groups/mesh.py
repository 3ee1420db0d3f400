"""A member's connections to the others of its generation; one thread makes each when it is first used."""

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lsgd.client.control.closing import on_error
from lsgd.client.groups.handshake import ANSWER_NBYTES, HELLO_NBYTES, Hello, context_of
from lsgd.client.groups.routes import Endpoint, Route, Routes
from lsgd.client.groups.service import Service, exactly, retried
from lsgd.client.groups.store import Store
from lsgd.client.groups.stream import TensorStream
from lsgd.client.groups.stream_ends import IncomingStream, OutgoingStream

logger = logging.getLogger("lsgd")

HELLO_WITHIN_S = 10.0
"""How long a connection's handshake and hello may take, in seconds."""

KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""After how many seconds an idle connection is probed, how often, and after how many failures it is given up."""

TELL_EVERY_S = 20.0
"""How often the progress of a long transfer is logged, in seconds."""

SHOWN_AFTER_S = 2.0
"""After how long the progress of a transfer is told to the servers."""

_OTHER_CERTIFICATE = ("TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE", "TLSV1_ALERT_DECRYPT_ERROR")
"""What the other end says to a certificate that is not the run's."""

MAX_REFUSALS = 5
"""How many refused connections are logged."""

Pair = tuple[int, int]
"""The ranks of a stream's source and target."""

_RETRY_S = (0.05, 1.0)  # the first pause, and the longest


@dataclass(eq=False)
class Mesh:
    """This member's streams to and from the others.

    Args:
        me: this member's rank in the generation.
        names: all members', by rank.
        address: this machine's, to which the others connect.
        store: where the members publish their endpoints.
        certificate: key and certificate of TLS (PEM); empty: the connections are not encrypted.
        timeout_s: how long to try to make a connection for which an operation waits.
        routes: returns the routes for a rank and a function that returns the endpoint of a rank.
        when_cut: ends the waits for what members publish.
    """

    run: str
    generation: int
    me: int
    names: Sequence[str]
    address: str
    store: Store
    certificate: bytes
    timeout_s: float
    routes: Callable[[int, Callable[[int], Endpoint]], Routes] = Routes
    when_cut: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.transport = "tcp, encrypted" if self.certificate else "tcp"
        self._routes = self.routes(self.me, self._endpoint_of)
        self._endpoints: dict[int, Endpoint] = {}  # of the others
        self._streams: dict[Pair, TensorStream] = {}
        self._chosen: dict[Pair, Route | None] = {}  # how their connections are made; None: by the other member
        self._lock = threading.Lock()
        self._over = False
        self._refusals = 0
        self._told_at = 0.0
        self._service: Service | None = None

    def gather(self) -> None:
        """Publish this member's endpoint, and read those of all others, so that the store is no longer needed.

        Raises:
            ExchangeError: a member did not publish its endpoint in time.
            OSError: the mesh was cut, or this member cannot listen.
        """
        with self._lock:
            self._open()
        for rank in {*range(len(self.names))} - {self.me}:
            self._endpoint_of(rank)

    def to(self, rank: int) -> TensorStream:
        """Return the stream to the member with this rank."""
        return self._stream(self.me, rank)

    def from_(self, rank: int) -> TensorStream:
        """Return the stream from the member with this rank."""
        return self._stream(rank, self.me)

    def cut(self) -> None:
        """Close all connections at once; what waits for them fails. Safe from any thread."""
        with self._lock:
            self._over, streams = True, list(self._streams.values())
        self.when_cut()
        for stream in streams:
            stream.close()
        if self._service is not None:
            self._service.end()

    def close(self) -> None:
        """Close all connections, and end the threads."""
        self.cut()
        if self._service is not None:
            self._service.join()

    def tell(self, what: str, streams: Sequence[TensorStream]) -> None:
        """Log the progress of the slowest of some streams now and then, if it takes long."""
        slowest, now = max((stream.progress() for stream in streams), key=lambda one: one.left_s), time.monotonic()
        if min(slowest.seconds, now - self._told_at) > TELL_EVERY_S:
            self._told_at = now
            logger.info("%s: %s", what, slowest)

    def progress(self) -> str:
        """Return the progress of the slowest stream that has been moving for a while; an empty text: there is none.

        The servers take a text that changes for movement, so a stream that has been silent for too long has none.
        """
        with self._lock:
            streams = list(self._streams.values())
        silent_since = time.monotonic() - self.timeout_s
        told = [stream.progress() for stream in streams if stream.moved_at > silent_since]
        moving = [one for one in told if one.left_nbytes and one.seconds > SHOWN_AFTER_S]
        return str(max(moving, key=lambda one: one.left_s)) if moving else ""

    def _endpoint_of(self, rank: int) -> Endpoint:
        if rank not in self._endpoints:
            self._endpoints[rank] = Endpoint.of(self.store.get(f"tcp/{rank}"))
        return self._endpoints[rank]

    def _stream(self, source: int, target: int) -> TensorStream:
        pair = (source, target)
        with self._lock:
            stream = self._known(pair)
            asked = pair in self._chosen
            self._chosen.setdefault(pair)
        if not asked:
            self._chosen[pair] = self._routes.route(source, target)
            self._connect(pair)
        return stream

    def _open(self) -> Service:
        """Return what serves the connections, created and published at the first call; call it with the lock held."""
        if self._over:
            raise ConnectionAbortedError("the group was closed")
        if self._service is None:
            self._service = Service(self.address, self._welcome)
            self.store.set(f"tcp/{self.me}", self._service.endpoint.published())
        return self._service

    def _known(self, pair: Pair) -> TensorStream:
        """Return a stream; call it with the lock held."""
        service, (source, target) = self._open(), pair
        if pair not in self._streams:
            lost = partial(self._connect, pair)
            self._streams[pair] = (
                OutgoingStream(self.names[target], service.sender, lost)
                if source == self.me
                else IncomingStream(self.names[source], service.receiver, lost)
            )
        return self._streams[pair]

    def _connect(self, pair: Pair) -> None:
        """Start making a stream's connection, if that is up to this member."""
        if (route := self._chosen.get(pair)) is not None and self._service is not None and not self._over:
            hello = Hello(self.run, self.generation, *pair)
            self._service.call(lambda: self._keep_trying(self._streams[pair], route, hello))

    # -- in the thread that makes connections ------------------------------------------------------------------

    async def _keep_trying(self, stream: TensorStream, route: Route, hello: Hello) -> None:
        """Make a stream's connection; try again until it succeeds, is hopeless, or is waited for too long."""
        began = time.monotonic()
        pause_s, longest_s = _RETRY_S
        while True:
            try:
                async with asyncio.timeout(HELLO_WITHIN_S):
                    await self._make(stream, route, hello)
                return
            except (OSError, TimeoutError) as error:
                stream.trouble = error.strerror or str(error) or f"no answer within {HELLO_WITHIN_S:g} s"
                late = time.monotonic() - max(began, stream.waited_since()) > self.timeout_s
                if _is_final(error) or late:
                    stream.fail(ConnectionError(f"no connection with {stream.peer}: {stream.trouble}"))
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _make(self, stream: TensorStream, route: Route, hello: Hello) -> None:
        connection = await self._secured(await route.open(), answers=route.answers)
        with on_error(connection.close):
            if route.answers:
                heard, received = Hello.read(await exactly(connection, HELLO_NBYTES), self.run, route.nonce)
                if heard != hello:
                    raise ConnectionError("its hello is for something else")
                connection.send(hello.answer(route.nonce, stream.renew()))
            else:
                connection.send(hello.packed(route.nonce, stream.renew()))
                received = hello.answered(await exactly(connection, ANSWER_NBYTES), route.nonce)
        stream.between_nbytes = route.between_nbytes
        stream.connect(connection, received)

    async def _welcome(self, raw: socket.socket, origin: str, endpoint: Endpoint) -> None:
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                connection = await self._secured(raw, answers=True)
                with on_error(connection.close):
                    hello, received = Hello.read(await exactly(connection, HELLO_NBYTES), self.run, endpoint.nonce)
                    stream = self._expected(hello)
                    connection.send(hello.answer(endpoint.nonce, stream.renew()))
            stream.connect(connection, received)
        except (OSError, TimeoutError) as error:
            if self._refusals < MAX_REFUSALS and not self._over:
                self._refusals += 1
                why = str(error) or f"it did not say who it is within {HELLO_WITHIN_S:g} s"
                logger.warning("refused a connection from %s to the port for tensors: %s", origin, why)

    def _expected(self, hello: Hello) -> TensorStream:
        """Return the stream that a connection is for; raise a ConnectionError if there is none."""
        pair = (hello.source, hello.target)
        others = set(pair) - {self.me}
        if hello.generation != self.generation or len(others) != 1 or max(pair) >= len(self.names):
            raise ConnectionError("its hello is for something else")
        with self._lock:
            return self._known(pair)

    async def _secured(self, raw: socket.socket, *, answers: bool) -> socket.socket:
        """Return the connection, in TLS if there is a certificate, after its handshake."""
        with on_error(raw.close):
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)
            if not self.certificate:
                return raw
            context = context_of(self.certificate, answers=answers)
            connection = context.wrap_socket(raw, server_side=answers, do_handshake_on_connect=False)
        with on_error(connection.close):
            await retried(connection, connection.do_handshake)
        return connection


def _is_final(error: Exception) -> bool:
    """Whether trying again makes no sense: nobody is there any more, or its certificate is not the run's.

    Other errors of a handshake come from bytes that were changed on the way.
    """
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLCertVerificationError) or (error.reason or "") in _OTHER_CERTIFICATE
    return isinstance(error, ConnectionRefusedError)
