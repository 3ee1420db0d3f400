"""Connections between members that break, and bytes that are changed on the way: transfers go on where they were."""

import itertools
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from lsgd.client.groups import stream_ends
from lsgd.client.groups.handshake import context_of
from lsgd.client.groups.stream import HEADER, Loop, Operation
from lsgd.client.groups.stream_ends import RECORD_NBYTES, STALLED_S, OutgoingStream, _unacknowledged_nbytes
from lsgd.client.groups.tcp_group import TcpGroup

from ..integration.running import until
from ..speed import scaled
from .bench import CERTIFICATE, together
from .meshes import Clock, Network, all_at_once, clock, members
from .test_groups import HOUR_S

__all__ = ["clock"]


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
    meet = threading.Barrier(2, timeout=scaled(30))

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
    meet = threading.Barrier(2, timeout=scaled(20))

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
    meet = threading.Barrier(2, timeout=scaled(30))

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
    loop.thread.join(scaled(20))


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
