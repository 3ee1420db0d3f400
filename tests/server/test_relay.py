"""The relay as a process: who meets whom, who is refused, and what one side can do to the other and to it."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lsgd.client.groups.routes import RelayedRoute, until_it_greets
from lsgd.errors import ConfigError
from lsgd.protocol.credentials import (
    GREETING_NBYTES,
    MET,
    TICKET_NBYTES,
    Ticket,
    place_of,
    secret_of_relay,
    secret_of_run,
)
from lsgd.protocol.keys import KeyRing
from lsgd.server.relay import GREET_WITHIN_S, MAX_STRANGERS, READ_NBYTES
from tests import golden

from ..integration.running import Cluster, Process, free_port, until
from ..speed import scaled

RUN = b"4f1d2a3b4c5d"


@dataclass
class Running:
    """A relay, its address, and the secret of the run RUN there."""

    process: Process
    address: str
    secret: bytes

    def ticket(self, source: int = 0, target: int = 1, generation: int = 3) -> Ticket:
        return Ticket(RUN, generation, source, target, of_target=False)

    def meet(self, ticket: Ticket, secret: bytes | None = None, within_s: float = scaled(20.0)) -> socket.socket:
        """Return what a member gets that presents this ticket; TimeoutError: the other side does not come."""

        async def open_() -> socket.socket:
            async with asyncio.timeout(within_s):
                return await RelayedRoute(self.address, ticket, secret or self.secret, b"").open()

        connection = asyncio.run(open_())
        connection.setblocking(True)
        return connection

    def pair(self, **of: int) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection through the relay: the source's and the target's."""
        ticket, met = self.ticket(**of), []
        thread = threading.Thread(target=lambda: met.append(self.meet(ticket.counterpart)))
        thread.start()
        one = self.meet(ticket)
        thread.join()
        return one, met[0]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_nbytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def processor_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing.make(tmp_path / "keys", [])


@pytest.fixture
def begin(tmp_path: Path, ring: KeyRing) -> Iterator[Callable[..., Running]]:
    cluster = Cluster(tmp_path)

    def begin(port: int = 0) -> Running:
        process = cluster.server("relay", "--relay", "--listen", f"tcp://127.0.0.1:{port}", "--keys", str(ring.folder))
        address = process.says(r"relay on (\S+),")[1]
        return Running(process, address, secret_of_run(secret_of_relay(ring.secret), RUN))

    yield begin
    cluster.close()


@pytest.fixture
def relay(begin: Callable[..., Running]) -> Running:
    return begin()


def test_two_meet_whoever_comes_first_and_bytes_go_both_ways(relay: Running) -> None:
    one, other = relay.pair()
    with one, other:
        one.sendall(b"from the source")
        assert other.recv(100) == b"from the source"
        other.sendall(b"from the target")
        assert one.recv(100) == b"from the target"
        with contextlib.ExitStack() as others:  # other pairs do not mix with it
            for end in (*relay.pair(source=1, target=0), *relay.pair(generation=4)):
                others.enter_context(end)
            one.sendall(b"still")
            assert other.recv(100) == b"still"


@pytest.mark.parametrize("what", ["another secret", "another run's secret", "garbage"])
def test_who_has_no_valid_ticket_is_refused_and_the_log_says_so(relay: Running, what: str) -> None:
    ring_secret = os.urandom(32)
    secret = {"another secret": secret_of_run(secret_of_relay(ring_secret), RUN), "garbage": b""}.get(what)
    ticket = relay.ticket() if secret is not None else replace(relay.ticket(), run=b"another run")
    with pytest.raises(ConnectionError, match=golden.pattern("relay.hung_up")):
        if what == "garbage":
            with socket.create_connection(place_of(relay.address)) as stranger:
                stranger.sendall(os.urandom(TICKET_NBYTES))
                assert len(stranger.recv(100)) == GREETING_NBYTES
                assert stranger.recv(1) == b""
            raise ConnectionError("hung up; its log says why")
        relay.meet(ticket, secret)
    relay.process.says(golden.pattern("relay.no_ticket_of_a_run"))


def test_a_ticket_that_somebody_saw_is_of_no_use_to_him(relay: Running) -> None:
    """Each connection has a challenge of its own."""
    place = place_of(relay.address)
    with socket.create_connection(place) as member, socket.create_connection(place) as thief:
        greeting = member.recv(GREETING_NBYTES)
        assert thief.recv(GREETING_NBYTES) != greeting
        answer = relay.ticket().answer(greeting, relay.secret)
        thief.sendall(answer)
        assert thief.recv(1) == b""
        member.sendall(answer)
        with relay.meet(relay.ticket().counterpart):
            assert member.recv(1) == MET


def test_a_third_one_of_a_pair_waits_and_neither_hears_nor_disturbs_it(relay: Running) -> None:
    one, other = relay.pair()
    with one, other:
        with pytest.raises(TimeoutError):
            relay.meet(relay.ticket(), within_s=0.3)
        one.sendall(b"x")
        assert other.recv(100) == b"x"


def test_one_that_waited_in_vain_is_forgotten_and_the_newest_is_met(relay: Running) -> None:
    with pytest.raises(TimeoutError):
        relay.meet(relay.ticket(), within_s=0.2)
    place = place_of(relay.address)
    with socket.create_connection(place) as lost, socket.create_connection(place) as newer:
        for connection in (lost, newer):  # the first one's machine may have died without a word
            connection.sendall(relay.ticket().answer(connection.recv(GREETING_NBYTES), relay.secret))
            for end in relay.pair(source=5):  # by now the relay has had a turn
                end.close()
        with relay.meet(relay.ticket().counterpart):
            assert newer.recv(1) == MET
            lost.settimeout(0.2)
            with pytest.raises(TimeoutError):
                lost.recv(1)


@pytest.mark.parametrize("how", ["closes", "resets", "shuts one way"])
def test_an_end_reaches_the_other_side_and_frees_both(relay: Running, how: str) -> None:
    before = relay.descriptors()
    one, other = relay.pair()
    assert relay.descriptors() == before + 2
    with one, other:
        one.sendall(b"last words")
        if how == "shuts one way":
            one.shutdown(socket.SHUT_WR)
            assert [other.recv(100), other.recv(100)] == [b"last words", b""]
            other.sendall(b"answer")  # which is what one way means
            assert one.recv(100) == b"answer"
            other.close()
            assert one.recv(1) == b""
        else:
            if how == "resets":
                assert other.recv(100) == b"last words"
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            one.close()
            with contextlib.suppress(ConnectionResetError):
                while other.recv(100):
                    pass
    until(lambda: relay.descriptors() == before, "both connections are closed")


def test_much_passes_unchanged_and_a_slow_reader_fills_no_memory(relay: Running) -> None:
    """It keeps no more than one read of what a reader does not take, and others do not wait for that."""
    data = os.urandom(1 << 20) * 128
    one, other = relay.pair()
    with one, other:
        small_nbytes = relay.rss_nbytes()
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        fast, reader = relay.pair(source=2)
        with fast, reader:  # while the first pair is stuck
            for _ in range(100):
                fast.sendall(b"x")
                assert reader.recv(1) == b"x"
            spent_s = relay.processor_s()
            reader.settimeout(0.3)
            with pytest.raises(TimeoutError):
                reader.recv(1)
            assert relay.processor_s() - spent_s < 0.2  # it waits, and does not turn
        assert sender.is_alive()
        assert relay.rss_nbytes() < small_nbytes + 100 * READ_NBYTES
        received = bytearray()
        while len(received) < len(data):
            received += other.recv(1 << 20)
        sender.join()
        assert received == data
        assert relay.rss_nbytes() < small_nbytes + 100 * READ_NBYTES


def test_1000_idle_connections_keep_no_member_out_and_are_let_go(relay: Running) -> None:
    before = relay.descriptors()
    with contextlib.ExitStack() as idle:
        for _ in range(1000):
            idle.enter_context(socket.create_connection(place_of(relay.address)))
        one, other = relay.pair()
        with one, other:
            one.sendall(b"x")
            assert other.recv(1) == b"x"
            assert relay.descriptors() <= before + MAX_STRANGERS + 4
            relay.process.says(golden.pattern("relay.too_many"))
            until(lambda: relay.descriptors() == before + 2, "the idle ones are closed", GREET_WITHIN_S + 20)


def test_killed_and_started_again_it_serves_the_same_tickets(begin: Callable[..., Running]) -> None:
    relay = begin(free_port())
    one, other = relay.pair()
    with one, other:
        relay.process.send(signal.SIGKILL)
        relay.process.wait()
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
    with pytest.raises(ConnectionError, match=golden.pattern("relay.nothing_listens")):
        relay.meet(relay.ticket())
    again = begin(place_of(relay.address)[1])
    one, other = again.pair()
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_sigterm_ends_it_and_says_what_it_has_done(relay: Running) -> None:
    one, other = relay.pair()
    with one, other:
        one.sendall(bytes(3_000_000))
        received = 0
        while received < 3_000_000:
            received += len(other.recv(1 << 20))
        relay.process.send(signal.SIGTERM)
        said = relay.process.succeeds()
        assert one.recv(1) == b""
    assert golden.text("relay.sigterm") in said


def test_another_program_in_its_place_is_told_from_it(relay: Running) -> None:
    asyncio.run(asyncio.wait_for(until_it_greets(relay.address), 20))
    with socket.create_server(("127.0.0.1", 0)) as other:

        def say() -> None:
            with other.accept()[0] as connection:
                connection.sendall(bytes(GREETING_NBYTES))

        program = threading.Thread(target=say)
        program.start()
        with pytest.raises(ConnectionError, match=golden.pattern("relay.no_relay")):
            replace(relay, address=f"tcp://127.0.0.1:{other.getsockname()[1]}").meet(relay.ticket())
        program.join()
    with pytest.raises(ConfigError, match=golden.pattern("relay.no_address")):
        place_of("192.0.2.1:27401")
