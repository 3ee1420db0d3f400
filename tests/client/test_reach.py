"""The probe of a generation's links: real sockets, members as threads, and the server's own rendezvous."""

import asyncio
import gc
import json
import math
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lsgd.algorithms.leader import LeaderSettings
from lsgd.client.groups.form import form
from lsgd.client.groups.reach import (
    MAX_CALLS,
    MESSAGE_NBYTES,
    Calls,
    Row,
    broken_pairs,
    missed_nodes,
    probe,
)
from lsgd.client.groups.routes import Endpoint, listening, until_it_greets
from lsgd.client.groups.store import ServerStore
from lsgd.errors import BrokenLinksError, ExchangeError
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.credentials import new_greeting
from lsgd.protocol.ports import hold, port_of
from lsgd.server.reasons import Why
from tests import golden

from ..speed import scaled
from .bench import Switchboard, generation, together

HOUR_S = 3600.0
"""A deadline that a test which passes does not wait for."""

NAMES = tuple(f"node{n}/worker0" for n in range(3))


@pytest.fixture
def switchboard(tmp_path: Path):
    with Switchboard(tmp_path) as made:
        yield made


def plan(exchange_timeout_s: float) -> Plan:
    return Plan(RunSettings(exchange_timeout_s=exchange_timeout_s), (Phase(LeaderSettings()),))


@pytest.mark.parametrize(
    ("rows", "pairs", "in_neither_way"),
    [
        ({0: [], 1: [], 2: []}, [], []),
        ({0: [], 1: [], 2: [1]}, [(1, 2)], []),
        ({0: [1], 1: [0], 2: []}, [(0, 1)], [(0, 1)]),
        ({0: [2], 1: [2]}, [], []),  # it said nothing: it may be frozen, which is no matter of links
        ({0: [1, 2], 1: [], 2: [0, 1, 2]}, [(0, 1), (0, 2), (1, 2)], [(0, 2)]),
    ],
)
def test_a_pair_is_broken_if_one_did_not_reach_the_other_and_both_have_spoken(rows, pairs, in_neither_way) -> None:
    assert broken_pairs({rank: Row(row) for rank, row in rows.items()}) == pairs
    one_away = {rank: Row(row, rank != 0) for rank, row in rows.items()}
    assert broken_pairs(one_away, one_way=True) == in_neither_way
    assert broken_pairs({rank: Row(row, True) for rank, row in rows.items()}, one_way=True) == []


def test_nodes_are_apart_if_two_of_their_members_are() -> None:
    rows = {0: Row([2]), 1: Row([0, 3]), 2: Row([]), 3: Row([1]), 4: Row([5])}
    assert missed_nodes(rows, generation(2, 1, 1, 2)) == (0, 1, 0, 2, 2, 0)


def calls(count: int, spoil=lambda me, endpoints: endpoints, ends_after: float = math.inf) -> list[list[int]]:
    """Return for each of some members which of the lower ranks it did not reach.

    ``spoil`` changes what it knows. When so many calls have ended, members that have not been called wait no longer.
    """
    ended: list[int] = []

    class Noted(Calls):
        async def _call(self, rank: int) -> None:
            await super()._call(rank)
            ended.append(rank)

    opened = [listening("127.0.0.1") for _ in range(count)]
    entered = [one.__enter__() for one in opened]
    endpoints = [endpoint for _, endpoint in entered]

    def make(me: int) -> list[int]:
        known = spoil(me, list(endpoints))
        noted = Noted(entered[me][0], me, known)
        return noted.make(range(me), range(me + 1, count), HOUR_S, lambda: len(ended) >= ends_after)

    try:
        return together(make, range(count))
    finally:
        for one in opened:
            one.__exit__(None, None, None)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_all_reach_each_other_and_nothing_stays_open() -> None:
    calls(2)
    before = descriptors()
    assert calls(6) == [[]] * 6
    assert descriptors() == before


@pytest.fixture
def closed() -> Iterator[int]:
    """Return a port at which nobody listens, nor will."""
    with hold("127.0.0.1") as held:
        yield port_of(held)


def test_a_door_that_is_closed_a_wrong_one_and_one_without_a_route_are_missed(closed) -> None:
    def spoil(me: int, endpoints: list[Endpoint]) -> list[Endpoint]:
        if me == 3:
            endpoints[0] = replace(endpoints[0], port=closed)
            endpoints[1] = replace(endpoints[1], nonce=b"x" * 16)
            endpoints[2] = replace(endpoints[2], address="255.255.255.255")
        return endpoints

    assert calls(4, spoil, ends_after=6) == [[], [], [], [0, 1, 2]]


def test_who_takes_the_connection_and_says_nothing_or_something_else_is_missed() -> None:
    before = descriptors()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        listening("127.0.0.1") as (listener, endpoint),
        ThreadPoolExecutor(1) as thread,
    ):
        silent.settimeout(scaled(20))
        mute = replace(endpoint, port=silent.getsockname()[1])

        def hear() -> tuple[socket.socket, bytes]:
            connection, _ = silent.accept()
            connection.settimeout(scaled(20))
            return connection, connection.recv(16)

        heard = thread.submit(hear)
        assert Calls(listener, 1, [mute, endpoint]).make([0], [], HOUR_S, heard.done) == [0]
        connection, nonce = heard.result()
        connection.close()
        assert nonce == endpoint.nonce
    assert descriptors() == before


def test_strangers_at_the_door_keep_nobody_out() -> None:
    with listening("127.0.0.1") as (listener, endpoint), listening("127.0.0.1") as (other, second):
        strangers = [socket.create_connection((endpoint.address, endpoint.port)) for _ in range(MAX_CALLS)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * MESSAGE_NBYTES)
        listeners, endpoints = [listener, other], [endpoint, second]

        def make(me: int) -> list[int]:
            return Calls(listeners[me], me, endpoints).make(range(me), range(me + 1, 2), HOUR_S, lambda: False)

        assert together(make, (0, 1)) == [[], []]
        for stranger in strangers:
            stranger.close()


def test_it_ends_when_nobody_is_interested_any_more(caplog) -> None:
    with listening("127.0.0.1") as (listener, endpoint):
        assert Calls(listener, 0, [endpoint, endpoint]).make([], [1], HOUR_S, lambda: True) == []
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        listening("127.0.0.1") as (listener, endpoint),
    ):
        mute = replace(endpoint, port=silent.getsockname()[1])
        assert Calls(listener, 1, [mute, endpoint]).make([0], [0], HOUR_S, iter([False, True]).__next__) == [0]
    gc.collect()
    assert not caplog.records, "what was cut short is no error of asyncio's"


def test_an_address_that_is_not_of_this_machine_is_an_exchange_error() -> None:
    with (
        pytest.raises(ExchangeError, match=r"cannot listen on 192\.0\.2\.1: "),
        listening("192.0.2.1"),
    ):
        pass


def test_a_machine_whose_address_has_changed_is_reached_at_the_new_one(switchboard) -> None:
    members = [switchboard.member(name) for name in NAMES[:2]]
    gone = replace(members[0].join, address="203.0.113.9")
    members[0] = replace(members[0], join=gone, global_address="tcp://127.0.0.1:27400")

    def work(rank: int) -> list[float]:
        assert probe(generation(1, 1), members[rank]) == ()
        group, x = form(generation(1, 1), members[rank]), torch.ones(3)
        group.all_reduce(x).wait()
        group.close()
        return x.tolist()

    assert together(work, range(2)) == [[2.0] * 3] * 2


def test_a_relay_with_a_name_is_reached_though_the_name_has_an_ipv6_address_too(monkeypatch) -> None:
    def greet() -> None:
        with relay.accept()[0] as connection:
            connection.sendall(new_greeting())

    with socket.create_server(("127.0.0.1", 0)) as relay:
        port = relay.getsockname()[1]
        six = socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)
        four = socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [six, four])
        with ThreadPoolExecutor(1) as pool:
            greets = pool.submit(greet)
            asyncio.run(asyncio.wait_for(until_it_greets(f"tcp://gpu.example.org:{port}"), 60))
            greets.result()


def test_members_that_reach_each_other_find_nothing(switchboard) -> None:
    members = [switchboard.member(name, plan(5.0)) for name in NAMES]
    assert together(lambda rank: probe(generation(1, 1, 1, transport="nccl"), members[rank]), range(3)) == [()] * 3
    probe(generation(1), members[0])  # alone there is nothing to do


def test_all_members_find_the_same_broken_pairs(switchboard, closed) -> None:
    """The first one says that it listens where it does not, and that it has reached all that it was to reach."""
    members = [switchboard.member(name, plan(2.0)) for name in NAMES]
    join = members[0].join
    store = ServerStore(members[0].channel, join.worker, join.incarnation, 1, 2.0)
    store.set("endpoint/node0/worker0", json.dumps(["127.0.0.1", closed, "00" * 16]))
    store.set("missed/node0/worker0", "[[], false]")
    errors = together(lambda rank: probe(generation(1, 1, 1, transport="nccl"), members[rank]), (1, 2))
    assert [type(error) for error in errors] == [BrokenLinksError] * 2
    assert [error.broken for error in errors] == [(0, 1, 0, 2)] * 2
    assert str(errors[0]) == (
        Why.UNREACHABLE(pairs="node0/worker0 and node1/worker0, node0/worker0 and node2/worker0", more="")
    )


def test_of_one_that_dies_in_the_probe_nothing_is_said(switchboard, closed) -> None:
    members = [switchboard.member(name, plan(2.0)) for name in NAMES]
    join = members[0].join
    store = ServerStore(members[0].channel, join.worker, join.incarnation, 1, 2.0)
    store.set("endpoint/node0/worker0", json.dumps(["127.0.0.1", closed, "00" * 16]))
    assert together(lambda rank: probe(generation(1, 1, 1, transport="nccl"), members[rank]), (1, 2)) == [()] * 2


def test_one_that_does_not_come_fails_the_round_and_no_link(switchboard) -> None:
    members = [switchboard.member(name, plan(0.5)) for name in NAMES]
    errors = together(lambda rank: probe(generation(1, 1, 1, transport="nccl"), members[rank]), (0, 2))
    assert [type(error) for error in errors] == [ExchangeError] * 2
    assert golden.text("reach.waits_for_address") in str(errors[0])


def test_the_end_of_the_generation_ends_it(switchboard) -> None:
    members = [switchboard.member(name, plan(60.0)) for name in NAMES]
    channel = members[0].channel

    with switchboard.ending(1, "node2/worker0 left", members=2):
        errors = together(lambda rank: probe(generation(1, 1, 1, transport="nccl"), members[rank]), range(2))
    assert str(errors[0]) == golden.text("reasons.generation_over", number=1, worker="node2/worker0") == str(errors[1])
    assert channel.endings.generation_over(1)
