"""The relay: connects two members of a run that cannot reach each other, and passes on bytes that it cannot read.

Both dial it and present a ticket (:mod:`lsgd.protocol.tickets`). When both of a pair are there, each is told so, and
from then on what one sends goes to the other, as it comes: TLS between the members passes through. It is a process of
its own with one loop, so that the global server's decisions never wait for bytes.
"""

import asyncio
import errno
import socket
import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

from lsgd.errors import ConfigError
from lsgd.protocol.descriptors import raise_descriptor_limit
from lsgd.protocol.tickets import MET, TICKET_NBYTES, Ticket, new_greeting
from lsgd.server.daemon import Signals, complain, say

GREET_WITHIN_S = 5.0
"""How long a connection has to present its ticket, in seconds."""

MEET_WITHIN_S = 120.0
"""How long a member waits for the other one of its pair."""

CLOSE_WITHIN_S = 30.0
"""How long a pair of which one side has ended may go on without a byte."""

MAX_STRANGERS = 512
"""Most connections without a ticket; of more, the oldest are closed."""

MAX_WAITING = 4096
"""Most members that wait for the other one of their pair; of more, the oldest are sent away."""

READ_NBYTES = 64 << 10
"""Most bytes that are taken from a connection in its turn, and kept for one that is slow to take them."""

SPARE_DESCRIPTORS = 64
"""What the process needs beside its connections."""

MAX_NAMED = 100
"""So many addresses are told apart of those that were refused."""

TURN_S = 1.0
REFUSALS_EVERY_S = 30.0
STATISTICS_EVERY_S = 600.0
BACKLOG = 512
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class End(asyncio.BufferedProtocol):
    """One connection: of a stranger, then of a member that waits, then of one that has met the other.

    Args:
        relay: that it belongs to.

    Attributes:
        transport: its connection.
        came_from: its address, for people.
        deadline: when it is closed if it does not get further; None: never.
        greeting: that it was sent.
        said: what it has answered so far.
        ticket: that it has presented.
        other: the one whose bytes it takes and gives.
        ended: whether nothing more comes from it.
    """

    transport: asyncio.Transport
    came_from: str

    def __init__(self, relay: "Relay") -> None:
        self._relay = relay
        self.deadline: float | None = time.monotonic() + GREET_WITHIN_S
        self.greeting = new_greeting()
        self.said = b""
        self.ticket: Ticket | None = None
        self.other: End | None = None
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection over."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.came_from = transport.get_extra_info("peername")[0]
        transport.set_write_buffer_limits(0)
        self._relay.greet(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to put what it says."""
        return self._relay.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what it says; until it has met the other, it says its ticket, and then nothing."""
        said = bytes(self._relay.buffer[:nbytes])
        if self.other is None:
            self._relay.hear(self, said)
        else:
            self._relay.passed_nbytes += nbytes
            self.other.transport.write(said)
            self._defer()

    def pause_writing(self) -> None:
        """Read no more of the other until this one has taken what there is."""
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        if self.other is not None:
            self.other.transport.resume_reading()
            self._defer()

    def eof_received(self) -> bool:
        """Tell the other that nothing more comes; return whether the pair stays, for what the other has yet to say."""
        if self.other is None or self.other.ended:
            return False
        self.ended = True
        with suppress(OSError):
            self.other.transport.write_eof()
        self.deadline = time.monotonic() + CLOSE_WITHIN_S
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """Close the other one of its pair too."""
        self._relay.close(self)

    def _defer(self) -> None:
        """Put the end of a pair off that is in use still although one side has ended."""
        for one in (self, self.other):
            if one is not None and one.deadline is not None:
                one.deadline = time.monotonic() + CLOSE_WITHIN_S


class Relay:
    """Listens at an address until a signal comes.

    Args:
        host: to listen on.
        port: the same; 0: any.
        secret: of this relay, that the runs' secrets are made of.

    Attributes:
        port: that it listens on.
        buffer: where what comes is put, of whatever connection: it is copied at once.
        passed_nbytes: how much it has passed on.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"the relay cannot listen on port {port} of {host}: {error.strerror}") from None
        self.port = int(self._listener.getsockname()[1])
        self._max_ends = raise_descriptor_limit() - SPARE_DESCRIPTORS
        self._max_strangers = min(MAX_STRANGERS, self._max_ends // 4)
        self._strangers: dict[End, None] = {}  # the oldest first, as of the waiting
        self._waiting: dict[End, None] = {}
        self._by_ticket: dict[Ticket, list[End]] = {}
        self._paired: set[End] = set()
        self.buffer = memoryview(bytearray(READ_NBYTES))
        self._met = self.passed_nbytes = 0
        self._refused: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by reason: who
        self._refusals_at = time.monotonic()
        self._told = (0, 0)
        self._statistics_at = self._refusals_at + STATISTICS_EVERY_S

    def run(self, signals: Signals) -> int:
        """Pass bytes on until SIGTERM or SIGINT; return the exit code."""
        asyncio.run(self._serve(signals))
        return 0

    async def _serve(self, signals: Signals) -> None:
        loop, signalled = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(signals.wakeup, signalled.set)
        loop.set_exception_handler(self._on_exception)
        server = await loop.create_server(lambda: End(self), sock=self._listener, backlog=BACKLOG)
        while not signals.first:
            self._look()
            with suppress(TimeoutError):
                await asyncio.wait_for(signalled.wait(), TURN_S)
        say(f"{signals.first}: the relay ends; {self._statistics()}")
        server.close()
        for end in (*self._strangers, *self._waiting, *self._paired):
            end.transport.abort()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Make room where a connection could not be accepted for want of it; it is tried again a second later."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _FULL:
            self._make_room("this machine has no descriptor left")
        else:
            loop.default_exception_handler(context)

    # -- until two have met ------------------------------------------------------------------------------------

    def greet(self, end: End) -> None:
        """Take in a new connection, whose ticket is yet to come."""
        with suppress(OSError):
            connection = end.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._strangers[end] = None
        end.transport.write(end.greeting)
        if len(self._strangers) > self._max_strangers:
            self._refuse(next(iter(self._strangers)), "too many others came that showed no ticket")
        if len(self._strangers) + len(self._waiting) + len(self._paired) > self._max_ends:
            self._make_room("there are too many connections; raise the limit of open files (ulimit -n)")

    def _make_room(self, why: str) -> None:
        """Close the oldest of those that have not met."""
        for end in (*self._strangers, *self._waiting):
            self._refuse(end, why)
            return

    def hear(self, end: End, said: bytes) -> None:
        """Take what one says that has not met the other: its ticket, and then nothing."""
        if end.ticket is not None:
            self._refuse(end, "it spoke before the other side was there")
            return
        end.said += said
        if len(end.said) >= TICKET_NBYTES:
            self._admit(end)

    def _admit(self, end: End) -> None:
        end.ticket = Ticket.of(end.said, end.greeting, self._secret)
        if end.ticket is None:
            self._refuse(end, "its ticket is none of a run of this server")
            return
        del self._strangers[end]
        if others := self._by_ticket.get(end.ticket.counterpart):
            other = others[-1]  # the newest: one that has lost its connection without a word may still be here, too
            self._forget_waiting(other)
            self._join(end, other)
            return
        self._by_ticket.setdefault(end.ticket, []).append(end)
        self._waiting[end] = None
        end.deadline = time.monotonic() + MEET_WITHIN_S
        if len(self._waiting) > MAX_WAITING:
            self._refuse(next(iter(self._waiting)), "too many wait for another side that has not come")

    def _join(self, one: End, other: End) -> None:
        one.other, other.other = other, one
        self._met += 1
        for end in (one, other):
            end.deadline = None
            self._paired.add(end)
            end.transport.write(MET)

    # -- the end of connections --------------------------------------------------------------------------------

    def close(self, end: End) -> None:
        """Close a connection, and the other one of its pair."""
        for one in (end, end.other):
            if one is None:
                continue
            one.transport.abort()
            self._strangers.pop(one, None)
            self._paired.discard(one)
            if one in self._waiting:
                self._forget_waiting(one)
            one.other = None

    def _forget_waiting(self, end: End) -> None:
        assert end.ticket
        del self._waiting[end]
        here = self._by_ticket[end.ticket]
        here.remove(end)
        if not here:
            del self._by_ticket[end.ticket]

    def _refuse(self, end: End, why: str) -> None:
        who = self._refused[why]
        who[end.came_from if end.came_from in who or len(who) < MAX_NAMED else "elsewhere"] += 1
        self.close(end)

    def _look(self) -> None:
        """Once a second: end what is overdue, and say now and then what there was."""
        now = time.monotonic()
        for end in [*self._strangers, *self._waiting, *self._paired]:
            if end.deadline is None or end.deadline > now:
                continue
            if end.ticket is None:
                self._refuse(end, f"it showed no ticket within {GREET_WITHIN_S:g} s")
            elif end.other is None:
                self._refuse(end, f"the other side of its pair did not come within {MEET_WITHIN_S:g} s")
            else:
                self.close(end)
        if self._refused and now >= self._refusals_at:
            self._refusals_at = now + REFUSALS_EVERY_S
            for why, who in self._refused.items():
                (first, _), others = who.most_common(1)[0], len(who) - 1
                more = f" and {others} more addresses" if others else ""
                complain(f"refused {who.total()} connections from {first}{more}: {why}")
            self._refused.clear()
        if now >= self._statistics_at:
            self._statistics_at = now + STATISTICS_EVERY_S
            if (self._met, self.passed_nbytes) != self._told:
                self._told = self._met, self.passed_nbytes
                say(self._statistics())

    def _statistics(self) -> str:
        return (
            f"{len(self._paired) // 2} pairs are connected, {self._met} have been; "
            f"{self.passed_nbytes / 1e6:.1f} MB passed on; {len(self._waiting)} members wait for another"
        )
