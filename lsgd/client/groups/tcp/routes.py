"""How the connection that carries bytes from one member to another comes to be: the one place that decides it."""

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
        answers: this end is the server of TLS and answers the hello, though it may have dialled too.
        between_nbytes: how many bytes somebody between may have acknowledged who then loses them.
    """

    door: Door
    answers: ClassVar[bool] = False
    between_nbytes: ClassVar[int] = 0

    @property
    def nonce(self) -> bytes:
        """That of the one who is dialled: what the hello is proved with."""
        return self.door.nonce

    async def open(self) -> socket.socket:
        """Return a connected non-blocking socket on which nothing is said yet; may be called again after a failure.

        It is called in the event loop that makes connections, and is cancelled when its time is over.

        Raises:
            OSError: it failed; but for ConnectionRefusedError, it is tried again.
        """
        connection = socket.socket(family(self.door.address), socket.SOCK_STREAM)
        with on_error(connection.close):
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (self.door.address, self.door.port))
        return connection


Way = Dial | Meet
"""How this member brings a connection about."""


@dataclass(frozen=True)
class Routes:
    """The ways between this member and the others.

    The source of the bytes dials; if it cannot, the target does; if neither can, both dial the relay.

    Args:
        me: rank of this member.
        door_of: returns where the member of a rank can be dialled; may wait for it.
        missed: ranks of which the first cannot dial the second.
        meet: returns the way through the relay, for source, target, and the nonce of the target's door.
    """

    me: int
    door_of: Callable[[int], Door]
    missed: Callable[[int, int], bool] = lambda one, other: False
    meet: Callable[[int, int, bytes], Meet] | None = None

    def way(self, source: int, target: int) -> Way | None:
        """Return how this member, one of the two, brings about the connection from ``source`` to ``target``.

        None: the other one dials, and the connection comes in at this member's door. May wait for what the other one
        publishes.

        Raises:
            ExchangeError: it published nothing in time.
        """
        if not self.missed(source, target):
            return Dial(self.door_of(target)) if source == self.me else None
        if not self.missed(target, source):
            return Dial(self.door_of(source)) if target == self.me else None
        assert self.meet is not None
        return self.meet(source, target, self.door_of(target).nonce)
