"""Whether the members of a generation can reach each other: looked at before their process groups are built.

A group that cannot connect fails by its deadline, on whichever member waits first, and says nothing of the others. So
each member opens a port, publishes it through the servers, and calls those that Gloo would have it call; whom it
did not reach it publishes too. Then all members know which pairs are broken.
"""

import json
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from lsgd.client.control.joining import Membership
from lsgd.client.groups.store import ServerStore
from lsgd.errors import BrokenLinksError, ExchangeError
from lsgd.protocol.messages import Generation

PROBE_WITHIN_S = 5.0
"""How long a member has to be reached, in seconds; ``exchange_timeout_s`` if that is less."""

ROWS_WITHIN_S = 2.0
"""How much longer than that it takes at most until a member has published whom it reached, in seconds."""

MESSAGE_NBYTES = 8 << 10
"""What each side of a call sends: more than one packet, so that a link which loses large ones shows."""

MAX_CALLS = 128
"""Most calls that are made, and most that are answered, at a time."""

MAX_PAIRS = 8192
"""Most broken pairs that are reported."""

_NONCE_NBYTES = 16
_RANK_NBYTES = 4
_POLL_S = 0.25


@dataclass(frozen=True)
class Door:
    """Where a member answers calls: address, port, and the nonce that a call begins with."""

    address: str
    port: int
    nonce: bytes


def probe(generation: Generation, membership: Membership) -> None:
    """See whether all members of a generation reach each other; each of them has to call this.

    Raises:
        BrokenLinksError: some do not. All members that have heard of each other in time find the same.
        ExchangeError: a member did not come, or the generation is over.
    """
    names, join, channel = generation.members, membership.join, membership.channel
    me, size = names.index(join.worker), len(names)
    if size == 1:
        return
    timeout_s = membership.plan.run.exchange_timeout_s
    within_s = min(PROBE_WITHIN_S, timeout_s)
    who = (channel, join.worker, join.incarnation, generation.number)
    store = ServerStore(*who, timeout_s)
    with open_door(join.address) as (listener, door):
        store.set(f"door/{me}", json.dumps([door.address, door.port, door.nonce.hex()]))
        doors = [door if rank == me else _door_of(store.get(f"door/{rank}")) for rank in range(size)]
        both = generation.backend != "gloo"
        calls = [rank for rank in range(size) if rank != me and (both or calls_first(doors, me, rank))]
        callers = [rank for rank in range(size) if rank != me and (both or calls_first(doors, rank, me))]
        over = lambda: bool(channel.generation_over(generation.number))  # noqa: E731
        missed = Calls(listener, me, doors).make(calls, callers, within_s, over)
    store.set(f"missed/{me}", json.dumps(missed))
    rows = {me: missed}
    deadline = time.monotonic() + within_s + ROWS_WITHIN_S
    for rank in set(range(size)) - {me}:
        try:
            row = ServerStore(*who, max(0.1, deadline - time.monotonic())).get(f"missed/{rank}")
        except ExchangeError:
            if channel.generation_over(generation.number):
                raise
            continue  # it may be frozen, or dead: its lease or the exchange will tell
        rows[rank] = json.loads(row)
    if pairs := broken_pairs(rows)[:MAX_PAIRS]:
        words = ", ".join(f"{names[a]} and {names[b]}" for a, b in pairs[:4])
        more = f" (and {len(pairs) - 4} more pairs)" if len(pairs) > 4 else ""
        raise BrokenLinksError(
            f"{words} cannot reach each other{more}", tuple(rank for pair in pairs for rank in pair)
        )


def broken_pairs(rows: Mapping[int, Collection[int]]) -> list[tuple[int, int]]:
    """Return the pairs of which one did not reach the other, of members whose rows are known.

    Args:
        rows: by rank, the ranks that it did not reach. One that published none says nothing about its links.
    """
    pairs = {(min(a, b), max(a, b)) for a, row in rows.items() for b in row if b in rows and b != a}
    return sorted(pairs)


def calls_first(doors: Sequence[Door], one: int, other: int) -> bool:
    """Whether Gloo would have ``one`` connect to ``other``: the higher address does; of equal ones, the higher rank."""
    return (_packed(doors[one].address), one) > (_packed(doors[other].address), other)


def _packed(address: str) -> bytes:
    return socket.inet_pton(_family(address), address.partition("%")[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _door_of(published: bytes) -> Door:
    address, port, nonce = json.loads(published)
    return Door(address, port, bytes.fromhex(nonce))


@contextmanager
def open_door(address: str) -> Iterator[tuple[socket.socket, Door]]:
    """Listen on an address, at a port that the system chooses, until the end of the block.

    Raises:
        ExchangeError: that cannot be.
    """
    try:
        listener = socket.create_server((address, 0), family=_family(address), backlog=MAX_CALLS)
    except OSError as error:
        raise ExchangeError(f"nothing can listen on {address}: {error}") from error
    with listener:
        listener.setblocking(False)
        yield listener, Door(address, listener.getsockname()[1], secrets.token_bytes(_NONCE_NBYTES))


@dataclass(eq=False)
class _Call:
    """A connection: the message of the caller goes there, and comes back."""

    connection: socket.socket
    to: int = -1  # the rank that we call; -1: we are called
    message: bytes = b""
    to_send: bytes = b""
    received: bytearray = field(default_factory=bytearray)

    @property
    def wants(self) -> int:
        """What it waits for, as the selector has it."""
        return selectors.EVENT_WRITE if self.to_send else selectors.EVENT_READ


class Calls:
    """The calls of one member, those that it makes and those that it answers, in one loop.

    Args:
        listener: behind this member's own door; does not block.
        me: its rank.
        doors: of all members.
    """

    def __init__(self, listener: socket.socket, me: int, doors: Sequence[Door]) -> None:
        self._listener = listener
        self._me = me
        self._doors = doors
        self._made: dict[int, _Call] = {}  # by the rank that is called
        self._answered: dict[_Call, None] = {}  # in order
        self._missed: set[int] = set()
        self._awaited: set[int] = set()
        self._selector = selectors.DefaultSelector()

    def make(
        self, calls: Sequence[int], callers: Collection[int], within_s: float, over: Callable[[], bool]
    ) -> list[int]:
        """Call some ranks and answer others; return those that were called and not reached.

        Args:
            calls: the ranks to call.
            callers: those that will call.
            within_s: how long it may take.
            over: whether nobody is interested any more.
        """
        deadline = time.monotonic() + within_s
        waiting, self._awaited = deque(calls), set(callers)
        with self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            try:
                while (waiting or self._made or self._awaited) and not over():
                    while waiting and len(self._made) < MAX_CALLS:
                        self._call(waiting.popleft())
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        break
                    for key, _ in self._selector.select(min(left_s, _POLL_S)):
                        self._accept() if key.data is None else self._go_on(key.data)
            finally:
                self._missed |= set(self._made)
                for call in [*self._made.values(), *self._answered]:
                    call.connection.close()
        return sorted(self._missed)

    def _call(self, rank: int) -> None:
        door = self._doors[rank]
        rest = secrets.token_bytes(MESSAGE_NBYTES - _NONCE_NBYTES - _RANK_NBYTES)
        message = door.nonce + self._me.to_bytes(_RANK_NBYTES) + rest
        connection = socket.socket(_family(door.address), socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.connect((door.address, door.port))
        except OSError:  # no route, say
            connection.close()
            self._missed.add(rank)
            return
        self._made[rank] = call = _Call(connection, rank, message, message)
        self._selector.register(connection, call.wants, call)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has hung up already
            return
        if len(self._answered) >= MAX_CALLS:  # strangers: a member is done in a few round trips
            self._end(next(iter(self._answered)), reached=False)
        connection.setblocking(False)
        self._answered[call := _Call(connection)] = None
        self._selector.register(connection, call.wants, call)

    def _go_on(self, call: _Call) -> None:
        try:
            if call.to_send:
                call.to_send = call.to_send[call.connection.send(call.to_send) :]
            else:
                self._receive(call)
        except BlockingIOError:
            return
        except OSError:
            self._end(call, reached=False)
            return
        complete = len(call.received) == MESSAGE_NBYTES and not call.to_send
        if complete:
            self._end(call, reached=True)
        else:
            self._selector.modify(call.connection, call.wants, call)

    def _receive(self, call: _Call) -> None:
        """Take in what came, and answer a whole message with itself.

        Raises:
            ConnectionError: the other side hung up, or is somebody else.
        """
        data = call.connection.recv(MESSAGE_NBYTES - len(call.received))
        call.received += data
        right = call.message if call.to >= 0 else self._doors[self._me].nonce
        seen = bytes(call.received[: len(right)])
        if not data or not right.startswith(seen):
            raise ConnectionError
        if call.to < 0 and len(call.received) == MESSAGE_NBYTES:
            call.to_send = bytes(call.received)

    def _end(self, call: _Call, *, reached: bool) -> None:
        self._selector.unregister(call.connection)
        call.connection.close()
        if call.to >= 0:
            del self._made[call.to]
            if not reached:
                self._missed.add(call.to)
            return
        del self._answered[call]
        if reached:
            rank = call.received[_NONCE_NBYTES : _NONCE_NBYTES + _RANK_NBYTES]
            self._awaited.discard(int.from_bytes(rank))
