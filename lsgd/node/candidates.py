"""What a node knows of the places where its run is served, or may be, besides the server that it follows."""

import errno
import math
import select
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from lsgd.errors import ConfigError, ProtocolError
from lsgd.protocol.credentials import place_of
from lsgd.protocol.messages import Endpoint, Meet, NodeHello, NodeWelcome, Term, decode, encode
from lsgd.protocol.sockets import Connector, ConnectorKeys, keys_for
from lsgd.server.succession import takes_over

LOOK_AFTER_S = 2.0
"""A node looks for other servers when its own has been silent for this long."""

LOOK_EVERY_S = 1.0
"""How often it greets each of them."""

MEET_EVERY_S = 2.0
"""How often the node that serves greets places where another part of the run may be served."""

KNOCK_WITHIN_S = 2.0
"""How long a host has to answer a knock."""

_AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN)

_Server = tuple[int, bytes]
"""A server as one looks for it: its node and its key. Node 0 has one as it is launched, one when it takes over."""


def dial(name: bytes, keys: ConnectorKeys | None, place: Endpoint) -> Connector:
    """Connect to a global server under ``name``, with the place's key."""
    return Connector(place.address, name, keys_for(keys, place.key))


def met(welcome: NodeWelcome, place: Endpoint) -> Meet:
    """Return what the server at a place serves, for another one that it meets, from its welcome."""
    return Meet(welcome.run, welcome.terms, welcome.count, place, welcome.beaten, welcome.nodes)


class Link(Protocol):
    """A connection to a global server: a :class:`lsgd.protocol.sockets.Connector`."""

    address: str

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; return whether the server is there to get it."""

    def receive(self) -> Iterable[Sequence[bytes]]:
        """Return what has arrived."""

    def trouble(self) -> str:
        """Return why the server refuses us; empty if it does not."""

    def close(self) -> None:
        """End the connection."""


class Knock:
    """Tries whether a host answers at an address at all, by a refusal too; never waits."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._began_at = self._answered_at = 0.0  # when this knock began, and the last one that has ended
        self._answers: bool | None = None

    def __call__(self, address: str, now: float, since: float = -math.inf) -> bool | None:
        """Return whether it answered the last knock; None: none that began after ``since`` has ended yet."""
        if self._socket is not None and self._began_at < since:
            self.close()
        if self._socket is None:
            self._begin(address, now)
        else:
            self._look(now)
        return self._answers if self._answered_at >= since else None

    def close(self) -> None:
        """Forget it all."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._answers = None, None

    def _begin(self, address: str, now: float) -> None:
        try:
            host, port = place_of(address)
        except ConfigError:  # of no network: only this machine reaches it
            self._answers, self._answered_at = True, now
            return
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no TIME_WAIT
        self._began_at = now
        try:
            self._note(self._socket.connect_ex((host, port)), now)
        except OSError:  # a name that is not known any more
            self._note(errno.EHOSTUNREACH, now)

    def _look(self, now: float) -> None:
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if poll.poll(0) else errno.EINPROGRESS
        self._note(error, now)

    def _note(self, error: int, now: float) -> None:
        """Note how a knock ended, if it has."""
        if error == errno.EINPROGRESS and now - self._began_at < KNOCK_WITHIN_S:
            return
        self._answers, self._answered_at = error not in (*_AWAY, errno.EINPROGRESS), self._began_at
        assert self._socket is not None
        self._socket.close()
        self._socket = None


class Candidates:
    """The other places of a run: whom a node looks for, what it hears, and when it serves the run itself.

    Args:
        node: index of this node.
        dial: connects to a place.
        knock: returns whether the host at an address answers, as of the last try since a time; None: that is not known.
        own: where this node serves if it has to; None: it never does.
        first: places to look at from the beginning: that of the server that this node greets, then others.

    Attributes:
        run: the run; empty before this node is in one.
        terms: those of the server that it follows.
        standbys: nodes that would serve instead, the first one first.
        other: the run that its server has said this node is to join instead, if any.
    """

    def __init__(
        self,
        node: int,
        dial: Callable[[Endpoint], Link],
        knock: Callable[[str, float, float], bool | None],
        own: Endpoint | None = None,
        first: Iterable[Endpoint] = (),
    ) -> None:
        self.run = ""
        self.terms: tuple[Term, ...] = ()
        self._node = node
        self._dial = dial
        self._knock = knock
        self._first = [*first, own] if own else [*first]
        self._here = _server(self._first[0]) if self._first else None
        self._known: dict[_Server, Endpoint] = {}
        self.standbys: tuple[int, ...] = ()
        self._links: dict[_Server, Link] = {}
        self._looked_at: dict[_Server, float] = {}
        self._last: NodeWelcome | None = None
        self._served: Endpoint | None = None
        self.other = ""
        self._begin_anew()

    @property
    def term(self) -> Term:
        """The term of the server that this node follows."""
        return self.terms[-1] if self.terms else Term()

    @property
    def serves(self) -> bool:
        """Whether this node serves the run."""
        return bool(self.terms) and self.term.node == self._node

    @property
    def links(self) -> list[Link]:
        """The connections to other places, to poll."""
        return list(self._links.values())

    @property
    def places(self) -> list[Endpoint]:
        """The place of the server that this node follows, if it says that, and others where the run may be later."""
        served = [self._served] if self._served else []
        return [*served, *(place for place in self._known.values() if place not in served)]

    def welcomed(self, welcome: NodeWelcome, address: str) -> None:
        """Note what the server that this node follows says of itself, and of its standbys."""
        if welcome.run != self.run:
            self.run = welcome.run
            self._begin_anew()
        self.terms, self._last = welcome.terms, welcome
        for place in welcome.places:
            self._note(place)
        if welcome.places:
            self._served = served = welcome.places[0]
            if served.address.partition("://")[2].startswith(("0.0.0.0", "[::]")):
                self._served = Endpoint(served.node, address, served.key)
                self._note(self._served)
        self.standbys = tuple(place.node for place in welcome.places[1:])
        if not self.serves:
            self._forget(self._links)

    def add(self, place: Endpoint, run: str) -> None:
        """Look at another place, too, where this run continues, or another one that this node joins instead."""
        self._note(place)
        self.other = run

    def _begin_anew(self) -> None:
        self._forget(self._links)
        self._known.clear()
        for place in self._first:
            self._note(place)

    def _note(self, place: Endpoint) -> None:
        self._known[_server(place)] = place

    def hear(self, now: float, silent_s: float, hello: NodeHello) -> Iterator[tuple[Endpoint, Link, NodeWelcome]]:
        """Look at other places if it is time, with this greeting; yield the welcomes that have come from servers there.

        Args:
            now: the time.
            silent_s: for how long the server that this node follows has been silent.
            hello: says that it only looks.
        """
        wanted = self._wanted(silent_s)
        self._forget([server for server in self._links if server not in wanted])
        every_s = LOOK_EVERY_S if silent_s >= LOOK_AFTER_S else MEET_EVERY_S
        for server in wanted:
            if server not in self._links:
                self._links[server], self._looked_at[server] = self._dial(self._known[server]), 0.0
            if now - self._looked_at[server] >= every_s and self._links[server].send([encode(hello)]):
                self._looked_at[server] = now
        for server, link in list(self._links.items()):
            for welcome in _welcomes(link):
                ours = not self.run or welcome.run in (self.run, self.other)
                if ours or (self.serves and welcome.count <= 0):
                    yield self._known[server], link, welcome

    def answers(self, now: float, since: float = -math.inf) -> bool | None:
        """Whether the host of the server that this node follows answers a knock since then; None: not known yet."""
        return None if self._served is None else self._knock(self._served.address, now, since)

    def is_next(self, silent_s: float, answers: bool | None) -> bool:
        """Whether it is this node's turn to serve, after this silence; ``answers``: whether the server's host does."""
        # A copy from before the last standbys were chosen is better than none: its node comes after them.
        rank = [*self.standbys, self._node].index(self._node)
        return self._served is not None and takes_over(rank, silent_s, answers)

    def take(self, place: Endpoint) -> None:
        """Keep the connection to a place no more: it is the one to the server that this node follows."""
        self._here = server = _server(place)
        del self._links[server], self._looked_at[server]

    def mine(self) -> Meet:
        """Return what the server of this node serves, for another one that it meets."""
        assert self._last is not None and self._served is not None
        return met(self._last, self._served)

    def close(self) -> None:
        """End all connections."""
        self._forget(list(self._links))

    def _wanted(self, silent_s: float) -> list[_Server]:
        """Return the servers to look for: all while this one is silent; who serves looks for those that it misses."""
        if silent_s >= LOOK_AFTER_S:
            return [server for server in self._known if server != self._here]
        if self.serves:
            return [server for server in self._known if server[0] not in (self._node, *self.standbys)]
        return []

    def _forget(self, servers: Iterable[_Server]) -> None:
        for server in list(servers):
            self._links.pop(server).close()
            self._looked_at.pop(server, None)


def _server(place: Endpoint) -> _Server:
    return place.node, place.key


def _welcomes(link: Link) -> Iterator[NodeWelcome]:
    for frames in link.receive():
        for frame in frames[1::2]:
            try:
                message = decode(frame)
            except ProtocolError:
                continue
            if isinstance(message, NodeWelcome):
                yield message
