"""Tests whether the members of a generation can reach each other, before their groups are built.

A group that cannot connect fails at its deadline, on any member, and says nothing about the others. So each member
opens a port, publishes it through the servers, calls all others, and publishes which ones it did not reach.

For lsgd's own TCP connections it is enough that one of two members can dial the other, or that both reach the relay.
There the results decide how each connection is made.
"""

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from lsgd.client.control.joining import Membership
from lsgd.client.groups.routes import NONCE_NBYTES, Endpoint, listening, until_it_greets
from lsgd.client.groups.store import ServerStore
from lsgd.errors import BrokenLinksError, ExchangeError
from lsgd.protocol.messages import Generation

PROBE_WITHIN_S = 5.0
"""How long it may take to reach a member, in seconds; ``exchange_timeout_s`` if that is less."""

ROWS_WITHIN_S = 2.0
"""How long after that a member may take to publish whom it reached, in seconds."""

MESSAGE_NBYTES = 8 << 10
"""What each side of a call sends: more than one packet, to detect a link that loses large ones."""

MAX_CALLS = 128
"""Most calls made at a time, and most answered."""

MAX_PAIRS = 8192
"""Most broken pairs reported."""

_RANK_NBYTES = 4
_POLL_S = 0.25


class Row(NamedTuple):
    """The ranks that a member did not reach, and whether it saw that it reaches the relay."""

    missed: Collection[int]
    relay: bool = False


def probe(generation: Generation, membership: Membership) -> tuple[int, ...]:
    """Return pairs of nodes of which the first cannot dial the second, as a flat list like ``Generation.missed``.

    Every member must call this.

    Raises:
        BrokenLinksError: some cannot. All members that heard of each other in time find the same pairs.
        ExchangeError: a member did not come, or the generation is over.
    """
    names, join, channel = generation.members, membership.join, membership.channel
    me, size = names.index(join.worker), len(names)
    if size == 1:
        return ()
    timeout_s = membership.plan.run.exchange_timeout_s
    within_s = min(PROBE_WITHIN_S, timeout_s)
    who = (channel, *membership.who, generation.number)
    store = ServerStore(*who, timeout_s)
    with listening(membership.address) as (listener, endpoint):
        store.set(f"endpoint/{join.worker}", endpoint.published())
        endpoints = [
            endpoint if rank == me else Endpoint.of(store.get(f"endpoint/{names[rank]}")) for rank in range(size)
        ]
        # Only an island's head probes, and does not tell the other processes: so theirs must dial both ways.
        one_way = generation.transport == "tcp" and membership.island.shards == 1
        others = [rank for rank in range(size) if rank != me]
        over = partial(channel.endings.generation_over, generation.number)
        made = Calls(listener, me, endpoints, membership.relay[0] if one_way else "")
        row = Row(made.make(others, others, within_s, over), made.reaches_relay)
    store.set(f"missed/{join.worker}", json.dumps(row))
    rows = {me: row}
    deadline = time.monotonic() + within_s + ROWS_WITHIN_S
    for rank in set(range(size)) - {me}:
        try:
            published = ServerStore(*who, max(0.1, deadline - time.monotonic())).get(f"missed/{names[rank]}")
        except ExchangeError:
            if channel.endings.generation_over(generation.number):
                raise
            continue  # it may be frozen or dead: its lease or the exchange will show
        rows[rank] = Row(*json.loads(published))
    if pairs := broken_pairs(rows, one_way=one_way)[:MAX_PAIRS]:
        words = ", ".join(f"{names[a]} and {names[b]}" for a, b in pairs[:4])
        more = f" (and {len(pairs) - 4} more pairs)" if len(pairs) > 4 else ""
        raise BrokenLinksError(f"{words} cannot reach each other{more}", tuple(rank for pair in pairs for rank in pair))
    return missed_nodes(rows, generation)


def broken_pairs(rows: Mapping[int, Row], *, one_way: bool = False) -> list[tuple[int, int]]:
    """Return the pairs of members that cannot exchange, as far as their rows are known, by rank.

    With ``one_way`` it is enough that one of two reaches the other, or that both reach the relay.
    """
    missed = {(a, b) for a, row in rows.items() for b in row.missed if b in rows and b != a}
    if one_way:
        missed = {(a, b) for a, b in missed if (b, a) in missed and not (rows[a].relay and rows[b].relay)}
    return sorted({(min(pair), max(pair)) for pair in missed})


def missed_nodes(rows: Mapping[int, Row], generation: Generation) -> tuple[int, ...]:
    """Return pairs of nodes in which a member of the first did not reach one of the second, as a flat list."""
    home = generation.homes
    missed = {(home[a], home[b]) for a, row in rows.items() for b in row.missed if b in rows}
    return tuple(node for pair in sorted(missed) if pair[0] != pair[1] for node in pair)


class Calls:
    """One member's calls: it calls others, and answers each call that has its nonce with the same bytes.

    Args:
        listener: socket behind this member's own endpoint; closed at the end.
        endpoints: all members'.
        relay: address of the relay that may help; empty: there is none.

    Attributes:
        missed: reason by rank that was called and not reached.
        reaches_relay: whether this member saw that it reaches the relay; it looks if it missed somebody.
    """

    def __init__(self, listener: socket.socket, me: int, endpoints: Sequence[Endpoint], relay: str = "") -> None:
        self.missed: dict[int, str] = {}
        self.reaches_relay = False
        self._relay = relay
        self._listener = listener
        self._me = me
        self._endpoints = endpoints
        self._awaited: set[int] = set()
        self._answered: list[asyncio.StreamWriter] = []  # the oldest first

    def make(
        self, calls: Sequence[int], callers: Collection[int], within_s: float, over: Callable[[], object]
    ) -> list[int]:
        """Call some ranks and answer ``callers``; return the ranks that were called but not reached."""
        self.missed = dict.fromkeys(calls, f"no answer within {within_s:g} s")
        self._awaited = set(callers)
        with ThreadPoolExecutor(1) as thread:  # the calling thread may run an event loop, as in a notebook
            thread.submit(asyncio.run, self._make(time.monotonic() + within_s, over)).result()
        return sorted(self.missed)

    async def _make(self, deadline: float, over: Callable[[], object]) -> None:
        self._called = asyncio.Semaphore(MAX_CALLS)
        self._called_by_all = asyncio.Event()
        if not self._awaited:
            self._called_by_all.set()
        server = await asyncio.start_server(self._answer, sock=self._listener, backlog=MAX_CALLS)
        done: asyncio.Future[Any] = asyncio.gather(*map(self._call, tuple(self.missed)), self._called_by_all.wait())
        relay = asyncio.create_task(self._look_for_relay())
        left: set[asyncio.Future[Any]] = {done, relay}
        while left and not over() and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait(left, timeout=min(left_s, _POLL_S))
            left = {one for one in left if not one.done()}
            if done.done() and not self.missed:
                break
        server.close()
        if not done.done():
            done.cancel()
        with suppress(asyncio.CancelledError):
            await done

    async def _look_for_relay(self) -> None:
        if self._relay:
            await until_it_greets(self._relay)
            self.reaches_relay = True

    async def _call(self, rank: int) -> None:
        endpoint = self._endpoints[rank]
        rest = secrets.token_bytes(MESSAGE_NBYTES - NONCE_NBYTES - _RANK_NBYTES)
        message = endpoint.nonce + self._me.to_bytes(_RANK_NBYTES) + rest
        async with self._called:
            try:
                reader, writer = await asyncio.open_connection(endpoint.address, endpoint.port)
            except OSError as error:
                self.missed[rank] = os.strerror(error.errno) if error.errno else str(error)
                return
            try:
                writer.write(message)
                if await reader.readexactly(MESSAGE_NBYTES) == message:
                    del self.missed[rank]
            except (OSError, EOFError):
                self.missed[rank] = "the other side hung up"
            finally:
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._answered) >= MAX_CALLS:  # not by members: they are done in a few round trips
            self._answered.pop(0).transport.abort()
        self._answered.append(writer)
        writer.transport.set_write_buffer_limits(0)  # makes drain() wait until all is sent
        try:
            message = await reader.readexactly(NONCE_NBYTES)
            if message == self._endpoints[self._me].nonce:
                message += await reader.readexactly(MESSAGE_NBYTES - NONCE_NBYTES)
                writer.write(message)
                await writer.drain()
                self._awaited.discard(int.from_bytes(message[NONCE_NBYTES:][:_RANK_NBYTES]))
                if not self._awaited:
                    self._called_by_all.set()
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()
            if writer in self._answered:
                self._answered.remove(writer)
