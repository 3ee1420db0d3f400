"""A member's connections to the others of its generation; one thread makes each when it is first used."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lsgd.client.groups.connections import Connections
from lsgd.client.groups.handshake import Hello
from lsgd.client.groups.routes import Endpoint, Route, Routes
from lsgd.client.groups.service import Service
from lsgd.client.groups.store import Store
from lsgd.client.groups.stream import TensorStream
from lsgd.client.groups.stream_ends import IncomingStream, OutgoingStream

logger = logging.getLogger("lsgd")

TELL_EVERY_S = 20.0
"""How often the progress of a long transfer is logged, in seconds."""

SHOWN_AFTER_S = 2.0
"""After how long the progress of a transfer is told to the servers."""

Pair = tuple[int, int]
"""The ranks of a stream's source and target."""


@dataclass
class _Way:
    """A stream, and how its connection is made: unknown until this member uses it; without a route, by the other."""

    stream: TensorStream
    used: bool = False
    route: Route | None = None


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

    def __init__(
        self,
        run: str,
        generation: int,
        me: int,
        names: Sequence[str],
        address: str,
        store: Store,
        certificate: bytes,
        timeout_s: float,
        routes: Callable[[int, Callable[[int], Endpoint]], Routes] = Routes,
        when_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self.me = me
        self.transport = "tcp, encrypted" if certificate else "tcp"
        self._names, self._address, self._store = names, address, store
        self._connections = Connections(run, generation, certificate, timeout_s)
        self._routes, self._when_cut = routes(me, self._endpoint_of), when_cut
        self._endpoints: dict[int, Endpoint] = {}  # of the others
        self._ways: dict[Pair, _Way] = {}
        self._lock = threading.Lock()
        self._over = False
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
        for rank in {*range(len(self._names))} - {self.me}:
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
            self._over, streams = True, [way.stream for way in self._ways.values()]
        self._when_cut()
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
            streams = [way.stream for way in self._ways.values()]
        silent_since = time.monotonic() - self._connections.timeout_s
        told = [stream.progress() for stream in streams if stream.moved_at > silent_since]
        moving = [one for one in told if one.left_nbytes and one.seconds > SHOWN_AFTER_S]
        return str(max(moving, key=lambda one: one.left_s)) if moving else ""

    def _endpoint_of(self, rank: int) -> Endpoint:
        if rank not in self._endpoints:
            self._endpoints[rank] = Endpoint.of(self._store.get(f"tcp/{self._names[rank]}"))
        return self._endpoints[rank]

    def _stream(self, source: int, target: int) -> TensorStream:
        pair = (source, target)
        with self._lock:
            way = self._way(pair)
            used, way.used = way.used, True
        if not used:
            way.route = self._routes.route(source, target)
            self._connect(pair)
        return way.stream

    def _open(self) -> Service:
        """Return what serves the connections, created and published at the first call; call it with the lock held."""
        if self._over:
            raise ConnectionAbortedError("the group was closed")
        if self._service is None:
            self._service = Service(self._address, self._welcome)
            self._store.set(f"tcp/{self._names[self.me]}", self._service.endpoint.published())
        return self._service

    def _way(self, pair: Pair) -> _Way:
        """Return a stream with its route; call it with the lock held."""
        service, (source, target) = self._open(), pair
        if pair not in self._ways:
            lost = partial(self._connect, pair)
            self._ways[pair] = _Way(
                OutgoingStream(self._names[target], service.sender, lost)
                if source == self.me
                else IncomingStream(self._names[source], service.receiver, lost)
            )
        return self._ways[pair]

    def _connect(self, pair: Pair) -> None:
        """Start making a stream's connection, if that is up to this member."""
        way = self._ways[pair]
        if (route := way.route) is not None and self._service is not None and not self._over:
            self._service.call(lambda: self._connections.make(way.stream, route, *pair))

    async def _welcome(self, raw: socket.socket, origin: str, endpoint: Endpoint) -> None:
        await self._connections.answer(raw, origin, endpoint.nonce, self._expected)

    def _expected(self, hello: Hello) -> TensorStream:
        """Return the stream that a connection is for; raise a ConnectionError if there is none."""
        pair = (hello.source, hello.target)
        if len(set(pair) - {self.me}) != 1 or max(pair) >= len(self._names):
            raise ConnectionError("its hello is for something else")
        with self._lock:
            return self._way(pair).stream
