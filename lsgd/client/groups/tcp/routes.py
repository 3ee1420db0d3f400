"""How the connection that carries bytes from one member to another comes to be: the one place that decides it."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lsgd.client.groups.reach import Door


class Way(Protocol):
    """How this member brings a connection about.

    Attributes:
        answers: this end is the server of TLS and answers the hello, though it may have dialled too.
        nonce: of the member at the end that answers: what the hello is proved with.
        between_nbytes: how many bytes somebody between may have acknowledged who then loses them.
    """

    @property
    def answers(self) -> bool:
        """See the class."""
        ...

    @property
    def nonce(self) -> bytes:
        """See the class."""
        ...

    @property
    def between_nbytes(self) -> int:
        """See the class."""
        ...

    async def open(self) -> socket.socket:
        """Return a connected non-blocking socket on which nothing is said yet; may be called again after a failure.

        It is called in the event loop that makes connections, and is cancelled when its time is over.

        Raises:
            OSError: it failed; but for ConnectionRefusedError, it is tried again.
        """
        ...


@dataclass(frozen=True)
class Dial:
    """The other member can be reached: dial its door."""

    door: Door
    answers: bool = False
    between_nbytes: int = 0

    @property
    def nonce(self) -> bytes:
        """That of the one who is dialled."""
        return self.door.nonce

    async def open(self) -> socket.socket:
        """Return the connected socket."""
        family = socket.AF_INET6 if ":" in self.door.address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (self.door.address, self.door.port))
        except BaseException:
            connection.close()
            raise
        return connection


class Routes:
    """The ways between this member and the others.

    The source of the bytes dials; if it cannot, the target does; if neither can, both dial the relay.

    Args:
        me: rank of this member.
        door_of: returns where the member of a rank can be dialled; may wait for it.
        missed: ranks of which the first cannot dial the second.
        meet: returns the way through the relay, for source, target, and the nonce of the target's door.
    """

    def __init__(
        self,
        me: int,
        door_of: Callable[[int], Door],
        missed: Callable[[int, int], bool] = lambda one, other: False,
        meet: Callable[[int, int, bytes], Way] | None = None,
    ) -> None:
        self._me = me
        self._door_of = door_of
        self._missed = missed
        self._meet = meet

    def way(self, source: int, target: int) -> Way | None:
        """Return how this member, one of the two, brings about the connection from ``source`` to ``target``.

        None: the other one dials, and the connection comes in at this member's door. May wait for what the other one
        publishes.

        Raises:
            ExchangeError: it published nothing in time.
        """
        if not self._missed(source, target):
            return Dial(self._door_of(target)) if source == self._me else None
        if not self._missed(target, source):
            return Dial(self._door_of(source)) if target == self._me else None
        assert self._meet is not None
        return self._meet(source, target, self._door_of(target).nonce)
