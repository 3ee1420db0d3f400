"""The key-value store through which the members of a generation find each other, in the global server."""

import datetime
import math

from torch._C._distributed_c10d import Store as Store  # for other modules, too
from torch._C._distributed_c10d import TCPStore as TCPStore

from lsgd.client.control.channel import Channel
from lsgd.client.control.joining import Membership
from lsgd.client.control.waiting import Expected
from lsgd.protocol.messages import Generation, Get, Published, Put

_ENDED = object()


def store_of(generation: Generation, membership: Membership) -> "ServerStore":
    """Return the store in which a generation's group meets; in islands, the processes with the same shard."""
    shard, timeout_s = membership.island.shard, membership.plan.run.exchange_timeout_s
    prefix = f"shard{shard}/" if shard else ""
    return ServerStore(membership.channel, *membership.who, generation.number, timeout_s, prefix)


class ServerStore(Store):
    """A key-value store for one generation in the global server; each ``prefix`` has its own keys.

    It needs no port, and a wait ends as soon as the generation does. A key's value never changes, so it is fetched only
    once.
    """

    def __init__(
        self, channel: Channel, worker: str, incarnation: int, generation: int, timeout_s: float, prefix: str = ""
    ) -> None:
        super().__init__()
        self._prefix = prefix
        self._channel = channel
        self._identity = (worker, incarnation, generation)
        self._generation = generation
        self._timeout_s = timeout_s
        self._own: dict[str, bytes] = {}
        self._read: dict[str, bytes] = {}
        self._awaited: set[Expected] = set()
        self._ended = False

    def set(self, key: str, value: str | bytes) -> None:
        """Publish ``value``, without waiting."""
        key, data = self._prefix + key, value.encode() if isinstance(value, str) else bytes(value)
        self._own[key] = data
        self._channel.send(Put(*self._identity, key, data))

    def get(self, key: str) -> bytes:
        """Wait for the value of ``key``, and return it.

        This member's own values are published again meanwhile: a restarted server has lost them.

        Raises:
            ExchangeError: the generation is over, or nobody has published it in time.
        """
        key = self._prefix + key
        if (known := self._own.get(key, self._read.get(key))) is not None:
            return known
        return self._read.setdefault(key, self._ask(key))

    def _ask(self, key: str) -> bytes:
        expected = self._channel.expect(
            lambda m: isinstance(m, Published) and m.generation == self._generation and m.key == key
        )
        self._awaited.add(expected)
        try:
            if self._ended:
                expected.answered = _ENDED
            answer = self._channel.ask(
                Get(*self._identity, key),
                expected,
                what=f"waiting for a member's address ({key})",
                timeout_s=self._timeout_s,
                silence_s=math.inf,
                generation=self._generation,
                before=[Put(*self._identity, own, data) for own, data in tuple(self._own.items())],
            )
        finally:
            self._awaited.discard(expected)
        if answer is _ENDED:
            raise ConnectionAbortedError("its generation was over before a member's address was there")
        return bytes(answer.value)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all ``keys`` are there."""
        for key in keys:
            self.get(key)

    def end(self) -> None:
        """Make every wait for a value fail within a quarter of a second; safe from any thread."""
        self._ended = True
        for expected in tuple(self._awaited):
            expected.answered = _ENDED
