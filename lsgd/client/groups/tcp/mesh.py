"""A member's connections to the others of its generation, made by one thread when first used."""

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
from lsgd.client.groups.reach import Door
from lsgd.client.groups.store import Store
from lsgd.client.groups.tcp.hello import ANSWER_NBYTES, HELLO_NBYTES, Hello
from lsgd.client.groups.tcp.incoming import Incoming
from lsgd.client.groups.tcp.line import CLOSED, Line
from lsgd.client.groups.tcp.outgoing import Outgoing
from lsgd.client.groups.tcp.routes import Routes, Way
from lsgd.client.groups.tcp.service import Service, exactly, retried
from lsgd.client.groups.tcp.tls import Contexts

logger = logging.getLogger("lsgd")

HELLO_WITHIN_S = 10.0
"""How long a connection's handshake and hello may take, in seconds."""

KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""After how many seconds an idle connection is probed, how often, and after how many failures it is given up."""

MAX_REFUSALS = 5
"""How many refused connections are logged."""

Pair = tuple[int, int]
"""The ranks of a line's source and target."""

_RETRY_S = (0.05, 1.0)  # the first pause, and the longest


@dataclass(eq=False)
class Mesh:
    """This member's lines to and from the others.

    Args:
        run: identity of the run.
        generation: its number.
        me: rank of this member in the generation.
        names: of all members, by rank.
        address: of this machine, to which the others connect.
        store: where the members publish their doors.
        tls: None: the connections are not encrypted.
        timeout_s: how long to try to make a connection.
        routes: decides how connections are made; takes this member's rank and a function that returns a member's door.
        when_cut: called when the mesh is cut; ends the waits for what members publish.

    Attributes:
        transport: what carries tensors, in words.
    """

    run: str
    generation: int
    me: int
    names: Sequence[str]
    address: str
    store: Store
    tls: Contexts | None
    timeout_s: float
    routes: Callable[[int, Callable[[int], Door]], Routes] = Routes
    when_cut: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.transport = "tcp, encrypted" if self.tls else "tcp"
        self._routes = self.routes(self.me, self._door_of)
        self._doors: dict[int, Door] = {}  # of the others
        self._lines: dict[Pair, Line] = {}
        self._ways: dict[Pair, Way | None] = {}  # how their connections are made; None: by the other member
        self._lock = threading.Lock()
        self._over = False
        self._refusals = 0
        self._service: Service | None = None

    def gather(self) -> None:
        """Publish this member's door, and read those of all others, so that the store is no longer needed.

        Raises:
            ExchangeError: a member did not publish its door in time.
            OSError: the mesh was cut, or this member cannot listen.
        """
        with self._lock:
            self._open()
        for rank in {*range(len(self.names))} - {self.me}:
            self._door_of(rank)

    def to(self, rank: int) -> Line:
        """Return the line to the member with this rank."""
        return self._line(self.me, rank)

    def from_(self, rank: int) -> Line:
        """Return the line from the member with this rank."""
        return self._line(rank, self.me)

    def cut(self) -> None:
        """Close all connections at once; what waits for them fails. Safe from any thread."""
        with self._lock:
            self._over, lines = True, list(self._lines.values())
        self.when_cut()
        for line in lines:
            line.close()
        if self._service is not None:
            self._service.end()

    def close(self) -> None:
        """Close all connections, and end the threads."""
        self.cut()
        if self._service is not None:
            self._service.join()

    def _door_of(self, rank: int) -> Door:
        if rank not in self._doors:
            self._doors[rank] = Door.of(self.store.get(f"tcp/{rank}"))
        return self._doors[rank]

    def _line(self, source: int, target: int) -> Line:
        pair = (source, target)
        with self._lock:
            line = self._known(pair)
            asked = pair in self._ways
            self._ways.setdefault(pair)
        if not asked:
            self._ways[pair] = self._routes.way(source, target)
            self._connect(pair)
        return line

    def _open(self) -> Service:
        """Return what serves the connections, created and published at the first call; call it with the lock held."""
        if self._over:
            raise ConnectionAbortedError("the group was closed")
        if self._service is None:
            self._service = Service(self.address, self._welcome)
            self.store.set(f"tcp/{self.me}", self._service.door.published())
        return self._service

    def _known(self, pair: Pair) -> Line:
        """Return a line; call it with the lock held."""
        service, (source, target) = self._open(), pair
        if pair not in self._lines:
            lost = partial(self._connect, pair)
            self._lines[pair] = (
                Outgoing(self.names[target], service.sender, lost)
                if source == self.me
                else Incoming(self.names[source], service.receiver, lost)
            )
        return self._lines[pair]

    def _connect(self, pair: Pair) -> None:
        """Start making a line's connection, if that is up to this member."""
        if (way := self._ways.get(pair)) is not None and self._service is not None and not self._over:
            hello = Hello(self.run, self.generation, *pair)
            self._service.call(lambda: self._keep_trying(self._lines[pair], way, hello))

    # -- in the thread that makes connections ------------------------------------------------------------------

    async def _keep_trying(self, line: Line, way: Way, hello: Hello) -> None:
        """Make a line's connection; try again until it succeeds or is hopeless."""
        deadline = time.monotonic() + self.timeout_s
        pause_s, longest_s = _RETRY_S
        while True:
            try:
                async with asyncio.timeout(HELLO_WITHIN_S):
                    await self._make(line, way, hello)
                return
            except (OSError, TimeoutError) as error:
                line.trouble = error.strerror or str(error) or f"no answer within {HELLO_WITHIN_S:g} s"
                if _is_final(error) or time.monotonic() > deadline:
                    line.fail(ConnectionError(f"no connection with {line.peer}: {line.trouble}"))
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _make(self, line: Line, way: Way, hello: Hello) -> None:
        connection = await self._secured(await way.open(), answers=way.answers)
        with on_error(connection.close):
            if way.answers:
                heard, received = Hello.read(await exactly(connection, HELLO_NBYTES), self.run, way.nonce)
                if heard != hello:
                    raise ConnectionError("its hello is for something else")
                connection.send(hello.answer(way.nonce, line.renew()))
            else:
                connection.send(hello.packed(way.nonce, line.renew()))
                received = hello.answered(await exactly(connection, ANSWER_NBYTES), way.nonce)
        line.between_nbytes = way.between_nbytes
        line.connect(connection, received)

    async def _welcome(self, raw: socket.socket, origin: str, door: Door) -> None:
        """Accept a connection at this member's door."""
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                connection = await self._secured(raw, answers=True)
                with on_error(connection.close):
                    hello, received = Hello.read(await exactly(connection, HELLO_NBYTES), self.run, door.nonce)
                    line = self._expected(hello)
                    connection.send(hello.answer(door.nonce, line.renew()))
            line.connect(connection, received)
        except (OSError, TimeoutError) as error:
            if self._refusals < MAX_REFUSALS and not self._over:
                self._refusals += 1
                why = str(error) or f"it did not say who it is within {HELLO_WITHIN_S:g} s"
                logger.warning("refused a connection from %s to the port for tensors: %s", origin, why)

    def _expected(self, hello: Hello) -> Line:
        """Return the line that a connection is for.

        Raises:
            ConnectionError: there is none.
        """
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
            if self.tls is None:
                return raw
            context = self.tls.server if answers else self.tls.client
            connection = context.wrap_socket(raw, server_side=answers, do_handshake_on_connect=False)
        with on_error(connection.close):
            await retried(connection, connection.do_handshake)
        return connection


def _is_final(error: Exception) -> bool:
    """Whether trying again makes no sense: nobody is there any more, or it is not a member."""
    return isinstance(error, ConnectionRefusedError | ssl.SSLError) and not isinstance(error, CLOSED)
