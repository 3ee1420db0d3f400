"""What others can do to a Gloo group: nothing once it is formed, and nothing unseen while it is."""

import gc
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from lsgd.client.groups import connections, gloo, store
from lsgd.client.groups.torch_group import TorchGroup
from lsgd.errors import ExchangeError

from ..integration.running import LIGHT, until
from ._forming import published
from .bench import Switchboard
from .test_groups import every_verb, run


@pytest.fixture
def switchboard(tmp_path):
    with Switchboard(tmp_path) as made:
        yield made


@pytest.fixture
def addresses(monkeypatch):
    """Where the members' Gloo has listened, in the order of their coming."""
    seen = []
    listens_on = gloo.listens_on
    put = gloo.Introductions.set
    monkeypatch.setattr(
        gloo.Introductions,
        "set",
        lambda self, key, value: (seen.append(listens_on(value)[0]), put(self, key, value))[1],
    )
    return seen


def listeners() -> set[tuple[str, int]]:
    return {s.getsockname()[:2] for _, s in connections._sockets() if connections._listens(s)}


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def is_refused(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, 5.0):
            return False
    except ConnectionRefusedError:
        return True


@contextmanager
def while_forming(monkeypatch, call: Callable[[], None]) -> Iterator[None]:
    """Call this each time that a member has asked for another's address, when all have listeners."""
    get = store.ServerStore.get

    def get_and_call(self, key):
        value = get(self, key)
        call()
        return value

    with monkeypatch.context() as patch:
        patch.setattr(store.ServerStore, "get", get_and_call)
        yield


def test_groups_listen_no_more_once_they_are_formed(switchboard, addresses, monkeypatch) -> None:
    others: list[socket.socket] = []
    before = listeners()

    def work(group: TorchGroup) -> bool:
        every_verb(group)
        every_verb(group.node)
        if group.across is not None:
            every_verb(group.across)
        every_verb(group.subset("all", [2, 1, 0]))
        refused = [is_refused(address) for address in tuple(addresses)]
        return all(refused) and every_verb(group)

    # Of an address of their own: on the groups' one they would now and then get a port that was just closed.
    with while_forming(monkeypatch, lambda: others.append(socket.create_server(("127.0.0.2", 0)))):
        assert run(switchboard, (2, 1), work) == [True] * 3
    assert len(addresses) == 3 * 2 + 2 + 2  # the world and the subset, the node of two, and across
    assert listeners() - before == {s.getsockname() for s in others}
    for listener in others:  # what another thread opened meanwhile is its own
        assert not is_refused(listener.getsockname())
        listener.close()


def test_twenty_generations_leave_no_descriptor(switchboard) -> None:
    run(switchboard, (2,), every_verb)
    before = descriptors()
    for number in range(2, 22):  # each of the members has one more channel
        assert run(switchboard, (2,), lambda g: bool(g.all_reduce(torch.ones(1)).wait()) or True, number=number)
    channels = switchboard._channels
    per_channel = descriptors()
    while len(channels) > 2:
        channels.pop().close()
    assert descriptors() <= before, per_channel


@pytest.mark.slow
def test_a_flood_of_connections_while_groups_form(switchboard, addresses) -> None:
    """Gloo ends the process if what it accepts is gone at that moment: it must not be."""
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            for address in addresses[-2:]:
                with suppress(OSError), socket.create_connection(address, 1.0) as caller:
                    caller.sendall(struct.pack("=q", 99))

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 11):
            assert run(switchboard, (2,), lambda g: every_verb(g.node), number=number) == [True, True]
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_process_that_was_forked_meanwhile_keeps_no_listener_at_work(switchboard, addresses, monkeypatch) -> None:
    """It keeps the file open: connections are made, by the system, and Gloo must not hear of them."""
    kept: dict[int, int] = {}

    def keep() -> None:
        for _, listener in connections._sockets():
            inode = os.fstat(listener.fileno()).st_ino
            if connections._listens(listener) and listener.getsockname() in addresses and inode not in kept:
                kept[inode] = os.dup(listener.fileno())

    checked = threading.Barrier(2)  # who closes its group takes its part out

    def work(group: TorchGroup) -> bool:
        return every_verb(group) and check(kept, addresses) and checked.wait(20) >= 0

    with while_forming(monkeypatch, keep):
        assert run(switchboard, (2,), work) == [True] * 2
    for descriptor in kept.values():
        os.close(descriptor)


def check(kept: dict[int, int], addresses: list[tuple[str, int]]) -> bool:
    assert len(kept) == 2
    watched: dict[int, int] = {}
    for entry in os.listdir("/proc/self/fdinfo"):
        with suppress(OSError):
            text = Path(f"/proc/self/fdinfo/{entry}").read_text()
            found = re.findall(r"^tfd:.* events: *([0-9a-f]+).* ino:([0-9a-f]+)", text, re.M)
            watched |= {int(inode, 16): int(events, 16) for events, inode in found}
    assert not set(watched) & set(kept)
    # What has taken their places is there, for some releases of Gloo take it out at the end; and it waits for nothing.
    assert list(watched.values()).count(select.EPOLLERR | select.EPOLLHUP) == 2
    assert not is_refused(addresses[0])
    return True


class Stranger:
    """Takes the place of whichever member Gloo waits for: it comes before that one, and says its number.

    Then it speaks Gloo's language: it takes what is sent, and sends what is asked for.
    """

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.place = -1
        self.came = threading.Event()
        self._published: dict[int, bytes] = {}
        self._thread = threading.Thread(target=self._serve)

    def hears(self, rank: int, value: bytes) -> None:
        self._published[rank] = value

    def before(self, rank: int) -> None:
        """Hold a member until it is its turn: the one that is to be connected to, the stranger, the other one."""
        until(lambda: len(self._published) == 2, "both members have published their addresses")
        known = [gloo.listens_on(self._published[r][gloo.NONCE_NBYTES :]) for r in range(2)]
        # Of two on one host, the one connects whose port is larger, read in the machine's order of bytes.
        listener = min(range(2), key=lambda r: socket.htons(known[r][0][1]))
        if rank != listener:
            assert self.came.wait(20)
        elif self.place < 0:
            self.place = 1 - listener
            self._connection = socket.create_connection(known[listener][0])
            self._connection.sendall(struct.pack("=q", known[listener][1][self.place]))
            self._thread.start()

    def gone(self) -> None:
        self._thread.join(20)
        self._connection.close()

    def _serve(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                _, kind, slot, _, length, _ = struct.unpack("=6Q", self._read(48))
                self.came.set()
                if kind == 1:  # data
                    self.taken.append(self._read(length))
                elif kind == 2:  # it has something to send
                    self._connection.sendall(struct.pack("=6Q", 48, 3, slot, 0, length, 0))
                else:  # it waits for something
                    self._connection.sendall(struct.pack("=6Q", 48 + length, 1, slot, 0, length, 0) + b"*" * length)

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            if not (more := self._connection.recv(nbytes - len(data))):
                raise EOFError
            data += more
        return data


def test_a_stranger_that_takes_a_members_place_is_found(switchboard, monkeypatch) -> None:
    """It gets nothing of the tensors, and nothing of its own into them."""
    stranger = Stranger()
    put, get = store.ServerStore.set, store.ServerStore.get

    def rank(self) -> int:
        return int(self._identity[0][-1])

    def put_and_tell(self, key, value):
        stranger.hears(rank(self), value)
        put(self, key, value)

    def get_in_turn(self, key):
        value = get(self, key)
        if not key.endswith(f"/{rank(self)}"):
            stranger.before(rank(self))
        return value

    monkeypatch.setattr(store.ServerStore, "set", put_and_tell)
    monkeypatch.setattr(store.ServerStore, "get", get_in_turn)
    secret = torch.arange(1000.0)

    def work(group: TorchGroup) -> str:
        received = [torch.zeros(1000) for _ in range(2)]
        with pytest.raises(ExchangeError) as raised:
            group.all_gather(received, secret).wait()
        assert not received[1 - group.rank].any()
        return str(raised.value)

    told = run(switchboard, (2,), work, timeout_s=10.0)
    stranger.gone()
    assert sum(map(len, stranger.taken)) <= gloo.PROOF_NBYTES
    place = stranger.place
    assert f"another process has taken the place of node0/worker{place}" in told[1 - place]
    assert told[place].startswith(f"exchange with node0/worker{1 - place}")  # it was refused, or not answered


def test_a_proof_is_good_for_one_way_and_one_group_only() -> None:
    nonces = {0: b"0" * 16, 1: b"1" * 16, 2: b"2" * 16}
    proofs = {gloo.proof(nonces, a, b) for a in range(3) for b in range(3) if a != b}
    assert len(proofs) == 6
    for changed in (0, 1):
        assert gloo.proof({**nonces, changed: b"x" * 16}, 0, 1) not in proofs
    assert gloo.proof({**nonces, 2: b"x" * 16}, 0, 1) in proofs


def test_an_address_is_read_as_gloo_writes_it() -> None:
    data = published("192.0.2.7", 47123, (3, 4, 5))[gloo.NONCE_NBYTES :]
    assert gloo.listens_on(data) == (("192.0.2.7", 47123), [3, 4, 5])
    at_six = (
        struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", 5, 0) + socket.inet_pton(socket.AF_INET6, "fe80::7")
    )
    assert connections.endpoint(at_six) == ("fe80::7", 5)
    for garbage in (b"", data[:50], data[:-1], b"\xff" * 178, data.replace(b"\x02\x00", b"\x05\x00", 1)):
        with pytest.raises(RuntimeError, match="publishes an address in an unknown form"):
            gloo.listens_on(garbage)


def test_a_cut_leaves_the_connections_of_others_alone(switchboard, monkeypatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    callers: list[tuple[socket.socket, socket.socket]] = []

    one_at_a_time = threading.Lock()  # each end is that of its own connection

    def call() -> None:
        with one_at_a_time:
            caller = socket.create_connection(server.getsockname())
            callers.append((caller, server.accept()[0]))

    def work(group: TorchGroup) -> bool:
        group.all_reduce(torch.ones(1)).wait()
        group.cut()
        with pytest.raises(ExchangeError):
            group.all_reduce(torch.ones(1)).wait()
        return True

    with while_forming(monkeypatch, call):
        assert run(switchboard, (2,), work) == [True, True]
    assert callers
    for caller, other in callers:
        caller.sendall(b"!")
        other.settimeout(10)
        assert other.recv(1) == b"!"
        caller.close()
        other.close()
    server.close()


def test_a_descriptor_that_was_used_again_is_not_taken_for_the_socket_before(monkeypatch) -> None:
    """Between the reading of its name and its duplication."""
    with socket.socket() as before, socket.socket() as after, open(os.devnull) as file:
        inode = os.fstat(before.fileno()).st_ino
        for descriptor in (after.fileno(), file.fileno(), 1 << 20):
            monkeypatch.setattr(connections, "_descriptors", lambda d=descriptor: [(d, f"socket:[{inode}]")])
            assert not list(connections._sockets({inode}))
        monkeypatch.setattr(connections, "_descriptors", lambda: [(before.fileno(), f"socket:[{inode}]")])
        assert [d for d, _ in connections._sockets({inode})] == [before.fileno()]


def test_no_thread_is_left_when_a_group_that_forms_is_cut(switchboard) -> None:
    def work(group: TorchGroup) -> bool:
        threading.Timer(0.2, group.cut).start()
        with pytest.raises(ExchangeError, match="its generation was over"):
            group.all_reduce(torch.ones(1)).wait()
        return all(thread.name != "lsgd-build" for thread in threading.enumerate())

    assert run(switchboard, (2,), work, missing=[1], timeout_s=60.0) == [True]


@pytest.mark.slow
def test_a_process_that_ends_while_a_group_forms_keeps_its_exit_code() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tests.client._forming", "2"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **LIGHT},
        capture_output=True,
        text=True,
        timeout=150,
    )
    codes = dict(line.split(": ") for line in said.stdout.splitlines())
    assert len(codes) == 6, said.stderr
    assert set(codes.values()) == {"7 7"}, said.stderr
