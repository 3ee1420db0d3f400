"""The relay: connects two members of a run that cannot reach each other, and passes on bytes that it cannot read.

Both dial it and present a ticket (:mod:`lsgd.protocol.credentials`). Once both are there, the relay tells each, and
then passes on what one sends to the other: TLS between the members passes through. It is a separate process with one
loop, so the global server's decisions never wait for bytes.
"""

import errno
import selectors
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from lsgd.errors import ConfigError
from lsgd.protocol.credentials import MET, TICKET_NBYTES, Ticket, new_greeting
from lsgd.protocol.ports import user_of
from lsgd.protocol.processes import raise_descriptor_limit
from lsgd.server.daemon import Signals, complain, say

GREET_WITHIN_S = 5.0
"""How long a connection has to present its ticket, in seconds."""

MEET_WITHIN_S = 120.0
"""How long a member waits for the other one of its pair."""

CLOSE_WITHIN_S = 30.0
"""How long a pair may be idle once one side has ended."""

MAX_STRANGERS = 512
"""Most connections without a ticket; beyond that, the oldest are closed."""

MAX_WAITING = 4096
"""Most members that wait for the other one of their pair; beyond that, the oldest are closed."""

READ_NBYTES = 64 << 10
"""Most bytes read from a connection in its turn, and kept for one that accepts them slowly."""

SPARE_DESCRIPTORS = 64
"""Descriptors that the process needs besides its connections."""

FULL_S = 0.05
"""Shortest turn while the system has no room for a connection."""

MAX_NAMED = 100
"""Most refused addresses that are counted separately."""

TURN_S = 1.0
REFUSALS_EVERY_S = 30.0
STATISTICS_EVERY_S = 600.0
BACKLOG = 512
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(slots=True, eq=False, repr=False)
class End:
    """One connection: without a ticket, then of a member that waits, then of one that has met the other.

    Args:
        came_from: address of the peer.
        deadline: time when it is closed unless it makes progress; None: never.
        said: bytes from the peer before it met the other.
        other: connection that it exchanges bytes with.
        pending: bytes that it has yet to accept.
        ended: whether nothing more comes from it.
    """

    connection: socket.socket
    came_from: str
    deadline: float | None
    greeting: bytes = field(default_factory=new_greeting)
    said: bytes = b""
    ticket: Ticket | None = None
    other: "End | None" = None
    pending: memoryview = field(default_factory=lambda: memoryview(b""))
    ended: bool = False


class _Refusals:
    """Counts who was refused, by reason, and reports it now and then."""

    def __init__(self, now: float) -> None:
        self._who: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._next_at = now

    def add(self, why: str, address: str) -> None:
        who = self._who[why]
        who[address if address in who or len(who) < MAX_NAMED else "elsewhere"] += 1

    def report(self, now: float) -> Iterator[str]:
        """Yield a line for each reason, if there are any and the last report was long enough ago."""
        if not self._who or now < self._next_at:
            return
        self._next_at = now + REFUSALS_EVERY_S
        for why, who in self._who.items():
            (first, _), others = who.most_common(1)[0], len(who) - 1
            more = f" and {others} more addresses" if others else ""
            yield f"refused {who.total()} connections from {first}{more}: {why}"
        self._who.clear()


class _WaitingRoom:
    """The members that wait for the other one of their pair, the oldest first."""

    def __init__(self) -> None:
        self.ends: dict[End, None] = {}
        self._by_ticket: dict[Ticket, list[End]] = {}

    def enter(self, end: End) -> None:
        assert end.ticket
        self._by_ticket.setdefault(end.ticket, []).append(end)
        self.ends[end] = None

    def leave(self, end: End) -> None:
        assert end.ticket
        del self.ends[end]
        here = self._by_ticket[end.ticket]
        here.remove(end)
        if not here:
            del self._by_ticket[end.ticket]

    def newest(self, ticket: Ticket) -> End | None:
        """Return the member with a ticket that came last: an older one may have lost its connection silently."""
        return self._by_ticket[ticket][-1] if ticket in self._by_ticket else None


@dataclass(slots=True)
class _Traffic:
    """What has passed, for the statistics: how many pairs have met, and bytes; and what of that was said last."""

    next_at: float
    met: int = 0
    nbytes: int = 0
    told: tuple[int, int] = (0, 0)

    def is_due(self, now: float) -> bool:
        """Whether to say it now; who asks says it."""
        if now < self.next_at:
            return False
        self.next_at = now + STATISTICS_EVERY_S
        before, self.told = self.told, (self.met, self.nbytes)
        return before != self.told


class Relay:
    """Listens at an address, port 0 being any, until a signal comes. The secrets of runs derive from ``secret``.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            why = f"it is taken by {user_of(host, port)}" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"the relay cannot listen on port {port} of {host}: {why}") from None
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._max_ends = raise_descriptor_limit() - SPARE_DESCRIPTORS
        self._max_strangers = min(MAX_STRANGERS, self._max_ends // 4)
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[End, None] = {}  # the oldest first
        self._waiting = _WaitingRoom()
        self._paired: set[End] = set()
        self._closed: set[End] = set()  # in this turn
        self._buffer = bytearray(READ_NBYTES)
        self._now = time.monotonic()
        self._refusals = _Refusals(self._now)
        self._traffic = _Traffic(self._now + STATISTICS_EVERY_S)

    def run(self, signals: Signals) -> int:
        """Pass bytes on until SIGTERM or SIGINT; return the exit code."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(signals.wakeup, selectors.EVENT_READ)
        looked_at = self._now
        while not signals.first:
            events = self._selector.select(TURN_S)
            self._now = time.monotonic()
            for key, mask in events:
                if key.data is not None:
                    self._serve(key.data, mask)
                elif key.fileobj is self._listener:
                    self._accept()
            self._closed.clear()
            if self._now - looked_at >= TURN_S:
                looked_at = self._now
                self._look()
        say(f"{signals.first}: the relay ends; {self._statistics()}")
        for end in (*self._strangers, *self._waiting.ends, *self._paired):
            end.connection.close()
        self._listener.close()
        return 0

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._make_room("this machine has no descriptor left")
                    time.sleep(FULL_S)
                return
            connection.setblocking(False)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEP_ALIVE.items():
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
            end = End(connection, address[0], self._now + GREET_WITHIN_S)
            self._strangers[end] = None
            self._selector.register(connection, selectors.EVENT_READ, end)
            try:
                connection.send(end.greeting)
            except OSError:
                self._close(end)
                continue
            if len(self._strangers) > self._max_strangers:
                self._refuse(next(iter(self._strangers)), "too many others came that showed no ticket")
            if len(self._strangers) + len(self._waiting.ends) + len(self._paired) > self._max_ends:
                self._make_room("there are too many connections; raise the limit of open files (ulimit -n)")

    def _make_room(self, why: str) -> None:
        """Close the oldest connection that has not met its other."""
        if oldest := next(chain(self._strangers, self._waiting.ends), None):
            self._refuse(oldest, why)

    def _hear(self, end: End) -> None:
        """Read from a connection that has not met its other: its ticket, and then nothing."""
        try:
            said = end.connection.recv(TICKET_NBYTES - len(end.said) or 1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._close(end)
        elif end.ticket:
            self._refuse(end, "it spoke before the other side was there")
        else:
            end.said += said
            if len(end.said) == TICKET_NBYTES:
                self._admit(end)

    def _admit(self, end: End) -> None:
        end.ticket = Ticket.of(end.said, end.greeting, self._secret)
        if end.ticket is None:
            self._refuse(end, "its ticket is not of a run of this server")
            return
        del self._strangers[end]
        if other := self._waiting.newest(end.ticket.counterpart):
            self._waiting.leave(other)
            self._join(end, other)
            return
        self._waiting.enter(end)
        end.deadline = self._now + MEET_WITHIN_S
        if len(self._waiting.ends) > MAX_WAITING:
            self._refuse(next(iter(self._waiting.ends)), "too many wait for another side that is missing")

    def _join(self, one: End, other: End) -> None:
        one.other, other.other = other, one
        for end in (one, other):
            end.deadline, end.greeting, end.said = None, b"", b""
            self._paired.add(end)
        self._traffic.met += 1
        for end in (one, other):
            if end.other:  # the first may have failed, and with it the second
                self._give(end, memoryview(MET))

    def _serve(self, end: End, mask: int) -> None:
        if end in self._closed:
            return
        if end.other is None:
            self._hear(end)
            return
        if mask & selectors.EVENT_WRITE:
            self._give(end, end.pending)
        if mask & selectors.EVENT_READ and end.other and not end.other.pending:
            self._take(end, end.other)

    def _take(self, end: End, other: End) -> None:
        """Read from one, and send it to the other."""
        try:
            count = end.connection.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            self._close(end)
            return
        if count:
            self._traffic.nbytes += count
            self._give(other, memoryview(self._buffer)[:count])
            return
        end.ended = True
        if other.ended:
            self._close(end)
            return
        with suppress(OSError):
            other.connection.shutdown(socket.SHUT_WR)
        other.deadline = self._now + CLOSE_WITHIN_S
        self._want(end)

    def _give(self, end: End, data: memoryview) -> None:
        """Send what one accepts; keep the rest, and read no more from the other until that is sent too."""
        try:
            sent = end.connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(end)
            return
        end.pending = data[sent:] if data is end.pending else memoryview(bytes(data[sent:]))
        assert end.other
        for one in (end, end.other):
            if one.deadline is not None:  # one side has ended, and the pair is still in use
                one.deadline = self._now + CLOSE_WITHIN_S
            self._want(one)

    def _want(self, end: End) -> None:
        """Poll one that has met the other for what it may do next."""
        assert end.other
        wanted = selectors.EVENT_WRITE if end.pending else 0
        if not end.ended and not end.other.pending:
            wanted |= selectors.EVENT_READ
        known = self._selector.get_map().get(end.connection)
        if not wanted and known:
            self._selector.unregister(end.connection)
        elif wanted and known is None:
            self._selector.register(end.connection, wanted, end)
        elif known is not None and known.events != wanted:
            self._selector.modify(end.connection, wanted, end)

    def _close(self, end: End) -> None:
        """Close a connection, and the other one of its pair."""
        for one in (end, end.other):
            if one is None:
                continue
            if one.connection in self._selector.get_map():
                self._selector.unregister(one.connection)
            one.connection.close()
            self._strangers.pop(one, None)
            self._paired.discard(one)
            if one in self._waiting.ends:
                self._waiting.leave(one)
            self._closed.add(one)
            one.other, one.pending = None, memoryview(b"")

    def _refuse(self, end: End, why: str) -> None:
        self._refusals.add(why, end.came_from)
        self._close(end)

    def _look(self) -> None:
        """Once a second: close what is overdue, and report now and then."""
        ends = (*self._strangers, *self._waiting.ends, *self._paired)
        for end in [end for end in ends if end.deadline is not None and end.deadline <= self._now]:
            if end.ticket is None:
                self._refuse(end, f"it showed no ticket within {GREET_WITHIN_S:g} s")
            elif end.other is None:
                self._refuse(end, f"the other side of its pair did not come within {MEET_WITHIN_S:g} s")
            else:
                self._close(end)
        for line in self._refusals.report(self._now):
            complain(line)
        if self._traffic.is_due(self._now):
            say(self._statistics())

    def _statistics(self) -> str:
        return (
            f"{len(self._paired) // 2} pairs are connected, {self._traffic.met} have been; "
            f"{self._traffic.nbytes / 1e6:.1f} MB passed on; {len(self._waiting.ends)} members wait for another"
        )
