"""Decides how the connection that carries bytes from one member to another is made."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from lsgd.client.control.closing import on_error
from lsgd.client.groups.reach import Door, family
from lsgd.client.groups.relayed import Meet


@dataclass(frozen=True)
class Dial:
    """The other member can be reached: dial its door.

    Attributes:
        answers: whether this end is the TLS server and answers the hello.
        between_nbytes: most bytes that somebody in between may acknowledge and then lose.
    """

    door: Door
    answers: ClassVar[bool] = False
    between_nbytes: ClassVar[int] = 0

    @property
    def nonce(self) -> bytes:
        """The dialled member's nonce, which proves the hello."""
        return self.door.nonce

    async def open(self) -> socket.socket:
        """Return a connected non-blocking socket on which nothing has been sent; may be called again after a failure.

        It runs in the event loop that makes connections, which cancels it after a time.

        Raises:
            OSError: it failed. The caller tries again, except after ConnectionRefusedError.
        """
        connection = socket.socket(family(self.door.address), socket.SOCK_STREAM)
        with on_error(connection.close):
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (self.door.address, self.door.port))
        return connection


Way = Dial | Meet
"""How this member makes a connection."""


@dataclass(frozen=True)
class Routes:
    """The ways between this member and the others.

    The source of the bytes dials; if it cannot, the target does; if neither can, both dial the relay.

    Args:
        me: rank of this member.
        door_of: returns where the member with a rank can be dialled; may wait for it.
        missed: whether the first of two ranks cannot dial the second.
        meet: returns the way through the relay, for source, target, and the nonce of the target's door.
    """

    me: int
    door_of: Callable[[int], Door]
    missed: Callable[[int, int], bool] = lambda one, other: False
    meet: Callable[[int, int, bytes], Meet] | None = None

    def way(self, source: int, target: int) -> Way | None:
        """Return how this member, one of the two, makes the connection from ``source`` to ``target``.

        None: the other one dials, and this member's door accepts the connection. May wait for the other one's door.

        Raises:
            ExchangeError: the other one did not publish its door in time.
        """
        if not self.missed(source, target):
            return Dial(self.door_of(target)) if source == self.me else None
        if not self.missed(target, source):
            return Dial(self.door_of(source)) if target == self.me else None
        assert self.meet is not None
        return self.meet(source, target, self.door_of(target).nonce)
