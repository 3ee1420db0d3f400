"""The channel of a process of an island that is not its head: through the head, to the servers."""

import math

from lsgd.client.control.channel import Channel
from lsgd.client.control.island import ManyProcesses
from lsgd.protocol.messages import Get, Put, StatusQuery, Upward, WorkerHello


class FollowerChannel(Channel):
    """A channel through the head, for the addresses of process groups only; the head says all else for its island.

    The wait for an address ends with its generation or at its own deadline.

    Args:
        address: of the head's local server.
        incarnation: of the head.
        island: that this process belongs to.
    """

    def __init__(self, address: str, incarnation: int, island: ManyProcesses) -> None:
        self._island = island
        super().__init__(address, incarnation, math.inf)

    def _open(self) -> None:
        self._island.take = self._take

    def send(self, message: Upward | WorkerHello | StatusQuery) -> None:
        """Have the head forward a message, if it is about an address."""
        if isinstance(message, Put | Get):
            super().send(message)

    def put(self, frame: bytes) -> None:
        """Have the head send a packed message."""
        self._island.pass_up(frame)

    def start_heartbeat(self, worker: str) -> None:
        """Do nothing: the head's connection tells it that this process runs."""

    def close(self) -> None:
        """Do nothing: the island has the connection."""
