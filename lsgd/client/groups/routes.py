"""Decides how the connection that carries bytes from one member to another is made."""

import asyncio
import json
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from lsgd.client.control.closing import on_error
from lsgd.errors import ExchangeError
from lsgd.protocol.credentials import GREETING_NBYTES, MAGIC, MET, Ticket, place_of

BACKLOG = 128
"""How many connections may wait to be accepted."""

NONCE_NBYTES = 16

RELAY_NBYTES = 16 << 20
"""Most bytes that the relay's system has acknowledged but may still buffer; Linux's buffers are 6 and 4 MiB."""

_AGAIN_S = 0.25


@dataclass(frozen=True)
class Endpoint:
    """The address and port where a member answers, and the nonce with which each connection to it begins."""

    address: str
    port: int
    nonce: bytes

    def published(self) -> str:
        """Return this as text."""
        return json.dumps([self.address, self.port, self.nonce.hex()])

    @staticmethod
    def of(published: bytes) -> "Endpoint":
        """Return what a member has published."""
        address, port, nonce = json.loads(published)
        return Endpoint(address, port, bytes.fromhex(nonce))


def family(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextmanager
def listening(address: str) -> Iterator[tuple[socket.socket, Endpoint]]:
    """Listen on an address, at a port that the system chooses, inside the block.

    Raises:
        ExchangeError: it cannot listen there.
    """
    try:
        listener = socket.create_server((address, 0), family=family(address), backlog=BACKLOG)
    except OSError as error:
        raise ExchangeError(f"cannot listen on {address}: {error}") from error
    with listener:
        listener.setblocking(False)
        yield listener, Endpoint(address, listener.getsockname()[1], secrets.token_bytes(NONCE_NBYTES))


@dataclass(frozen=True)
class DirectRoute:
    """The other member can be reached: dial its endpoint.

    Attributes:
        answers: whether this end is the TLS server and answers the hello.
        between_nbytes: most bytes that a relay may acknowledge and then lose.
    """

    endpoint: Endpoint
    answers: ClassVar[bool] = False
    between_nbytes: ClassVar[int] = 0

    @property
    def nonce(self) -> bytes:
        """The dialled member's nonce, which proves the hello."""
        return self.endpoint.nonce

    async def open(self) -> socket.socket:
        """Return a connected non-blocking socket on which nothing has been sent; may be called again after a failure.

        It runs in the event loop that makes connections, which cancels it after a time.

        Raises:
            OSError: it failed. The caller tries again, except after ConnectionRefusedError.
        """
        connection = socket.socket(family(self.endpoint.address), socket.SOCK_STREAM)
        with on_error(connection.close):
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (self.endpoint.address, self.endpoint.port))
        return connection


@dataclass(frozen=True)
class RelayedRoute:
    """Neither of two members can dial the other: both dial the relay at the address ``tcp://host:port``.

    The nonce of the target's endpoint proves the hello.
    """

    relay: str
    ticket: Ticket
    secret: bytes
    nonce: bytes
    between_nbytes: int = RELAY_NBYTES

    @property
    def answers(self) -> bool:
        """Whether this end is the TLS server and answers the hello: the target is, as if it had been dialled."""
        return self.ticket.of_target

    async def open(self) -> socket.socket:
        """Wait for the other side, and return a non-blocking connection to it on which nothing has been sent.

        Raises:
            OSError: there is no relay at the moment, or it refuses the ticket.
        """
        connection, greeting = await _dial(self.relay)
        with on_error(connection.close):
            await asyncio.get_running_loop().sock_sendall(connection, self.ticket.answer(greeting, self.secret))
            if await _read(connection, len(MET)) != MET:
                raise ConnectionError(f"the relay {self.relay} hung up; its log says why")
        return connection


Route = DirectRoute | RelayedRoute
"""How this member makes a connection."""


@dataclass(frozen=True)
class Routes:
    """The routes between this member and the others.

    The source of the bytes dials; if it cannot, the target does; if neither can, both dial the relay.

    Args:
        endpoint_of: function from a rank to its endpoint; may wait for it.
        missed: whether the first of two ranks cannot dial the second.
        relayed: function from source, target, and the nonce of the target's endpoint to the route through the relay.
    """

    me: int
    endpoint_of: Callable[[int], Endpoint]
    missed: Callable[[int, int], bool] = lambda one, other: False
    relayed: Callable[[int, int, bytes], RelayedRoute] | None = None

    def route(self, source: int, target: int) -> Route | None:
        """Return how this member, one of the two, makes the connection from ``source`` to ``target``.

        None: the other one dials, and this member accepts the connection. May wait for the other one's endpoint.

        Raises:
            ExchangeError: the other one did not publish its endpoint in time.
        """
        if not self.missed(source, target):
            return DirectRoute(self.endpoint_of(target)) if source == self.me else None
        if not self.missed(target, source):
            return DirectRoute(self.endpoint_of(source)) if target == self.me else None
        assert self.relayed is not None
        return self.relayed(source, target, self.endpoint_of(target).nonce)


async def until_it_greets(relay: str) -> None:
    """Wait until a relay answers at an address; it may be restarting."""
    while True:
        try:
            connection, _ = await _dial(relay)
        except OSError:
            await asyncio.sleep(_AGAIN_S)
        else:
            connection.close()
            return


async def _dial(relay: str) -> tuple[socket.socket, bytes]:
    """Return a new connection to a relay, and its greeting."""
    if not relay:
        raise ConnectionError("a relay is needed, but the servers know of none (lsgd-server --global --relay-address)")
    loop, (host, port) = asyncio.get_running_loop(), place_of(relay)
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)  # where a relay with a name listens
    connection = socket.socket(family, socket.SOCK_STREAM)
    with on_error(connection.close):
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, place)
        except ConnectionRefusedError:  # it may be restarting, so another type of error: callers try again
            raise ConnectionError(f"nothing listens at the relay's address {relay}") from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = await _read(connection, GREETING_NBYTES)
        if not greeting.startswith(MAGIC):
            raise ConnectionError(f"what listens at {relay} is not a relay of this lsgd release")
    return connection, greeting


async def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Return the next ``nbytes``, or fewer if the other side hangs up."""
    data = b""
    while len(data) < nbytes and (more := await asyncio.get_running_loop().sock_recv(connection, nbytes - len(data))):
        data += more
    return data
