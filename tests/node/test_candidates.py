"""Where else a run may be served: whom a node looks for, under which key, and what it remembers when it comes back."""

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from lsgd.node.candidates import LOOK_AFTER_S, Candidates, Knock, dial
from lsgd.protocol.messages import PROTOCOL, Endpoint, NodeHello, NodeWelcome, Term, encode
from lsgd.protocol.sockets import ConnectorKeys, new_key_pair
from lsgd.run_folder import claimed, find_live, followed, known, moved

from ..integration.running import free_port, until

HOME = Endpoint(0, "tcp://10.0.0.1:1", b"server")
FIRST, SECOND = Endpoint(0, "tcp://10.0.0.1:1", b"node0"), Endpoint(1, "tcp://10.0.0.2:1", b"node1")
THIRD = Endpoint(2, "tcp://10.0.0.3:1", b"node2")
HELLO = NodeHello(PROTOCOL, 2, 1, "host", "0", looks=True)


class Dialled:
    """A connection that keeps what is sent, and returns what a test lets arrive."""

    def __init__(self, place: Endpoint) -> None:
        self.place, self.address = place, place.address
        self.sent: list[Sequence[bytes]] = []
        self.arrived: list[Sequence[bytes]] = []
        self.open = True

    def send(self, frames: Sequence[bytes]) -> bool:
        self.sent.append(frames)
        return True

    def receive(self) -> list[Sequence[bytes]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        self.open = False


def look(candidates: Candidates, silent_s: float, now: float = 100.0) -> list[Endpoint]:
    """Let a node look, and return the places that it greets from now on."""
    assert list(candidates.hear(now, silent_s, HELLO)) == []
    return [link.place for link in candidates.links if isinstance(link, Dialled)]


def test_a_node_whose_server_is_silent_looks_at_its_standbys_and_stops_when_it_answers() -> None:
    candidates = Candidates(2, Dialled, lambda address, now, since: None, THIRD, [HOME])
    candidates.welcomed(NodeWelcome("run", (Term(1, 0),), 5, (HOME, SECOND, THIRD)), HOME.address)
    assert look(candidates, 0.0) == []
    assert look(candidates, LOOK_AFTER_S) == [THIRD, SECOND]
    links = candidates.links
    candidates.welcomed(NodeWelcome("run", (Term(1, 0),), 6, (HOME, SECOND, THIRD)), HOME.address)
    assert candidates.links == [] and not any(link.open for link in links if isinstance(link, Dialled))


def test_who_serves_looks_for_the_node_that_it_misses_under_both_its_keys() -> None:
    candidates = Candidates(1, Dialled, lambda address, now, since: None, SECOND, [HOME])
    welcome = NodeWelcome("run", (Term(1, 0), Term(2, 1)), 5, (SECOND, FIRST, THIRD))
    candidates.welcomed(welcome, SECOND.address)
    assert candidates.serves and look(candidates, 0.0) == []
    candidates.welcomed(NodeWelcome("run", welcome.terms, 5, (SECOND, THIRD)), SECOND.address)
    assert look(candidates, 0.0) == [HOME, FIRST]
    assert candidates.mine().place == SECOND


def test_a_node_that_comes_back_looks_where_the_run_was_and_takes_the_run_that_is_there(tmp_path: Path) -> None:
    assert followed(tmp_path, 2) is None
    with claimed(tmp_path, 2, HOME.address):
        assert find_live(tmp_path)[1:] == (HOME.address, b"")
        moved(tmp_path, 2, [SECOND, FIRST])
        assert find_live(tmp_path)[1:] == (SECOND.address, SECOND.key)
        where = followed(tmp_path, 2)
        keyless = Endpoint(1, SECOND.address)
        moved(tmp_path, 2, [keyless, FIRST])
        assert (followed(tmp_path, 2), find_live(tmp_path)[1:]) == (keyless, (SECOND.address, b""))
    assert where == SECOND
    candidates = Candidates(2, Dialled, lambda address, now, since: None, THIRD, [HOME, where])
    assert look(candidates, 0.0) == []
    assert look(candidates, LOOK_AFTER_S) == [SECOND, THIRD]
    link = candidates.links[0]
    assert isinstance(link, Dialled)
    welcome = NodeWelcome("run", (Term(2, 1),), 5, (SECOND,))
    link.arrived.append([b"", encode(welcome)])
    assert list(candidates.hear(101.0, LOOK_AFTER_S, HELLO)) == [(SECOND, link, welcome)]
    for _ in range(2):  # it is launched again, and killed before it has heard of a server
        with claimed(tmp_path, 2, HOME.address):
            assert followed(tmp_path, 2) is None and find_live(tmp_path)[1:] == (HOME.address, b"")
            assert known(tmp_path, 2) == [Endpoint(-1, HOME.address), keyless, FIRST]


def test_a_damaged_lock_names_the_places_before_the_damage(tmp_path: Path) -> None:
    with claimed(tmp_path, 2, HOME.address):
        moved(tmp_path, 2, [SECOND, FIRST, THIRD])
        lock = tmp_path / "node2.lock"
        lock.write_text(lock.read_text().replace(THIRD.key.hex(), "garbage"))
        assert known(tmp_path, 2) == [SECOND, FIRST]
        lock.write_bytes(b"\xff")
        assert known(tmp_path, 2) == []
    with claimed(tmp_path, 2, HOME.address):
        assert known(tmp_path, 2) == [Endpoint(-1, HOME.address)]


def test_a_refused_knock_is_an_answer_and_silence_is_none() -> None:
    knock = Knock()
    address = f"tcp://127.0.0.1:{free_port()}"
    assert until(lambda: knock(address, time.monotonic()), "the host refuses")
    with socket.create_server(("127.0.0.1", 0)) as server:
        knock.close()
        at = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert until(lambda: knock(at, time.monotonic()), "the host accepts")
        assert knock(at, time.monotonic(), since=time.monotonic() + 1.0) is None  # the host may be away since
        later = time.monotonic()
        assert until(lambda: knock(at, time.monotonic(), since=later), "it accepts again")
    knock.close()
    assert knock("ipc:///tmp/somewhere", 0.0) is True


def test_a_place_of_a_run_that_went_without_keys_is_dialled_with_the_key_in_the_token() -> None:
    keys = ConnectorKeys("node1", new_key_pair()[0], *new_key_pair())
    dial(b"node1#1", keys, Endpoint(0, "tcp://127.0.0.1:1")).close()
