"""Connections through the relay, for two members that cannot reach each other."""

import asyncio
import socket
from dataclasses import dataclass

from lsgd.client.control.closing import on_error
from lsgd.protocol.credentials import GREETING_NBYTES, MAGIC, MET, Ticket, place_of

RELAY_NBYTES = 16 << 20
"""Most bytes that the relay's system has acknowledged but may still buffer; Linux's buffers are 6 and 4 MiB."""

_AGAIN_S = 0.25


@dataclass(frozen=True)
class Meet:
    """The way of two members that both dial the relay.

    Args:
        relay: its address, ``tcp://host:port``.
        ticket: of this side.
        secret: of the run.
        nonce: of the target's door; proves the hello.
        between_nbytes: most bytes that the relay may hold, and lose.
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
    family, _, _, _, place = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
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
