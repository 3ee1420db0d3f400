"""What standbys get: whatever the journal gets, before answers leave, and never more than they take."""

import json
import random
from typing import Any

import pytest

from lsgd.errors import ProtocolError
from lsgd.protocol.messages import PROTOCOL, Copy, Endpoint, NodeHello
from lsgd.server import standbys as module
from lsgd.server.copies import HeldCopy
from lsgd.server.journal import capture
from lsgd.server.standbys import LOST_AFTER_S, MAX_ROUNDS, TOO_LONG, Standbys
from lsgd.server.tenure import Access

from .helpers import Bench, started

KEYS = {"node0": b"0" * 32, "node1": b"1" * 32, "node2": b"2" * 32}


class Copied:
    """A server's standbys, and the nodes that hold copies."""

    def __init__(self, bench: Bench, nodes: int = 3, keys: dict[str, bytes] | None = None) -> None:
        self.bench, self.keys = bench, keys
        self.standbys = Standbys(Endpoint(0, "tcp://10.0.0.1:1"), None if keys is None else lambda: self.keys or {})
        self.held = {f"node{node}".encode(): HeldCopy() for node in range(1, nodes + 1)}
        self.sent: list[tuple[bytes, Copy]] = []
        for node in range(1, nodes + 1):
            self.greet(node)

    @property
    def now(self) -> float:
        return self.bench.now

    def captured(self) -> dict[str, Any]:
        return capture(self.bench.state, self.now)

    def greet(self, node: int, copied: int | None = None, incarnation: int = 1, place: str | None = None) -> None:
        peer = f"node{node}".encode()
        number = self.held[peer].copied if copied is None else copied
        where = f"tcp://10.0.0.{node + 1}:1" if place is None else place
        hello = NodeHello(PROTOCOL, node, incarnation, "host", "0", 1, where, number)
        self.standbys.greet(peer, hello, self.now)

    def turn(self, *lost: bytes) -> list[bytes]:
        """Let a turn pass, in which copies for some are lost; return who got one."""
        self.sent = list(self.standbys.copies(self.bench.state, self.now, self.captured))
        for peer, copy in self.sent:
            if peer not in lost:
                self.held[peer].store(copy)
        return [peer for peer, _ in self.sent]

    def passes(self, seconds: float) -> None:
        """Let time pass, with greetings of all."""
        for _ in range(round(seconds)):
            self.bench.now += 1.0
            for peer in self.held:
                self.greet(int(peer[4:]))

    def is_whole(self, peer: bytes) -> bool:
        state, rounds = self.held[peer].load()
        now = json.loads(json.dumps(capture(self.bench.state, self.now)))
        return state | {"elapsed_s": 0} == now | {"elapsed_s": 0} and rounds == list(self.bench.book.elections)


def rounds(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.ask_all("00", "10")
        bench.complete_all("00", "10")


def test_two_nodes_get_each_change_at_once_and_no_other_node_does() -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench)
    assert copied.turn() == [b"node1", b"node2"]
    assert copied.turn() == []
    for _ in range(5):
        rounds(bench, 2)
        assert copied.turn() == [b"node1", b"node2"]
        assert copied.is_whole(b"node1") and copied.is_whole(b"node2")
    assert [place.node for place in copied.standbys.places(bench.state, copied.now)] == [0, 1, 2]
    assert copied.held[b"node3"].number == 0
    with pytest.raises(ProtocolError, match="is damaged"):
        copied.held[b"node3"].load()


def test_counts_alone_are_sent_once_a_second() -> None:
    bench = started("00", "10", period=100)
    copied = Copied(bench, 1)
    copied.turn()
    bench.ask("00")
    assert copied.turn() == []
    copied.passes(2)
    assert copied.turn() == [b"node1"]
    assert copied.is_whole(b"node1")


def test_a_node_that_others_cannot_dial_and_one_that_is_silent_come_last() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.state.links.ways.found([0, 1, 2, 3], [3, 1])
    copied = Copied(bench)
    assert copied.turn() == [b"node2", b"node3"]
    bench.now += 10.0
    copied.greet(1)
    rounds(bench, 1)
    assert copied.turn() == [b"node1"]
    copied.greet(1, place="")
    bench.now += 1.0
    assert [place.node for place in copied.standbys.places(bench.state, copied.now)] == [0]


def test_a_standby_of_another_process_gets_all_again() -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench, 1)
    rounds(bench, 3)
    copied.turn()
    copied.held[b"node1"] = HeldCopy()
    copied.greet(1, incarnation=2)
    bench.now += 1.0
    assert copied.turn() == [b"node1"] and copied.is_whole(b"node1")


def test_what_is_lost_on_the_way_is_sent_again_as_a_whole() -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench, 1)
    copied.turn()
    copied.greet(1)
    rounds(bench, 1)
    copied.turn(b"node1")
    assert not copied.is_whole(b"node1")
    copied.passes(LOST_AFTER_S + 2)
    assert copied.turn() == [b"node1"] and copied.is_whole(b"node1")


def test_a_copy_after_one_that_was_lost_has_the_state_and_the_rounds_follow() -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench, 1)
    rounds(bench, 1)
    copied.turn()
    rounds(bench, 1)
    copied.turn(b"node1")
    rounds(bench, 1)
    copied.turn()
    state, known = copied.held[b"node1"].load()
    assert state["count"] == bench.state.ledger.count and len(known) < len(bench.book.elections)
    assert copied.turn() == []
    copied.greet(1)
    assert copied.turn(b"node1") == [b"node1"]
    copied.greet(1)
    assert copied.turn() == [b"node1"] and copied.is_whole(b"node1")


def test_a_server_that_gives_up_leaves_all_it_knows() -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench, 1)
    rounds(bench, 2)
    copied.held[b"node1"].store(copied.standbys.whole(bench.state, copied.now, copied.captured))
    assert copied.is_whole(b"node1")


def test_a_connection_that_accepts_nothing_is_left_alone_until_the_node_greets() -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench, 2)
    assert copied.turn(b"node1") == [b"node1", b"node2"]
    copied.standbys.failed(b"node1")
    rounds(bench, 1)
    assert copied.turn() == [b"node2"]
    copied.greet(1)
    assert copied.turn() == [b"node1"] and copied.is_whole(b"node1")


def test_a_slow_standby_gets_nothing_until_it_says_what_has_arrived(monkeypatch) -> None:
    bench = started("00", "10", period=1, local_period=1)
    monkeypatch.setattr(module, "MAX_BEHIND_NBYTES", 3000)
    copied = Copied(bench, 1)
    turns = 0
    while copied.turn():
        rounds(bench, 1)
        turns += 1
    assert 1 < turns < 10
    copied.greet(1)
    assert copied.turn() == [b"node1"] and copied.is_whole(b"node1")


def test_many_rounds_come_in_several_copies_of_one_state() -> None:
    bench = started("00", "10", period=1, local_period=1, iterations=10_000)
    rounds(bench, 2 * MAX_ROUNDS)
    copied = Copied(bench, 1)
    assert [len(copied.turn()) for _ in range(4)] == [1, 1, 1, 0]
    assert copied.is_whole(b"node1")


def test_a_state_that_is_too_long_is_not_sent_and_that_is_said(monkeypatch) -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench, 1)
    monkeypatch.setattr(module, "MAX_STATE_NBYTES", 10)
    for _ in range(2):
        assert copied.turn() == [] and copied.standbys.trouble == TOO_LONG
    monkeypatch.undo()
    rounds(bench, 1)
    assert copied.turn() == [b"node1"] and copied.standbys.trouble == ""


def test_with_keys_only_nodes_in_the_list_are_standbys_and_a_new_list_is_sent() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.state.tenure.access = Access(b"PEM")
    copied = Copied(bench, 3, KEYS)
    assert copied.turn() == [b"node1", b"node2"]
    assert copied.held[b"node1"].allowed == KEYS and copied.held[b"node1"].certificate == b"PEM"
    assert copied.standbys.places(bench.state, copied.now)[2] == Endpoint(2, "tcp://10.0.0.3:1", KEYS["node2"])
    copied.keys = {**KEYS, "operator": b"3" * 32}
    copied.greet(1)
    copied.turn()
    assert copied.held[b"node1"].allowed == copied.keys


def test_damaged_copies_are_refused() -> None:
    bench = started("00", "10", period=1, local_period=1)
    copied = Copied(bench, 1)
    copied.turn()
    ((_, copy),) = copied.sent
    rng = random.Random(0)

    def damaged(packed: bytes) -> bytes:
        at = rng.randrange(len(packed))
        return packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]

    refused = 0
    for _ in range(100):
        held = HeldCopy()
        values: dict[str, Any] = {"certificate": copy.certificate, "allowed": copy.allowed}
        try:
            held.store(Copy(copy.run, copy.number, damaged(copy.state), copy.after, damaged(copy.rounds), **values))
            held.load()
        except ProtocolError:
            refused += 1
    assert refused > 90
