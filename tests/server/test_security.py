"""The global server as a process with keys: who is let in, who is not, and what strangers can do to it."""

import contextlib
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lsgd.errors import JoinError
from lsgd.protocol.keys import KeyRing, parse_token, token_path
from lsgd.protocol.messages import (
    PROTOCOL,
    NodeHello,
    NodeWelcome,
    Status,
    StatusQuery,
    StopRun,
    decode,
    encode,
)
from lsgd.protocol.processes import MAX_DESCRIPTORS, raise_descriptor_limit
from lsgd.protocol.sockets import Connector, ConnectorKeys, new_key_pair, wait_for
from lsgd.server.daemon import GUARD_EVERY_S
from lsgd.watch.reader import Reader, ask
from tests import golden

from ..integration.running import Cluster, Process, until
from ..speed import scaled
from .helpers import greeting

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing.make(tmp_path / "keys", ["node0", "node1", "operator"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def server(cluster: Cluster, ring: KeyRing) -> Process:
    return cluster.start_global("--keys", str(ring.folder), "--workers", "2")


def keys_of(ring: KeyRing, name: str) -> ConnectorKeys:
    return parse_token(ring.token(name), "the token")


def own_keys(ring: KeyRing, name: str = "node1") -> ConnectorKeys:
    """Return keys that the server has never heard of, under a name that it has."""
    return ConnectorKeys(name, ring.public, *new_key_pair())


def hello(node: int) -> bytes:
    return encode(NodeHello(PROTOCOL, node, 1, "here", "0.1.0"))


def trouble_of(address: str, keys: ConnectorKeys | None) -> str:
    """Return why a link is not let in."""
    with Connector(address, b"node1#1", keys) as link:
        return until(link.trouble, "the handshake fails")


def answer(link: Connector, question: bytes) -> object:
    """Say something until there is an answer, and return that."""

    def found() -> object:
        link.send([question])
        wait_for(0.2, link)
        return next((decode(frames[1]) for frames in link.receive()), None)

    return until(found, "an answer comes")


def test_who_has_a_token_is_let_in_under_its_name(cluster, ring, server) -> None:
    with Connector(cluster.address, b"node1#1", keys_of(ring, "node1")) as link:
        assert isinstance(answer(link, hello(1)), NodeWelcome)
        assert link.trouble() == ""
    with Reader(cluster.address, keys_of(ring, "operator")) as reader:
        until(lambda: reader.read(0.5).events, "there are events")
    status = ask(cluster.address, StatusQuery(0), keys_of(ring, "operator"))
    assert status["state"] == "waiting"
    server.says(golden.pattern("keys.join_with_token"))


@pytest.mark.parametrize(
    ("who", "told"),
    [
        ("nobody's", golden.text("keys.keygen_made")),
        ("none", golden.text("keys.requires_token")),
        ("another server's", golden.text("keys.other_key")),
    ],
)
def test_a_stranger_is_refused_and_both_sides_say_so(cluster, ring, server, who, told) -> None:
    keys = {
        "nobody's": own_keys(ring),
        "none": None,
        "another server's": ConnectorKeys("node1", new_key_pair()[0], *new_key_pair()),
    }[who]
    assert told in trouble_of(cluster.address, keys)
    with pytest.raises(JoinError, match=golden.pattern("keys.no_entry")):
        ask(cluster.address, StatusQuery(0), keys)
    with Reader(cluster.address, keys) as reader, pytest.raises(JoinError, match=golden.pattern("keys.no_entry")):
        while not reader.read(0.2).connected:
            pass
    server.says(golden.pattern("keys.no_known_key"))
    assert ask(cluster.address, StatusQuery(0), keys_of(ring, "node0"))["members"] == []


def test_a_node_cannot_speak_for_another(cluster, ring, server) -> None:
    with Connector(cluster.address, b"node0#7", keys_of(ring, "node1")) as link:
        until(lambda: link.send([hello(0)]), "it is sent")
        server.says(golden.pattern("keys.calls_itself_7"))
    with Connector(cluster.address, b"node1#7", keys_of(ring, "node1")) as link:
        until(lambda: link.send([hello(0), encode(greeting(0, 0))]), "it is sent")
        server.says(golden.pattern("keys.speaks_for_node0"))
        assert isinstance(answer(link, encode(StatusQuery(0))), Status)
    assert ask(cluster.address, StatusQuery(0), keys_of(ring, "operator"))["members"] == []
    assert "node0 (" not in server.output


def test_a_node_that_is_shut_out_while_the_server_runs(cluster, ring, server) -> None:
    keys = keys_of(ring, "node1")
    ask(cluster.address, StatusQuery(0), keys)
    allowed = ring.folder / "allowed"
    allowed.write_text("\n".join(x for x in allowed.read_text().splitlines() if not x.startswith("node1")))
    with pytest.raises(JoinError, match=golden.pattern("keys.unknown_key")):
        ask(cluster.address, StatusQuery(0), keys)
    KeyRing.make(ring.folder, ["node1"])
    assert ask(cluster.address, StatusQuery(0), keys_of(ring, "node1"))["state"] == "waiting"


def test_a_list_of_keys_that_others_can_write_is_refused_and_said_while_it_is_used(cluster, ring, server) -> None:
    (ring.folder / "allowed").chmod(0o666)
    assert ask(cluster.address, StatusQuery(0), keys_of(ring, "node1"))["state"] == "waiting"
    server.says(golden.pattern("keys.others_write_allowed"))
    second = cluster.server("second", "--global", "--listen", "tcp://127.0.0.1:0", "--keys", str(ring.folder))
    assert second.wait() == 2
    assert golden.text("keys.make_private") in second.output


class Tap:
    """Listens in between a peer and the server, and keeps what the peer says."""

    def __init__(self, address: str) -> None:
        self._place = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.said = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            server = socket.create_connection(self._place)
            back = threading.Thread(target=self._copy, args=(server, peer, False), daemon=True)
            back.start()
            self._copy(peer, server, True)
            back.join(5)
            peer.close()
            server.close()

    def _copy(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.said += data if keep else b""
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


def test_a_node_with_a_token_of_other_keys_ends_with_the_line_to_type(cluster, ring, server, tmp_path) -> None:
    other = KeyRing.make(tmp_path / "other", ["node1"])
    token = str(token_path("node1", other.folder))
    listen = ("--listen", f"ipc://{tmp_path}/local", "--connect", cluster.address)
    node = cluster.server("node1", "--local", "--node", "1", *listen, "--token", token)
    assert node.wait() == 1
    assert golden.text("keys.refused") in node.output
    line = golden.text("keys.with_token", address=cluster.address)
    assert node.output.rstrip().endswith(line)


def test_a_captured_conversation_says_nothing_when_it_is_played_again(cluster, ring, server) -> None:
    tap = Tap(cluster.address)
    ask(tap.address, StopRun("said once"), keys_of(ring, "node1"))
    server.wait()
    tap.close()
    assert len(tap.said) > 500 and b"said once" not in tap.said

    again = cluster.start_global("--keys", str(ring.folder), "--workers", "2")  # the same keys, another run
    with socket.create_connection(("127.0.0.1", int(cluster.address.rpartition(":")[2]))) as replay:
        replay.sendall(tap.said)
        replay.settimeout(scaled(10))
        with contextlib.suppress(ConnectionError):
            while replay.recv(4096):
                pass  # until the server hangs up
    again.says("1 connection refused")
    assert ask(cluster.address, StatusQuery(0), keys_of(ring, "node1"))["state"] == "waiting"


def test_500_half_open_greetings_keep_nobody_out_and_are_let_go(cluster, ring, server) -> None:
    place = ("127.0.0.1", int(cluster.address.rpartition(":")[2]))

    def descriptors() -> int:
        return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))

    before = descriptors()
    with contextlib.ExitStack() as stack:
        for number in range(500):
            half = stack.enter_context(socket.create_connection(place))
            half.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"[: number % 12])
        until(lambda: descriptors() > before + 400, "they are connected")
        assert ask(cluster.address, StatusQuery(0), keys_of(ring, "node1"))["state"] == "waiting"
        until(lambda: descriptors() < before + 20, "the server lets them go")
        assert ask(cluster.address, StatusQuery(0), keys_of(ring, "node1"))["state"] == "waiting"


def limit_descriptors(server: Process, soft: int) -> None:
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_1000_idle_connections_leave_the_server_descriptors_to_go_on(cluster, ring, server) -> None:
    raise_descriptor_limit()  # ours, for the strangers
    limit_descriptors(server, 256)
    place = ("127.0.0.1", int(cluster.address.rpartition(":")[2]))
    with (
        contextlib.ExitStack() as stack,
        Connector(cluster.address, b"node1#1", keys_of(ring, "node1")) as link,
    ):
        assert isinstance(answer(link, hello(1)), NodeWelcome)
        for _ in range(1000):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(place)  # what the server has no descriptor for waits in the kernel
        server.says(golden.pattern("keys.too_many_open"))
        assert isinstance(answer(link, encode(StatusQuery(0))), Status)
        assert ask(cluster.address, StatusQuery(0), keys_of(ring, "operator"))["state"] == "waiting"
        assert link.trouble() == ""
    assert server.poll() is None and "Traceback" not in server.output


def test_a_server_without_a_descriptor_left_serves_those_who_are_in(cluster, ring, server) -> None:
    with Connector(cluster.address, b"node1#1", keys_of(ring, "node1")) as link:
        assert isinstance(answer(link, hello(1)), NodeWelcome)
        limit_descriptors(server, 4)
        with Connector(cluster.address, b"node0#1", keys_of(ring, "node0")) as late:
            end = time.monotonic() + 3 * GUARD_EVERY_S
            while time.monotonic() < end:
                assert isinstance(answer(link, encode(StatusQuery(0))), Status)
                assert not late.send([hello(0)])
            limit_descriptors(server, 256)
            assert isinstance(answer(late, hello(0)), NodeWelcome)
    assert server.poll() is None and "Traceback" not in server.output


def test_a_server_takes_as_many_descriptors_as_it_may_have(cluster) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        started = cluster.fresh_server("global", "--global", "--listen", "tcp://127.0.0.1:0")
        started.says("global server on")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(started.pid, resource.RLIMIT_NOFILE) == (min(hard, MAX_DESCRIPTORS), hard)


def zmtp_frame(body: bytes, *, more: bool) -> bytes:
    """Return a long frame as ZMTP 3.1 has it."""
    return struct.pack(">BQ", 2 | more, len(body)) + body


def test_a_message_without_an_end_is_cut_before_it_fills_the_memory(cluster) -> None:
    server = cluster.start_global("--workers", "2")  # whoever may speak could do it; without keys it is shorter
    place = ("127.0.0.1", int(cluster.address.rpartition(":")[2]))
    with Connector(cluster.address, b"node0#1") as link, socket.create_connection(place) as endless:
        assert isinstance(answer(link, hello(0)), NodeWelcome)
        endless.settimeout(scaled(20))
        greeting_signature = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        endless.sendall(greeting_signature + bytes([4, len(ready)]) + ready)
        sent_nbytes, frame = 0, zmtp_frame(bytes(1 << 20), more=True)
        with pytest.raises(OSError):
            while sent_nbytes < 4 << 30:
                endless.sendall(frame)
                sent_nbytes += len(frame)
        assert 256 << 20 < sent_nbytes < 3 << 30
        server.says(golden.pattern("keys.endless_message"))
        assert isinstance(answer(link, encode(StatusQuery(0))), Status)  # the other one is connected again
    assert server.poll() is None
