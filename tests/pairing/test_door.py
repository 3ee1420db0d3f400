"""A host's door and its guests, over real connections of this machine, in one thread and on a clock that jumps."""

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lsgd.pairing.about import About
from lsgd.pairing.code import OwnCode
from lsgd.pairing.door import MAX_LINES, MAX_LINKS, Door
from lsgd.pairing.peers import Peers
from lsgd.pairing.record import Run
from lsgd.pairing.session import HIDE_S
from lsgd.pairing.visit import Visit
from lsgd.protocol.keys import KeyRing, default_folder, parse_token
from tests import golden

ABOUT = About("alpha", 0, 2, "0.1.0", "2.13.0", "/home/a/train.py", "python train.py", "aa")
RUN = Run("mine", ("python", "train.py"), 2, "192.0.2.1", 27400)


class Place:
    """A door, its guests, and what was said where."""

    def __init__(self, folder: Path, run: Run = RUN) -> None:
        self.now = 0.0
        self.folder = folder
        self.host_lines: list[str] = []
        self.guest_lines: list[str] = []
        self.code = OwnCode("amber fox")
        peers = Peers(folder / "host")
        self.door = Door(run, folder / "run", ABOUT, peers, self.code, 0, self.host_lines.append, begun=False)
        self.visits: list[Visit] = []

    def visit(self, peers: str = "guest", about: About = ABOUT, **options: object) -> Visit:
        """Let a guest dial."""
        about = replace(about, name="beta")
        where = [("127.0.0.1", self.door.port)]
        code = OwnCode("iris fox")
        visit = Visit(where, about, Peers(self.folder / peers), code, self.guest_lines.append, self.now, **options)
        self.visits.append(visit)
        return visit

    def dial(self) -> socket.socket:
        """Let a stranger dial."""
        return socket.create_connection(("127.0.0.1", self.door.port), 10.0)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Let both sides go on until something holds."""
        end = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < end, (what, self.host_lines, self.guest_lines)
            self.now += HIDE_S / 4
            self.door.turn(self.now)
            for visit in self.visits:
                visit.turn(self.now)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("LSGD_KEYS", str(tmp_path / "keys"))
    place = Place(tmp_path)
    yield place
    for visit in place.visits:
        visit.close(place.now)
    place.door.close(place.now)


def joins(place: Place, code: str = "amber fox", **options: object) -> Visit:
    """Let a guest join by the code."""
    visit = place.visit(**options)
    place.until(lambda: place.guest_lines, "it is asked")
    visit.type(code, place.now)
    place.until(lambda: visit.grant or visit.failed, "it has a place, or none")
    return visit


def test_a_guest_gets_a_place_and_the_token_for_it(place: Place) -> None:
    visit = joins(place)
    assert visit.grant is not None
    assert (visit.grant.node, visit.grant.nodes, visit.grant.name) == (1, 2, "mine")
    keys = parse_token(visit.grant.token, "the grant")
    assert KeyRing(default_folder()).allowed(keys.public) == keys.name == "node1"
    assert Run.read(place.folder / "run").members == {Peers(place.folder / "guest").identity: 1}
    assert place.host_lines[-1] == golden.text("pairing.joins")


def test_the_second_time_nothing_is_typed_and_the_place_is_the_same(place: Place) -> None:
    first = joins(place)
    place.guest_lines.clear()
    again = place.visit()
    place.until(lambda: again.grant, "it has its place again")
    assert again.grant == first.grant and place.guest_lines == []


def test_a_third_machine_gets_another_place(place: Place) -> None:
    joins(place)
    place.guest_lines.clear()
    third = joins(place, peers="third")
    assert (third.grant.node, third.grant.nodes) == (2, 3)


def test_a_code_typed_at_the_host_counts_for_the_only_guest(place: Place) -> None:
    visit = place.visit()
    place.until(lambda: place.host_lines, "it is asked for")
    place.door.type("iris fox", place.now)
    place.until(lambda: visit.grant, "it has a place")


def test_a_code_typed_at_the_host_is_shown_to_none_of_several(place: Place) -> None:
    visits = [place.visit(), place.visit("third")]
    place.until(lambda: len(place.host_lines) == 2, "both are asked for")
    place.door.type("iris fox", place.now)
    assert "several machines" in place.host_lines[-1]
    assert not any(visit.grant for visit in visits)


def test_another_script_is_said_before_anything_trains(place: Place) -> None:
    visit = joins(place, about=replace(ABOUT, digest="bb"))
    assert golden.text("pairing.another_script") in visit.failed and "--anyway" in visit.failed
    place.until(lambda: "does not join" in place.host_lines[-1], "the host is told")
    assert place.door.came == {}
    again = place.visit(about=replace(ABOUT, digest="bb"), differs=True)
    place.until(lambda: again.grant, "it joins all the same")


def test_a_guesser_has_three_tries_however_often_it_dials(place: Place) -> None:
    for number in range(3):
        place.guest_lines.clear()
        visit = joins(place, "acid acid", peers=f"guesser{number}", hint=" (nobody types)")
        assert visit.failed
    assert place.code.is_spent
    place.guest_lines.clear()
    late = joins(place, peers="honest")
    assert "code is void" in late.failed and place.door.came == {}


def test_a_guest_that_is_killed_in_the_middle_can_come_again(place: Place) -> None:
    visit = place.visit()
    place.until(lambda: place.guest_lines, "it is asked")
    visit.type("amber fox", place.now)
    place.until(lambda: place.code.under_way, "its try is under way")
    visit.close(place.now)  # the system closes the connection of a killed process
    place.until(lambda: not place.door.guests, "the host notices")
    place.guest_lines.clear()
    assert joins(place).grant and place.code.wrong == 0


def test_a_host_that_is_killed_in_the_middle_leaves_a_guest_that_can_dial_again(place: Place) -> None:
    visit = place.visit()
    place.until(lambda: place.guest_lines, "it is asked")
    place.door.close(place.now)
    place.until(lambda: visit.is_lost, "the guest notices")
    assert not visit.failed


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x05hello", b"\xff\xff", b"\x00\x00", bytes(100_000)]
)
def test_junk_at_the_port_ends_its_own_connection_alone(place: Place, junk: bytes) -> None:
    with place.dial() as stranger:
        stranger.setblocking(False)
        sent = stranger.send(junk)
        assert sent
        place.until(lambda: any("127.0.0.1 does not join" in line for line in place.host_lines), "it is cut")
    assert joins(place).grant


def test_silent_connections_keep_nobody_out(place: Place) -> None:
    strangers = []
    for _ in range(3 * MAX_LINKS):
        strangers.append(place.dial())
        place.door.turn(place.now)
    place.until(lambda: len(place.door.sources) == 1 + MAX_LINKS, "the oldest are cut")
    assert joins(place).grant
    assert len(place.door.sources) <= MAX_LINKS + 2
    place.now += 6.0
    place.until(lambda: len(place.door.sources) == 1, "they are cut after a while")
    assert len([line for line in place.host_lines if "does not join" in line]) <= MAX_LINES
    for stranger in strangers:
        stranger.close()
