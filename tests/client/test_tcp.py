"""Groups over TCP connections of their own, plain and in TLS: every verb, strangers, and what a missing member does."""

import gc
import itertools
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from benchmarks.testbed import Testbed
from lsgd.client.groups import mesh, stream, stream_ends, tcp_group
from lsgd.client.groups.base import INSIDE_PATIENCE
from lsgd.client.groups.handshake import context_of
from lsgd.client.groups.staging import PIECE_NBYTES
from lsgd.client.groups.stream import HEADER, Loop, Operation
from lsgd.client.groups.stream_ends import RECORD_NBYTES, STALLED_S, OutgoingStream, _unacknowledged_nbytes
from lsgd.client.groups.tcp_group import RELAYED_PIECES, TcpGroup, relayed_numels
from lsgd.errors import ExchangeError
from lsgd.protocol.credentials import run_certificate

from ..integration.running import until
from .bench import CERTIFICATE, Switchboard, together
from .meshes import Network, all_at_once, members
from .test_groups import HOUR_S, every_verb
from .test_groups import run as run_over

ROOT = Path(__file__).parents[2]


@pytest.fixture
def switchboard(tmp_path):
    with Switchboard(tmp_path) as made:
        yield made


@pytest.fixture(params=["plain", "tls"])
def run(switchboard, request):
    certificate = CERTIFICATE if request.param == "tls" else b""

    def over_tcp(node_sizes, work, **options):
        return run_over(switchboard, node_sizes, work, transport="tcp", **{"certificate": certificate, **options})

    return over_tcp


def test_groups_whose_members_have_met_need_no_store() -> None:
    groups, store = members(3, [CERTIFICATE] * 3)
    met = threading.Barrier(3, store.clear)  # as a global server that is started again

    def work(group: TcpGroup) -> bool:
        group._mesh.gather()
        met.wait(20)
        return every_verb(group)

    assert all_at_once(groups, work) == [True] * 3


def test_a_group_may_be_ended_twice_while_connections_are_made() -> None:
    for _ in range(20):
        (first, second), _ = members(2, [CERTIFICATE] * 2)
        second._mesh.from_(0)
        first._mesh.to(1)
        for group in (first, second):
            for _ in range(5):
                group.cut()
            group.close()
            assert group._mesh._service._events.is_closed()


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_connection_that_is_reset_before_its_handshake_is_closed(side) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        raw = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()  # resets it
    descriptor = raw.fileno()
    with pytest.raises(ConnectionResetError, match="the other end is gone"):
        context_of(CERTIFICATE, answers=side == "server").wrap_socket(
            raw, server_side=side == "server", do_handshake_on_connect=False
        )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name in ("lsgd-connect", "lsgd-send", "lsgd-receive")}


@pytest.mark.parametrize("node_sizes", [(1,), (2,), (2, 1), (3, 1, 1)])
def test_every_verb_on_the_world_and_its_subgroups(run, node_sizes) -> None:
    def work(group: TcpGroup) -> bool:
        assert isinstance(group, TcpGroup)
        every_verb(group)
        every_verb(group.node)
        if group.across is not None:
            every_verb(group.across)
        return True

    assert run(node_sizes, work) == [True] * sum(node_sizes)
    assert not threads()


def test_a_subset_in_an_order_of_its_own(run) -> None:
    def work(group: TcpGroup) -> float:
        x = torch.tensor([float(group.rank)])
        if group.rank != 1:
            group._subgroup("some", [2, 0], one_node=False).broadcast(x, 0)
        return x.item()

    assert run((2, 1), work) == [2.0, 1.0, 2.0]


def test_a_member_that_never_comes_ends_the_others_in_time(run) -> None:
    errors = run((2, 1), lambda g: g.all_reduce(torch.ones(1)).wait(), missing=[2], timeout_s=1.0)
    assert [type(error) for error in errors] == [ExchangeError] * 2


def test_a_member_that_goes_frees_its_neighbours_at_once(run) -> None:
    def work(group: TcpGroup):
        group.all_reduce(torch.ones(1)).wait()
        if group.rank == 0:
            return None
        with pytest.raises(ExchangeError, match=r"all_reduce: waited .* gave up: .*node0/worker0"):
            group.all_reduce(torch.ones(1)).wait()
        return True

    assert run((2,), work, timeout_s=HOUR_S) == [None, True]


def test_a_peer_that_is_silent_runs_into_the_deadline_and_is_named(run) -> None:
    over = threading.Event()

    def work(group: TcpGroup):
        group.all_reduce(torch.ones(1)).wait()
        group._timeout_s = 1.0  # no longer, now that all have met
        if group.rank == 1:
            over.wait(20)
            return None
        try:
            group.broadcast(torch.ones(100_000), 1)
        except ExchangeError as error:
            return str(error)
        finally:
            over.set()

    told, _ = run((1, 1), work, timeout_s=20.0)
    assert told.startswith("broadcast from node1/worker0: waited 1.")
    assert "node1/worker0 did not do its part in time" in told


def test_a_cut_frees_who_waits_for_a_silent_peer(run) -> None:
    freed = threading.Event()

    def work(group: TcpGroup) -> bool:
        group.all_reduce(torch.ones(3)).wait()
        if group.rank == 1:
            return freed.wait(30)
        threading.Timer(0.2, group.cut).start()
        with pytest.raises(ExchangeError, match=r"all_reduce: waited .* the group was closed"):
            group.all_reduce(torch.ones(3)).wait()
        freed.set()
        return True

    assert run((2,), work, timeout_s=HOUR_S) == [True, True]


def test_groups_listen_on_the_address_they_are_given(run, monkeypatch) -> None:
    """The host name plays no part."""

    def refuse(*_):
        raise AssertionError("a host name was looked up")

    monkeypatch.setattr(socket, "gethostname", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    opened = []
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *a, **kw: opened.append(a[0]) or create(*a, **kw))
    assert run((2,), every_verb) == [True, True]
    assert opened == [("127.0.0.1", 0)] * 2


def test_the_end_of_a_generation_ends_the_wait_for_a_member(switchboard) -> None:
    work = lambda g: g.all_reduce(torch.ones(1)).wait()  # noqa: E731
    with switchboard.ending(1, "node0/worker1 left"):
        (error,) = run_over(switchboard, (2,), work, missing=[1], transport="tcp")
    assert isinstance(error, ExchangeError) and "generation 1 is over: node0/worker1 left" in str(error)


def test_members_at_different_verbs_are_told(run) -> None:
    def work(group: TcpGroup) -> str:
        x = torch.ones(4)
        with pytest.raises(ExchangeError) as raised:
            if group.rank:
                group.broadcast(x, 0)
            else:
                group.exchange({1: x}, {1: x.clone()})
        return str(raised.value)

    first, second = run((2,), work, timeout_s=5.0)
    assert "node0/worker0: it is in a different operation than this member" in second
    assert "node0/worker1" in first


def test_results_have_the_bits_of_gloo(switchboard) -> None:
    """What is only carried, and a sum of two, which has no order; ``nccl`` is Gloo in its place."""

    def work(group) -> list[torch.Tensor]:
        numbers = torch.randn(70_001, generator=torch.Generator().manual_seed(group.rank))
        gathered = [torch.empty_like(numbers) for _ in range(group.size)]
        group.all_gather(gathered, numbers).wait()
        summed, sent = numbers.clone(), numbers.clone()
        group.all_reduce(summed).wait()
        group.broadcast(sent, 1)
        return [*gathered, summed, sent]

    ways = [("nccl", b""), ("tcp", b""), ("tcp", CERTIFICATE)]
    results = [
        run_over(switchboard, (2,), work, transport=transport, certificate=certificate, number=number)
        for number, (transport, certificate) in enumerate(ways, start=1)
    ]
    for result in results[1:]:
        assert not isinstance(result[0], ExchangeError), result
        for ours, gloos in zip(result, results[0], strict=True):
            assert all(a.equal(b) for a, b in zip(ours, gloos, strict=True))


def test_a_sum_is_made_in_the_order_of_ranks_with_the_same_bits_on_all(run) -> None:
    numbers = [torch.randn(40_000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def work(group: TcpGroup) -> list[torch.Tensor]:
        results = [numbers[group.rank].clone(), numbers[group.rank][:9].clone()]
        for x in results:
            group.all_reduce(x).wait()
        return results

    expected = numbers[0] + numbers[1] + numbers[2]
    for large, small in run((2, 1), work):
        assert large.equal(expected) and small.equal(expected[:9])


class Clock:
    """Stands in place of the module ``time``: its time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    for module in (stream, mesh):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(stream, "TURN_S", 0.0005)  # of real time: less than a piece of a tensor takes
    return made


def slow_network(clock: Clock) -> Network:
    """Return a network on which 64 KiB take two seconds."""

    def carry(data: bytes, before: int) -> bytes:
        clock.now += 2.0 * len(data) / (1 << 16)
        time.sleep(0.001)  # so that those who wait look at the clock
        return data

    return Network(carry)


LARGE = torch.arange(8_000_000)
"""Takes 2,000 s on such a network."""


def test_the_deadline_is_for_silence_and_not_for_work(clock, caplog) -> None:
    """And what takes long says how far it is."""
    network, begun_at = slow_network(clock), clock.now
    groups, _ = members(2, [b""] * 2, timeout_s=900.0, routes=network.routes)

    def work(group: TcpGroup) -> bool:
        received = torch.zeros_like(LARGE)
        group.exchange(*(({1: LARGE}, {}) if group.rank == 0 else ({}, {0: received})))
        return group.rank == 0 or received.equal(LARGE)

    with caplog.at_level(logging.INFO, logger="lsgd"):
        assert all_at_once(groups, work) == [True, True]
    network.close()
    assert clock.now - begun_at > 2 * 900.0
    said = r"exchange with node0/worker0: [\d.]+ of [\d.]+ MB with node0/worker0 at [\d.]+ Mbit/s, about \d+ s left"
    assert re.search(said, caplog.text)


def test_a_connection_that_is_silent_fails_though_another_moves(clock) -> None:
    network, over = slow_network(clock), threading.Event()
    groups, _ = members(3, [b""] * 3, timeout_s=900.0, routes=network.routes)

    def work(group: TcpGroup) -> str:
        if group.rank == 2:
            return str(over.wait(30))
        if group.rank == 1:
            return str(group.exchange({0: LARGE}, {}))
        with pytest.raises(ExchangeError) as raised:
            group.exchange({}, {1: torch.zeros_like(LARGE), 2: torch.zeros(1)})
        over.set()
        groups[1].cut()  # it would dial again until the deadline, and the clock stands
        return str(raised.value)

    said = all_at_once(groups, work)[0]
    network.close()
    assert said.endswith("gave up: node2/worker0 did not do its part in time")


def test_a_nodes_other_workers_wait_as_long_as_the_first_one_exchanges_with_other_nodes(clock) -> None:
    network, begun_at = slow_network(clock), clock.now
    groups, _ = members(3, [b""] * 3, timeout_s=900.0, routes=network.routes, node_sizes=(2, 1))

    def work(group: TcpGroup) -> bool:
        x = LARGE if group.rank == 2 else torch.zeros_like(LARGE)
        if group.across is not None:
            group.across.broadcast(x, 1)
        sample = x[:9].clone()
        try:
            group.node.broadcast(sample, 0)
        except ExchangeError:
            for each in groups:
                each.cut()  # it would dial again until the deadline, and the clock stands
            raise
        return sample.equal(LARGE[:9])

    assert all_at_once(groups, work) == [True] * 3
    network.close()
    assert clock.now - begun_at > 2 * 900.0


def test_a_nodes_other_workers_are_free_as_soon_as_the_first_one_gives_up(clock) -> None:
    groups, _ = members(3, [b""] * 3, timeout_s=900.0, node_sizes=(2, 1))
    waiting, over = threading.Barrier(3, timeout=20), threading.Event()

    def work(group: TcpGroup) -> str:
        group.all_reduce(torch.ones(1)).wait()
        waiting.wait()
        if group.rank == 2:
            while not over.wait(0.001):
                clock.now += 10.0
            return ""
        with pytest.raises(ExchangeError) as raised:
            (group.across or group.node).broadcast(torch.zeros(3), 1 if group.rank == 0 else 0)
        if group.rank == 1:
            over.set()
        return str(raised.value)

    first, other, _ = all_at_once(groups, work)
    assert first.endswith("gave up: node2/worker0 did not do its part in time")
    assert "gave up: node0/worker0: it has left the group" in other


def test_workers_of_a_single_node_have_the_deadline_among_themselves(clock) -> None:
    groups, _ = members(2, [b""] * 2, timeout_s=900.0, node_sizes=(2,))
    over = threading.Event()

    def work(group: TcpGroup) -> str:
        group.all_reduce(torch.ones(1)).wait()
        if group.rank == 0:
            while not over.wait(0.001):
                clock.now += 10.0
            return ""
        with pytest.raises(ExchangeError) as raised:
            group.node.broadcast(torch.zeros(3), 0)
        over.set()
        return str(raised.value)

    begun_at = clock.now
    _, said = all_at_once(groups, work)
    assert said.endswith("gave up: node0/worker0 did not do its part in time")
    assert clock.now - begun_at < INSIDE_PATIENCE * 900.0


def test_a_transfer_that_stands_still_does_not_look_as_if_it_moved(clock) -> None:
    """For the servers, by which a node's workers are freed if the script of the first one hangs."""
    stands, over = threading.Event(), threading.Event()

    def carry(data: bytes, before: int) -> bytes:
        clock.now += 1.0
        if before > 1_000_000:
            stands.set()
            over.wait(30)
        return data

    network = Network(carry)
    groups, _ = members(3, [b""] * 3, timeout_s=900.0, routes=network.routes, node_sizes=(2, 1))

    def stopped() -> bool:
        clock.now += 900.0
        return not groups[1].progress()

    def work(group: TcpGroup) -> bool:
        if group.rank == 2:
            stands.wait(30)
            try:
                until(groups[1].progress, "the transfer shows")
                until(stopped, "it shows no longer")
            finally:
                over.set()
            return True
        x = LARGE.clone() if group.rank == 0 else torch.zeros_like(LARGE)
        group.node.broadcast(x, 0)
        return x.equal(LARGE)

    assert all_at_once(groups, work) == [True] * 3
    network.close()


def longest_silence(nbytes: Sequence[int], rates: Sequence[float]) -> float:
    """Return how long any member of a broadcast hears nothing, in these pieces over links of these rates.

    All links work at once. A piece leaves a member when it is there, and the one before it has left.
    """
    longest, there = 0.0, [0.0] * len(nbytes)
    for rate in rates:
        heard = 0.0
        for index, length in enumerate(nbytes):
            begins = max(there[index], heard)
            longest, heard = max(longest, begins - heard), begins + length / rate
            there[index] = heard
    return longest


@pytest.mark.parametrize("nbytes", [200_000, 30_000_000, 1_000_000_000, 20_000_000_000])
@pytest.mark.parametrize("size", [3, 4, 7, 32, 66])
def test_no_member_of_a_broadcast_is_silent_for_longer_than_a_piece_takes(size, nbytes) -> None:
    numels = relayed_numels(nbytes // 4, 4, size)
    assert sum(numels) == nbytes // 4 and 0 < min(numels)
    assert len(numels) <= 8 * size + nbytes // PIECE_NBYTES + size
    pieces = [4 * numel for numel in numels]
    assert longest_silence(pieces, [1.0] * (size - 1)) <= PIECE_NBYTES
    for slow in {0, size // 2 - 1, size - 2}:
        rates = [1.0 if link == slow else 1e6 for link in range(size - 1)]
        assert longest_silence(pieces, rates) <= PIECE_NBYTES * 1.001


def test_the_last_member_of_a_broadcast_hears_of_it_before_the_first_has_much(monkeypatch) -> None:
    piece = 1 << 18
    monkeypatch.setattr(tcp_group, "PIECE_NBYTES", piece)
    moved = threading.Condition()

    def first(data: bytes, before: int) -> bytes:
        with moved:
            assert moved.wait_for(lambda: before - last.carried_nbytes <= 2 * piece, 20), "the last one hears nothing"
        return data

    def others(data: bytes, before: int) -> bytes:
        with moved:
            moved.notify_all()
        return data

    networks = [Network(first), Network(others), Network()]
    last = networks[1]
    sent = torch.arange(2_000_000)
    assert sent.nbytes / (3 * RELAYED_PIECES) > 2.2 * piece
    groups, _ = members(3, [b""] * 3, routes=lambda me, endpoint_of: networks[me].routes(me, endpoint_of))

    def work(group: TcpGroup) -> bool:
        x = sent.clone() if group.rank == 0 else torch.zeros_like(sent)
        group.broadcast(x, 0)
        return x.equal(sent)

    assert all_at_once(groups, work) == [True] * 3
    for network in networks:
        network.close()


# -- connections that break -------------------------------------------------------------------------------------


def exchange_over(network: Network, certificate: bytes) -> list[bool]:
    """Exchange 16 MB each way in two messages."""
    groups, _ = members(2, [certificate] * 2, routes=network.routes)

    def work(group: TcpGroup) -> bool:
        other = 1 - group.rank
        inputs = [torch.arange(count) + 100 * group.rank + count for count in (300_000, 1_700_000)]
        outputs = [torch.zeros_like(x) for x in inputs]
        begun = [group._begin_exchange({other: x}, {other: y}) for x, y in zip(inputs, outputs, strict=True)]
        begun.reverse()  # what was waited for is the owner's again, and what the network holds of it is lost
        for transfer in begun:
            transfer.wait()
        differences = [(y - x).unique().tolist() for x, y in zip(inputs, outputs, strict=True)]
        return differences == [[100 * (other - group.rank)]] * 2

    try:
        return all_at_once(groups, work)
    finally:
        network.close()


@pytest.mark.parametrize("certificate", [b"", CERTIFICATE], ids=["plain", "tls"])
def test_a_connection_that_breaks_goes_on_where_it_was(certificate) -> None:
    at_nbytes, one = [1_000_000, 5_000_000, 12_000_000], threading.Lock()  # before either has all: then nothing is kept

    def carry(data: bytes, before: int) -> bytes:
        with one:
            if at_nbytes and before > at_nbytes[0]:
                del at_nbytes[0]
                network.break_all()
        return data

    network = Network(carry)
    assert exchange_over(network, certificate) == [True, True]
    assert network.breaks == 3 + 1


def test_a_byte_that_is_changed_on_the_way_is_found_and_sent_again() -> None:
    changed = []

    def spoil(data: bytes, before: int) -> bytes:
        if before > 5_000_000 and not changed:
            changed.append(before)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    network = Network(spoil)
    assert exchange_over(network, CERTIFICATE) == [True, True]
    assert changed


def test_how_far_a_transfer_is_can_be_asked_from_another_thread(monkeypatch) -> None:
    monkeypatch.setattr(mesh, "SHOWN_AFTER_S", 0.0)
    shown: list[str] = []

    def carry(data: bytes, before: int) -> bytes:
        if 1_000_000 < before < 4_000_000:
            shown.extend(filter(None, [group.progress() for group in groups]))
        return data

    network = Network(carry)
    groups, _ = members(2, [b""] * 2, routes=network.routes)
    try:
        all_at_once(groups, lambda group: group.all_reduce(torch.ones(2_000_000)).wait())
    finally:
        network.close()
    assert re.fullmatch(r"[\d.]+ of [\d.]+ MB with node\d/worker\d at [\d.]+ Mbit/s(, about \d+ s left)?", shown[0])
    assert [group.progress() for group in groups] == ["", ""]


def summed(group: TcpGroup) -> float:
    x = torch.tensor([1.0 + group.rank])
    group.all_reduce(x).wait()
    return x.item()


@pytest.mark.parametrize("piece", range(10))
def test_a_byte_of_a_handshake_that_is_changed_on_the_way_is_no_end(piece) -> None:
    pieces = itertools.count()

    def spoil(data: bytes, before: int) -> bytes:
        at = len(data) // 2
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if next(pieces) == piece else data

    network = Network(spoil)
    groups, _ = members(2, [CERTIFICATE] * 2, routes=network.routes)
    meet = threading.Barrier(2, timeout=30)

    def work(group: TcpGroup) -> float:
        total = summed(group)
        meet.wait()  # if one connection is made long before the other, the byte is of the tensor, which is sent again
        return total

    try:
        assert all_at_once(groups, work) == [3.0, 3.0]
    finally:
        network.close()


def test_a_connection_that_breaks_between_two_messages_is_made_anew() -> None:
    network = Network()
    groups, _ = members(2, [CERTIFICATE] * 2, routes=network.routes)
    meet = threading.Barrier(2, timeout=20)

    def work(group: TcpGroup) -> float:
        x = torch.ones(3)
        for _ in range(4):
            group.all_reduce(x).wait()
            if meet.wait() == 0:
                network.break_all()
            meet.wait()
        return x[0].item()

    assert all_at_once(groups, work) == [16.0, 16.0]
    network.close()


def test_a_connection_that_nobody_waits_for_is_tried_again_as_long_as_it_takes(clock) -> None:
    network = Network()
    groups, _ = members(2, [b""] * 2, timeout_s=900.0, routes=network.routes)
    meet = threading.Barrier(2, timeout=30)

    def away() -> None:
        network.down = True
        network.break_all()
        until(lambda: network.closed, "a member dials in vain")
        clock.now += 1000.0
        before = network.closed
        until(lambda: network.closed > before + 4, "they go on trying")
        network.down = False

    def work(group: TcpGroup) -> float:
        summed(group)
        try:
            if meet.wait() == 0:
                away()
        finally:
            meet.wait()
        return summed(group)

    try:
        assert all_at_once(groups, work) == [3.0, 3.0]
    finally:
        network.close()


class Pair:
    """A TCP connection on this machine; with a certificate, the sender's end is in TLS."""

    def __init__(self, certificate: bytes = b"") -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            self.sender = socket.create_connection(listener.getsockname())
            self.sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
            self.receiver, _ = listener.accept()
        if certificate:

            def shake(answers: int) -> socket.socket:
                end = self.receiver if answers else self.sender
                return context_of(certificate, answers=bool(answers)).wrap_socket(end, server_side=bool(answers))

            self.sender, receiver = together(shake, [False, True])
            self.receiver = socket.socket(fileno=receiver.detach())
        self.sender.setblocking(False)

    def read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes and (more := self.receiver.recv(nbytes - len(data))):
            data += more
        return data


@pytest.fixture
def loop() -> Iterator[Loop]:
    """The thread of a stream that sends."""
    loop = Loop("lsgd-send")
    yield loop
    loop.end()
    loop.thread.join(20)


def send(line: OutgoingStream, data: bytearray) -> Operation:
    """Put a message on a stream, and return its operation when the system has all of it."""
    work = Operation()
    work.start([(line, memoryview(data))], "exchange")
    work.wait(HOUR_S * 1e6)
    return work


def test_what_has_not_arrived_is_kept_when_the_tensor_is_used_again(loop) -> None:
    lost: Future[None] = Future()
    line = OutgoingStream("node1/worker0", loop, lambda: lost.set_result(None))
    first, second = Pair(), Pair()
    data = bytearray(os.urandom(1_000_000))
    expected = HEADER.pack(len(data), zlib.crc32(b"exchange")) + data
    line.connect(first.sender, 0)
    send(line, data).release()
    data[:] = bytes(len(data))
    got = first.read(5000)
    first.receiver.setblocking(False)
    while True:
        try:
            got += first.receiver.recv(1 << 20)
        except BlockingIOError:
            break
    first.receiver.close()
    lost.result(20)
    line.connect(second.sender, len(got))
    assert got + second.read(len(expected) - len(got)) == expected
    line.close()
    second.receiver.close()


def test_the_start_of_a_record_is_kept_too(loop, monkeypatch) -> None:
    """With TLS the receiver's system has it, but nobody can read it."""
    lost: Future[None] = Future()
    line = OutgoingStream("node1/worker0", loop, lambda: lost.set_result(None))
    first, second = Pair(CERTIFICATE), Pair()
    data = bytearray(os.urandom(1_000_000))
    line.connect(first.sender, 0)
    work = send(line, data)
    more = 5 + 1 + 16  # of each record: its header, kind and tag
    read = HEADER.size + 3 * RECORD_NBYTES
    acknowledged = read + 4 * more + RECORD_NBYTES - 100
    sent = HEADER.size + len(data) + (1 + -(-len(data) // RECORD_NBYTES)) * more
    monkeypatch.setattr(stream_ends, "_unacknowledged_nbytes", lambda connection: sent - acknowledged)
    work.release()
    first.receiver.close()
    lost.result(20)
    line.connect(second.sender, read)
    assert second.read(len(data) - 3 * RECORD_NBYTES) == data[3 * RECORD_NBYTES :]
    line.close()
    second.receiver.close()


def test_what_had_arrived_when_the_connection_broke_is_not_kept(loop) -> None:
    lost: Future[None] = Future()
    line, pair = OutgoingStream("node1/worker0", loop, lambda: lost.set_result(None)), Pair()
    line.connect(pair.sender, 0)
    works = [send(line, bytearray(1000)) for _ in range(3)]
    pair.read(3 * (HEADER.size + 1000))
    until(lambda: not _unacknowledged_nbytes(pair.sender), "all is acknowledged")
    pair.receiver.close()
    lost.result(20)
    for work in works:
        work.release()
    assert not line._kept
    line.close()


class Unanswered(socket.socket):
    """A socket with a packet that nobody acknowledges."""

    def getsockopt(self, *_: int) -> bytes:
        return b"\1" * 100


def test_a_new_connection_is_not_given_up_for_what_the_last_one_did(loop, monkeypatch) -> None:
    clock, lost = Clock(), []
    monkeypatch.setattr(stream_ends, "time", clock)
    monkeypatch.setattr(stream_ends, "_unacknowledged_nbytes", lambda connection: 7)
    line = OutgoingStream("node1/worker0", loop, lambda: lost.append(clock.now))
    pairs = Pair(), Pair()
    for pair in pairs:
        line.connect(Unanswered(fileno=pair.sender.detach()), 0)
        line.watch()
        clock.now += STALLED_S - 1.0
    line.watch()
    assert not lost
    clock.now += 2.0
    line.watch()
    assert len(lost) == 1
    for pair in pairs:
        pair.receiver.close()


def test_a_member_with_another_certificate_is_told_at_once() -> None:
    groups, _ = members(2, [CERTIFICATE, run_certificate(b"x" * 32, "run")], timeout_s=HOUR_S)
    errors = all_at_once(groups, lambda group: group.all_reduce(torch.ones(1)).wait())
    assert all(isinstance(error, ExchangeError) and "no connection with node" in str(error) for error in errors)
    assert any("certificate" in str(error) for error in errors)


def test_what_is_done_leaves_no_memory_to_the_garbage_collector() -> None:
    groups, _ = members(2, [CERTIFICATE] * 2)

    def work(group: TcpGroup) -> None:
        for _ in range(30):
            group.all_reduce(torch.ones(40_000)).wait()

    gc.collect()
    gc.disable()
    try:
        assert all_at_once(groups, work) == [None] * 2
        # The last ones may be in the hands of the groups' threads; if any were kept, so were all 60 and more.
        assert sum(type(thing) is Operation for thing in gc.get_objects()) < 40
    finally:
        gc.enable()


def test_forty_generations_leave_no_thread_and_no_descriptor(run) -> None:
    run((2,), every_verb)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        groups, _ = members(3, [CERTIFICATE] * 3)
        assert all_at_once(groups, lambda group: group.all_reduce(torch.ones(1)).wait()) == [None] * 3
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not threads()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_who_sits_on_the_way_reads_nothing_of_what_is_encrypted(kind) -> None:
    """And finds the pattern where it is not, so that the capture is one."""
    pattern = bytes(range(100, 164)).hex()
    with Testbed(2) as testbed:
        first, second = testbed.hosts
        python = {"cwd": ROOT, "text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        capture = second.popen([sys.executable, "-m", "tests.client.capture", pattern], **python)
        assert capture.stdout.readline() == "ready\n"
        member = [sys.executable, "-m", "tests.client._tcp_member"]
        processes = [
            host.popen([*member, str(host.index), first.address, host.address, kind, pattern], **python)
            for host in testbed.hosts
        ]
        assert [process.wait(60) for process in processes] == [0, 0]
        nbytes, found = json.loads(capture.communicate()[0])
    assert nbytes > 2 * 4_000_000
    assert (found > 50) if kind == "plain" else (found == 0)
