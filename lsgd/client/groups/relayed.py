"""Connections through the relay, for two members that cannot reach each other."""

import socket
import time
from collections.abc import Callable

from lsgd.protocol.tickets import GREETING_NBYTES, MAGIC, MET, Ticket, place_of

AGAIN_S = 0.25
"""How long to wait between two attempts to reach the relay, which may be being started again."""


def meet(
    relay: str,
    ticket: Ticket,
    secret: bytes,
    deadline: float,
    keep: Callable[[socket.socket], None] = lambda connection: None,
) -> socket.socket:
    """Return a connection to the other side of a ticket's pair, through the relay.

    Args:
        relay: its address, ``tcp://host:port``.
        ticket: of this side.
        secret: of the run.
        deadline: until when, in seconds of the monotonic clock.
        keep: called with the connection as soon as there is one, so that another thread may end the wait by shutting
            it down.

    Raises:
        OSError: there is no relay, it refuses the ticket, or the other side does not come in time.
    """
    connection = _dial(relay, deadline)
    try:
        keep(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = _read(connection, GREETING_NBYTES, deadline)
        if not greeting.startswith(MAGIC):
            raise ConnectionError(f"what listens at {relay} is no relay of this release of lsgd")
        connection.sendall(ticket.answer(greeting, secret))
        try:
            _read(connection, len(MET), deadline)
        except TimeoutError:
            raise TimeoutError(f"the other side did not come to the relay {relay} in time") from None
        except EOFError:
            raise ConnectionError(f"the relay {relay} hung up: its log says why") from None
        connection.settimeout(None)
    except BaseException as error:
        connection.close()
        if isinstance(error, EOFError):
            raise ConnectionError(f"the relay {relay} hung up before it said what it is") from None
        raise
    return connection


def greets(relay: str, deadline: float) -> str:
    """Return why no relay answers at an address; empty if one does."""
    try:
        with _dial(relay, deadline) as connection:
            greeting = _read(connection, GREETING_NBYTES, deadline)
    except (OSError, EOFError) as error:
        return str(error) or "it hung up"
    return "" if greeting.startswith(MAGIC) else "another program listens there"


def _dial(relay: str, deadline: float) -> socket.socket:
    """Return a new connection to the relay, which may be being started again."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            return socket.create_connection(place_of(relay), timeout=max(left_s, AGAIN_S))
        except TimeoutError:
            raise TimeoutError(f"the relay {relay} did not answer in time") from None
        except OSError as error:
            if deadline - time.monotonic() < AGAIN_S:
                raise ConnectionError(f"the relay {relay} cannot be reached: {error.strerror}") from None
        time.sleep(AGAIN_S)


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (more := connection.recv(nbytes - len(data))):
            raise EOFError
        data += more
    return data
