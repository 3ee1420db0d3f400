"""Groups over TCP whose transfers take long, stand still or do not begin: who gives up when, and what is said."""

import logging
import re
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from lsgd.client.control.closing import on_error
from lsgd.client.groups import mesh, tcp_group
from lsgd.client.groups.base import INSIDE_PATIENCE
from lsgd.client.groups.tcp_group import RELAYED_PIECES, TcpGroup, relayed_numels
from lsgd.collectives.composed import PIECE_NBYTES
from lsgd.errors import ExchangeError
from tests import golden

from ..integration.running import until
from ..speed import scaled
from .bench import CERTIFICATE
from .meshes import Clock, Network, all_at_once, clock, members

__all__ = ["clock"]


def slow_network(clock: Clock) -> Network:
    """Return a network on which 64 KiB take two seconds."""

    def carry(data: bytes, before: int) -> bytes:
        clock.now += 2.0 * len(data) / (1 << 16)
        time.sleep(0.001)  # so that those who wait look at the clock
        return data

    return Network(carry)


LARGE = torch.arange(8_000_000)
"""Takes 2,000 s on such a network."""


@pytest.mark.parametrize("certificate", [b"", CERTIFICATE], ids=["plain", "tls"])
def test_the_deadline_is_for_silence_and_not_for_work(clock, caplog, certificate) -> None:
    """And what takes long says how far it is."""
    network, begun_at = slow_network(clock), clock.now
    groups, _ = members(2, [certificate] * 2, timeout_s=100.0, routes=network.routes)  # a piece takes 130 s

    def work(group: TcpGroup) -> bool:
        received = torch.zeros_like(LARGE)
        with on_error(lambda: [each.cut() for each in groups]):  # the other one moves no clock alone
            group.exchange(*(({1: LARGE}, {}) if group.rank == 0 else ({}, {0: received})))
        return group.rank == 0 or received.equal(LARGE)

    try:
        with caplog.at_level(logging.INFO, logger="lsgd"):
            assert all_at_once(groups, work) == [True, True]
    finally:
        network.close()
    assert clock.now - begun_at > 2 * 900.0
    said = r"exchange with node0/worker0: [\d.]+ of [\d.]+ MB with node0/worker0 at [\d.]+ Mbit/s, about \d+ s left"
    assert re.search(said, caplog.text)


def test_a_connection_that_is_silent_fails_though_another_moves(clock) -> None:
    network, over = slow_network(clock), threading.Event()
    groups, _ = members(3, [b""] * 3, timeout_s=900.0, routes=network.routes)

    def work(group: TcpGroup) -> str:
        if group.rank == 2:
            return str(over.wait(scaled(30)))
        if group.rank == 1:
            return str(group.exchange({0: LARGE}, {}))
        with pytest.raises(ExchangeError) as raised:
            group.exchange({}, {1: torch.zeros_like(LARGE), 2: torch.zeros(1)})
        over.set()
        groups[1].cut()  # it would dial again until the deadline, and the clock stands
        return str(raised.value)

    said = all_at_once(groups, work)[0]
    network.close()
    assert said.endswith(golden.text("tcp.gave_up_on", worker="node2/worker0"))


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
    waiting, over = threading.Barrier(3, timeout=scaled(20)), threading.Event()

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
    assert first.endswith(golden.text("tcp.gave_up_on", worker="node2/worker0"))
    assert golden.text("tcp.left_group") in other


def test_workers_of_a_single_node_have_the_deadline_among_themselves(clock) -> None:
    groups, _ = members(2, [b""] * 2, timeout_s=900.0, node_sizes=(2,))
    met, over = threading.Barrier(2, timeout=scaled(20)), threading.Event()

    def work(group: TcpGroup) -> str:
        group.all_reduce(torch.ones(1)).wait()
        met.wait()
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
    assert said.endswith(golden.text("tcp.gave_up_on", worker="node0/worker0"))
    assert clock.now - begun_at < INSIDE_PATIENCE * 900.0


def test_a_transfer_that_stands_still_does_not_look_as_if_it_moved(clock) -> None:
    """For the servers, by which a node's workers are freed if the script of the first one hangs."""
    stands, over = threading.Event(), threading.Event()

    def carry(data: bytes, before: int) -> bytes:
        clock.now += 1.0
        if before > 1_000_000:
            stands.set()
            over.wait(scaled(30))
        return data

    network = Network(carry)
    groups, _ = members(3, [b""] * 3, timeout_s=900.0, routes=network.routes, node_sizes=(2, 1))

    def shows() -> str:
        clock.now += 1.0  # it stands, and this member may have come to the transfer only then
        return groups[1].progress()

    def stopped() -> bool:
        clock.now += 900.0
        return not groups[1].progress()

    def work(group: TcpGroup) -> bool:
        if group.rank == 2:
            stands.wait(scaled(30))
            try:
                until(shows, "the transfer shows")
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
        all_at_once(groups, lambda group: group.all_reduce(torch.ones(8_000_000)).wait())  # no buffer holds it
    finally:
        network.close()
    assert re.fullmatch(golden.pattern("tcp.transfer"), shown[0])
    assert [group.progress() for group in groups] == ["", ""]
