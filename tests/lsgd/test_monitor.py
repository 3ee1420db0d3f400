"""Strangers at the door of a listener: many of them, and what they can do to those who are in."""

import contextlib
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lsgd.protocol import gate, sockets
from lsgd.protocol.gate import max_strangers
from lsgd.protocol.keys import KeyRing, parse_token
from lsgd.protocol.messages import Heartbeat, encode
from lsgd.protocol.processes import raise_descriptor_limit
from lsgd.protocol.sockets import Connector, ConnectorKeys, Listener, new_key_pair, wait_for
from tests import golden

from ..integration.running import until
from ..speed import scaled

FLOOD = 3000
WITHOUT_KEY = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
FRAME = encode(Heartbeat("node0/worker0", 7))


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing.make(tmp_path / "keys", ["node1"])


@pytest.fixture
def listener(ring: KeyRing) -> Iterator[Listener]:
    with Listener("tcp://127.0.0.1:0", ring) as made:
        yield made


@pytest.fixture
def link(listener: Listener, ring: KeyRing) -> Iterator[Connector]:
    with Connector(listener.address, b"node1#1", parse_token(ring.token("node1"), "the token")) as made:
        yield made


def place(listener: Listener) -> tuple[str, int]:
    return "127.0.0.1", int(listener.address.rpartition(":")[2])


def exchange(listener: Listener, link: Connector) -> Callable[[], bool]:
    """Return what says a word each way, and whether both have arrived."""

    def once() -> bool:
        link.send([FRAME])
        wait_for(0.05, listener)
        heard = [peer for peer, frames in listener.receive() if frames]
        for peer in heard:
            listener.send(peer, [FRAME])
        wait_for(0.05 if heard else 0, link)
        return bool(list(link.receive())) and bool(heard)

    return once


@pytest.mark.parametrize("secured", [True, False])
def test_a_peer_whose_connection_closes_is_named_once_it_makes_no_other(secured, ring) -> None:
    keys = parse_token(ring.token("node1"), "the token") if secured else None
    with (
        Listener("tcp://127.0.0.1:0", ring if secured else None) as listener,
        Connector(listener.address, b"node1#1", keys) as here,
    ):
        with Connector(listener.address, b"node1#2", keys) as gone:
            both = [exchange(listener, link) for link in (here, gone)]
            until(
                lambda: all([once() for once in both]) and listener._monitor and not listener._monitor.strangers,
                "both are known",
            )
            assert listener.closed() == []
        closed: list[bytes] = []

        def is_seen() -> bool:
            list(listener.receive())
            closed.extend(listener.closed())
            return bool(closed)

        until(is_seen, "its end is seen")
        assert closed == [b"node1#2"] and listener.closed() == []


def test_a_listener_on_this_machine_names_nobody(tmp_path) -> None:
    with Listener(f"ipc://{tmp_path}/socket") as listener:
        assert listener.closed() == []


def flood(listener: Listener, count: int) -> threading.Thread:
    """Connect and be refused so many times."""

    def run() -> None:
        for _ in range(count):
            with contextlib.suppress(OSError), socket.create_connection(place(listener), timeout=5) as one:
                one.sendall(WITHOUT_KEY)
                while one.recv(4096):
                    pass  # until the listener hangs up

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_thousands_of_refused_connections_do_not_disturb_who_is_in(listener, link) -> None:
    once = exchange(listener, link)
    until(once, "the peer is in")
    strangers = flood(listener, FLOOD)
    exchanges = 0

    def over() -> bool:
        nonlocal exchanges
        exchanges += once()
        return not strangers.is_alive()

    until(over, "all are refused")
    said = exchanges
    until(lambda: over() and exchanges > said, "the peer is served after them")
    assert f"{FLOOD} connections refused: " in "".join(listener.refusals())


def test_reports_that_nobody_takes_do_not_block_the_socket(listener, link) -> None:
    once = exchange(listener, link)
    until(once, "the peer is in")
    strangers = flood(listener, FLOOD)
    strangers.join(scaled(60))
    assert not strangers.is_alive()
    until(once, "the peer is served")


def test_a_link_that_is_refused_for_ever_takes_its_reports_when_it_receives(listener) -> None:
    keys = ConnectorKeys("node1", new_key_pair()[0], *new_key_pair())  # another server's
    with Connector(listener.address, b"node1#2", keys) as link:

        def refused() -> bool:
            list(listener.receive())
            list(link.receive())
            return link._monitor is not None and link._monitor.refused >= 3

        until(refused, "it tries again and again, and hears of each refusal")
        assert golden.text("keys.other_key") in link.trouble()


@pytest.mark.parametrize("secured", [True, False])
def test_a_listener_that_says_nothing_has_refused_nobody(secured, ring, monkeypatch) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKE_MS", 200)
    keys = parse_token(ring.token("node1"), "the token") if secured else None
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"tcp://127.0.0.1:{frozen.getsockname()[1]}"
        with Connector(address, b"node1#3", keys) as link:

            def given_up() -> bool:
                list(link.receive())
                assert link.trouble() == ""
                return link._monitor is not None and link._monitor.refused >= 2

            until(given_up, "two handshakes are over time")


class TestTooManyStrangers:
    @pytest.fixture(autouse=True)
    def _few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gate, "MAX_STRANGERS", 10)

    @pytest.mark.parametrize("secured", [True, False])
    def test_the_oldest_are_cut_and_who_has_spoken_is_not(self, secured, ring, monkeypatch) -> None:
        monkeypatch.setattr(sockets, "_HANDSHAKE_MS", 120_000)  # no handshake is over time meanwhile
        keys = parse_token(ring.token("node1"), "the token") if secured else None
        with (
            Listener("tcp://127.0.0.1:0", ring if secured else None) as listener,
            Connector(listener.address, b"node1#1", keys) as link,
            contextlib.ExitStack() as stack,
        ):
            once = exchange(listener, link)
            until(lambda: once() and listener._monitor and not listener._monitor.strangers, "it is known")
            idle = [stack.enter_context(socket.create_connection(place(listener))) for _ in range(25)]
            for stranger in idle:
                stranger.settimeout(0)

            def closed(stranger: socket.socket) -> bool:
                try:
                    while stranger.recv(4096):
                        pass
                except BlockingIOError:
                    return False
                except ConnectionError:
                    pass
                return True

            served = 0

            def cut() -> bool:
                nonlocal served
                served += once()
                return all(map(closed, idle[:15]))

            until(cut, "the oldest are cut")
            assert not any(map(closed, idle[15:]))
            assert golden.text("keys.connections_cut") in "".join(listener.refusals())
            link_monitor = link._monitor
            assert link_monitor is not None and link_monitor.refused == 0


def test_strangers_hold_half_of_the_descriptors_at_most() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert max_strangers() == 300
        assert raise_descriptor_limit() == min(hard, 1 << 20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)
        assert max_strangers() == 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
