"""Members of a mesh as threads of one process, with a store, a network that is cut, and a clock that the tests move."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from lsgd.client.groups import connections, mesh, staging, stream
from lsgd.client.groups.base import Members
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.reach import Endpoint
from lsgd.client.groups.routes import RELAY_NBYTES, DirectRoute, Routes
from lsgd.client.groups.staging import Copier
from lsgd.client.groups.tcp_group import TcpGroup

from ..speed import scaled
from .bench import together


class SharedStore(dict[str, bytes]):
    """Where the members of one process publish what they have."""

    def set(self, key: str, value: str | bytes) -> None:
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        deadline = time.monotonic() + scaled(20)
        while key not in self:
            assert time.monotonic() < deadline, f"nobody has published {key}"
            time.sleep(0.001)
        return self[key]


def members(
    size: int,
    certificates: Sequence[bytes],
    timeout_s: float = 20.0,
    routes: Callable[..., Routes] = Routes,
    copiers: Sequence[Copier | None] = (),
    node_sizes: Sequence[int] = (),
) -> tuple[list[TcpGroup], SharedStore]:
    """Return a group for each member, and the store; each has one of the certificates, and of the copiers if any.

    Without ``node_sizes``, each is on its own node.
    """
    store, names = SharedStore(), [f"node{rank}/worker0" for rank in range(size)]
    groups = []
    for rank, certificate in zip(range(size), certificates, strict=True):
        mesh = Mesh("run", 1, rank, names, "127.0.0.1", store, certificate, timeout_s, routes)  # type: ignore[arg-type]
        copier_of = (lambda device, rank=rank: copiers[rank]) if copiers else staging.copier_of
        placed = Members("world", range(size), names, rank, node_sizes or [1] * size)
        groups.append(TcpGroup(mesh, placed, timeout_s, copiers=copier_of))
    return groups, store


def all_at_once(groups: Sequence[TcpGroup], work: Callable[[TcpGroup], Any]) -> list[Any]:
    """Return what ``work`` returns for each group, then close them all."""

    def attempt(rank: int) -> Any:
        try:
            return work(groups[rank])
        finally:
            groups[rank].close()

    return together(attempt, range(len(groups)))


class LossyRoute(DirectRoute):
    """A route through a network that acknowledges what it may lose."""

    between_nbytes = RELAY_NBYTES


class Network:
    """Carries the connections of a mesh, and what is on its way is lost when it is broken.

    Args:
        spoil: bytes go through this, with the number of those before them.

    Attributes:
        down: whether new connections are closed at once.
        closed: how many were.
    """

    def __init__(self, spoil: Callable[[bytes, int], bytes] = lambda data, before: data) -> None:
        self.carried_nbytes = 0
        self.breaks = self.closed = 0
        self.down = False
        self._spoil = spoil
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closing = ExitStack()
        self._endpoints: dict[Endpoint, Endpoint] = {}

    def routes(self, me: int, endpoint_of: Callable[[int], Endpoint]) -> Routes:
        """Return the routes of a member: all go through this network."""
        network = self

        class Through(Routes):
            def route(self, source: int, target: int) -> DirectRoute | None:
                route = super().route(source, target)
                return LossyRoute(network.endpoint(route.endpoint)) if isinstance(route, DirectRoute) else None

        return Through(me, endpoint_of)

    def endpoint(self, behind: Endpoint) -> Endpoint:
        """Return the network's own endpoint to another one."""
        with self._lock:
            if behind not in self._endpoints:
                listener = socket.create_server(("127.0.0.1", 0), backlog=64)
                self._closing.callback(listener.close)
                self._closing.callback(lambda: listener.shutdown(socket.SHUT_RDWR))
                self._start(self._accept, listener, behind)
                self._endpoints[behind] = Endpoint("127.0.0.1", listener.getsockname()[1], behind.nonce)
            return self._endpoints[behind]

    def break_all(self) -> None:
        """End all connections at both sides at once, as a router does that is switched off and on."""
        with self._lock:
            broken, self._open = self._open, []
            self.breaks += 1
        for end in broken:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads here
            end.close()

    def close(self) -> None:
        """End the network."""
        self._closing.close()
        self.break_all()
        for thread in self._threads:
            thread.join(scaled(10))

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, behind: Endpoint) -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                if self.down:
                    self.closed += 1
                    caller.close()
                    continue
                try:
                    called = socket.create_connection((behind.address, behind.port))
                except OSError:
                    caller.close()
                    continue
                with self._lock:
                    self._open += (caller, called)
                self._start(self._carry, caller, called)
                self._start(self._carry, called, caller)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    before, self.carried_nbytes = self.carried_nbytes, self.carried_nbytes + len(data)
                target.sendall(self._spoil(data, before))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


class Clock:
    """Stands in place of the module ``time``: its time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    for module in (stream, mesh, connections):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(stream, "TURN_S", 0.0005)  # of real time: less than a piece of a tensor takes
    return made
