"""What a host of a run in virtual time has instead of sockets: connections, knocks, and where its servers listen."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from lsgd.node.candidates import KNOCK_WITHIN_S
from lsgd.protocol.messages import Endpoint
from lsgd.server.global_daemon import GlobalDaemon

if TYPE_CHECKING:
    from .failover_host import Host

SYN_AGAIN_S = 1.0
"""After how long a host that tries to connect tries again."""


class MemoryLink:
    """A connection from a host to the global server at a place, once it is made."""

    def __init__(self, host: Host, place: Endpoint, name: str) -> None:
        self.host, self.address, self.name = host, place.address, name
        self.arrived: deque[list[bytes]] = deque()
        self.open = True
        self.target = host.world.hosts[place.node]
        self.server: GlobalDaemon | None = None  # at the other end
        self._made_at = math.inf
        self.last_s = {True: 0.0, False: 0.0}  # when the last message arrives, by direction
        self.tries = {True: 0, False: 0}  # how often what waits was sent in vain
        self.again_s = {True: 0.0, False: 0.0}  # when it is sent again
        self.waiting: dict[bool, deque[tuple[float, Callable[[], None]]]] = {True: deque(), False: deque()}

    def send(self, frames: Sequence[bytes]) -> bool:
        world, target, kept = self.host.world, self.target, list(frames)
        sees = target.alive and not target.frozen and world.reaches(self.host, target)
        if sees and self.server is not target.server:
            self.server = None
        if self.server is None and not (sees and self._is_made(target.server)):
            return False
        world.carry(self, True, lambda: self._arrives(kept))
        return True

    def _is_made(self, server: GlobalDaemon | None) -> bool:
        """Whether the connection is there; begin to make it if not."""
        world = self.host.world
        if server is None:
            self._made_at = math.inf
        elif self._made_at == math.inf:
            self._made_at = world.now + world.connects_s + 3 * world.random.uniform(0.001, world.delay_s)
        elif world.now >= self._made_at:
            self.server, self._made_at = server, math.inf
        return self.server is not None

    def _arrives(self, frames: list[bytes]) -> None:
        if self.target.server is not None and self.target.server is self.server:
            self.target.links[self.name] = self
            self.target.inbox.append((self.name.encode(), frames))

    def answer(self, frames: Sequence[bytes]) -> None:
        kept = list(frames)
        self.host.world.carry(self, False, lambda: self.arrived.append(kept))

    def receive(self) -> Iterator[list[bytes]]:
        while self.arrived:
            yield self.arrived.popleft()

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        self.open = False


class MemoryKnock:
    """Tries to connect as :class:`lsgd.node.candidates.Knock` does: twice, and then the host is away."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._answers: bool | None = None
        self._began_at, self._sent_at, self._answered_at = math.inf, -math.inf, -math.inf

    def __call__(self, address: str, now: float, since: float = -math.inf) -> bool | None:
        host = self._host
        other = next(each for each in host.world.hosts if each.place.address == address)
        if self._began_at == math.inf or self._began_at < since:
            self._began_at, self._sent_at = now, -math.inf
        if now - self._sent_at >= SYN_AGAIN_S:
            self._sent_at = now
            answers = not other.frozen if other.alive else other.refuses
            if answers and host.world.reaches(host, other):
                self._end(True)
        if now - self._began_at >= KNOCK_WITHIN_S:
            self._end(False)
        return self._answers if self._answered_at >= since else None

    def _end(self, answers: bool) -> None:
        self._answers, self._answered_at, self._began_at = answers, self._began_at, math.inf


class ServerListener:
    """Where a global server hears its peers."""

    secured = False

    def __init__(self, host: Host) -> None:
        self._host = host

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        while self._host.inbox:
            yield self._host.inbox.popleft()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        link = self._host.links.get(peer.decode())
        if link is None or not link.open:
            return False
        link.answer(frames)
        return True

    def closed(self) -> list[bytes]:
        closed, self._host.closed = self._host.closed, []
        return closed

    def refusals(self) -> Iterator[str]:
        yield from ()


class WorkerListener:
    """Where a local server hears its workers, and sees their processes end (as :class:`Processes` does)."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._watched: set[bytes] = set()
        self.arrived: deque[tuple[bytes, list[bytes]]] = deque()

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        while self.arrived:
            yield self.arrived.popleft()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        worker = self._host.by_incarnation.get(int(peer))
        if worker is None or worker.state == "gone":
            return False
        terms = self._host.terms
        for frame in frames:
            self._host.after(0.001, lambda frame=frame: worker.hears(frame, terms))  # type: ignore[misc]
        return True

    def refusals(self) -> Iterator[str]:
        yield from ()

    def watch(self, name: bytes | str, pid: int) -> None:
        if pid in self._host.by_incarnation:
            self._watched.add(str(pid).encode())

    def forget(self, name: bytes | str) -> None:
        self._watched.discard(cast(bytes, name))

    def ended(self) -> list[bytes]:
        ended = [name for name in self._watched if self._host.by_incarnation[int(name)].state == "gone"]
        self._watched.difference_update(ended)
        return ended
