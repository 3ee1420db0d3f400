"""The global server as a process: what it says, what it survives, and how it ends."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgpack
import pytest

from lsgd.protocol.frames import pack
from lsgd.protocol.messages import (
    MAX_NBYTES,
    PROTOCOL,
    ChangeSettings,
    Endpoint,
    Get,
    Go,
    Left,
    NodeHello,
    NodeLeave,
    NodeWelcome,
    Put,
    Refused,
    Request,
    RunOver,
    Status,
    StatusQuery,
    StopRun,
    Term,
    decode,
    encode,
)
from lsgd.protocol.sockets import Connector, Listener, wait_for
from lsgd.server.coordinator import Coordinator
from lsgd.server.daemon import EXIT_AT_ONCE, Ending
from lsgd.server.global_daemon import GlobalDaemon
from lsgd.server.inputs import Inputs, replay
from lsgd.server.reasons import Why
from lsgd.server.standbys import Standbys
from lsgd.server.state import RunState
from lsgd.server.tenure import Tenure
from tests import golden

from ..integration.running import DEADLINE_S, Cluster, free_port, until
from .helpers import greeting, make_plan
from .served_run import MemoryListener, ServedRun


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


class Peer:
    """A connection to the global server, as a local server has one."""

    def __init__(self, address: str, name: str) -> None:
        self.link = Connector(address, name.encode())
        self.got: list[tuple[bytes, object]] = []

    def say(self, *frames: bytes) -> None:
        until(lambda: self.link.send(frames), "the server takes a message")

    def hears(self, kind: type) -> tuple[bytes, object]:
        """Return the next message of a kind, with the worker that it is for."""

        def found() -> tuple[bytes, object] | None:
            wait_for(0.05, self.link)
            for frames in self.link.receive():
                self.got += zip(frames[::2], map(decode, frames[1::2]), strict=True)
            return next(((who, m) for who, m in self.got if isinstance(m, kind)), None)

        pair = until(found, f"a {kind.__name__} comes")
        self.got.remove(pair)
        return pair


@pytest.fixture
def peer(cluster: Cluster) -> Iterator[Peer]:
    """A local server's connection to a global server that waits for one worker."""
    cluster.start_global()
    made = Peer(cluster.address, "node0#1")
    yield made
    made.link.close()


def hello(node: int = 0, incarnation: int = 1, host: str = "here") -> bytes:
    return encode(NodeHello(PROTOCOL, node, incarnation, host, "0.1.0"))


def test_it_says_where_it_listens_and_how_to_join_it(cluster) -> None:
    server = cluster.start_global("--workers", "3", "--algorithm", "local")
    line = server.says(r"^\d\d:\d\d:\d\d lsgd \S+ global server on (\S+), local, waits for 3 workers; (.*)$")
    assert line[2] == golden.text("server.join_with", address=line[1])
    assert cluster.status()["state"] == "waiting"
    assert cluster.status()["reason"] == Why.JOINING(here=0, wanted=3, missing="")


@pytest.mark.parametrize("end", [(), ("--iterations", "5"), ("--seconds", "5")])
def test_a_run_without_an_end_says_what_ends_it(cluster, end) -> None:
    server = cluster.start_global(*end)
    cluster.status()  # all that is said at the start has been said
    server.send(signal.SIGTERM)
    output = server.succeeds()
    said = golden.text("server.end_others", address=cluster.address)
    assert (said in output) is not bool(end)


def test_a_server_for_every_interface_tells_others_to_write_its_address_and_to_trust_it(cluster) -> None:
    server = cluster.server("global", "--global", "--listen", "tcp://0.0.0.0:0", "--insecure")
    server.says(golden.pattern("server.join_where"))
    server.says(golden.pattern("server.end_where"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_that_nobody_is_in(cluster, number) -> None:
    server = cluster.start_global()
    server.send(number)
    server.succeeds()
    assert golden.text("server.got_signal", signal=number.name) in server.output


def test_a_second_signal_ends_it_at_once(cluster, peer) -> None:
    (server,) = cluster.processes
    peer.say(hello(), encode(greeting(0, 0)))
    server.says("node0/worker0 joins")
    server.send(signal.SIGTERM)
    server.says(golden.pattern("server.stopping_by_sigterm"))
    assert server.poll() is None
    server.send(signal.SIGTERM)
    assert server.wait() == 3
    assert golden.text("server.second_signal") in server.output


def test_an_operator_stops_the_run(cluster) -> None:
    server = cluster.start_global()
    answer = cluster.ask(StopRun("enough"))
    assert isinstance(answer, Status)
    server.succeeds()
    assert Why.ENDED(reason="enough") in server.output


def test_a_frame_that_is_too_large_is_not_even_taken_in(cluster, peer) -> None:
    (server,) = cluster.processes
    peer.say(bytes(2 * MAX_NBYTES))  # its connection is cut, and made again

    def welcome() -> bool:
        peer.link.send([hello()])
        wait_for(0.2, peer.link)
        return any(isinstance(decode(frames[1]), NodeWelcome) for frames in peer.link.receive())

    until(welcome, "the server hears the peer again")
    assert "dropped a message" not in server.output


def test_a_setting_beyond_64_bits_is_refused(cluster, peer) -> None:
    answer = cluster.ask(ChangeSettings({"iterations": str(10**20)}))
    assert isinstance(answer, Refused) and "beyond" in answer.reason
    assert cluster.status()["state"] == "waiting"


def test_a_count_beyond_64_bits_does_not_end_it(cluster) -> None:
    server = cluster.start_global("--workers", "3")
    peer, workers = Peer(cluster.address, "node0#1"), [f"node0/worker{index}" for index in range(3)]
    peer.say(hello(), *(encode(greeting(0, index)) for index in range(3)))
    peer.say(*(encode(Request(worker, 1, 1, 0, 0, 0, None)) for worker in workers))
    peer.hears(Go)
    peer.say(*(encode(Request(worker, 1, 2, (1 << 63) - 1, 1, 0, None)) for worker in workers))
    server.says(golden.pattern("server.go_not_encoded"))
    assert cluster.status()["count"] == 3 * ((1 << 63) - 1)
    peer.link.close()


def test_garbage_does_not_end_it(cluster, peer) -> None:
    (server,) = cluster.processes
    host, port = cluster.address.removeprefix("tcp://").split(":")
    for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\xff" + b"\0" * 8 + b"\x7f", b""):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(junk)
    for frame in (
        b"",
        b"\x00",
        os.urandom(500),
        msgpack.packb([3, 1]),
        msgpack.packb([6, *[[]] * 7]),
        b"\x91\xcc\xff",
    ):
        peer.say(frame, frame)
    peer.say(*[os.urandom(30)] * 3000)
    peer.say(encode(NodeWelcome("not for a server")), encode(Refused("nor this")))
    peer.say(encode(StatusQuery(0)))
    assert isinstance(peer.hears(Status)[1], Status)
    server.says(golden.pattern("server.dropped"))  # its output may come after its answer
    assert server.output.count(golden.text("server.dropped")) == 1  # once a peer


def test_a_frame_that_is_too_long_ends_only_its_own_connection(cluster, peer) -> None:
    peer.say(bytes(2 << 20))
    assert cluster.status()["state"] == "waiting"


def test_another_protocol_is_refused_with_both_sides_named(cluster, peer) -> None:
    (server,) = cluster.processes
    peer.say(msgpack.packb([4, PROTOCOL + 1, 0, 1, "here", "9.0.0", "a field of the future"]))
    who, refused = peer.hears(Refused)
    assert who == b""
    theirs, ours = golden.text("server.node0_version", ours=PROTOCOL + 1), f"speaks {PROTOCOL} (lsgd"
    assert theirs in str(refused) and f"on {socket.gethostname()} {ours}" in str(refused)
    assert golden.text("server.same_release") in str(refused)
    server.says("refused node0 speaks")
    assert cluster.status()["members"] == []


class Answers(MemoryListener):
    """Keeps what is sent, by peer."""

    def __init__(self) -> None:
        super().__init__(cast(ServedRun, None))
        self.sent: defaultdict[bytes, list[tuple[bytes, object]]] = defaultdict(list)

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        self.sent[peer] += zip(frames[::2], map(decode, frames[1::2]), strict=True)
        return True


@pytest.mark.parametrize("number", [2, 0])
def test_a_second_node_of_the_same_index_is_refused_while_the_first_is_there(monkeypatch, number) -> None:
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)
    link, seconds = Answers(), itertools.count(1.0)
    state = RunState(make_plan(workers=1), "run")
    daemon = GlobalDaemon(Coordinator(state), cast(Listener, link), watches_memory=False)

    def answers(peer: bytes, *frames: bytes) -> list[tuple[bytes, object]]:
        """Return what a peer is told that says this, a second after the last one."""
        link.arrived.append((peer, list(frames)))
        daemon.turn(next(seconds))
        return link.sent.pop(peer, [])

    alpha, beta = hello(host="alpha"), hello(incarnation=number, host="beta")
    assert isinstance(answers(b"node0#1", alpha)[0][1], NodeWelcome)
    second = b"node0#%d" % number
    strange = encode(NodeLeave(0, number, "a stranger's word"))
    assert answers(second, beta, strange) == []  # the first may have died
    assert isinstance(answers(b"node0#1", alpha)[0][1], NodeWelcome)
    ((_, refused),) = answers(second, beta)
    assert isinstance(refused, Refused)
    assert golden.text("server.index_taken") in refused.reason
    for _ in range(2):  # the answer may be lost
        assert answers(b"node0#1", encode(NodeLeave(0, 1, "done"))) == [(b"", Left())]
    assert isinstance(answers(second, beta)[0][1], NodeWelcome)


def test_a_node_whose_connection_has_closed_is_replaced_at_once(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)
    link, inputs = Answers(), Inputs(tmp_path)
    coordinator = Coordinator(RunState(make_plan(), "run"))
    daemon = GlobalDaemon(coordinator, cast(Listener, link), inputs=inputs, watches_memory=False)
    for peer, incarnation, gone in ((b"node0#1", 1, []), (b"node1#1", 1, []), (b"node1#2", 2, [b"node1#1"])):
        link.gone += gone
        daemon.turn(0.5 * incarnation)
        link.arrived.append((peer, [hello(int(peer[4:5]), incarnation)]))
        daemon.turn(0.5 * incarnation)
        assert isinstance(link.sent[peer][-1][1], NodeWelcome)
    assert daemon.coordinator.state.roster.closed_at == {1: 1.0}
    inputs.close()
    assert "the connection of node1 closes" in [said for _, said, _, _ in replay(tmp_path)]


def test_a_run_that_ends_keeps_its_settings(monkeypatch) -> None:
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)
    link = Answers()
    daemon = GlobalDaemon(Coordinator(RunState(make_plan(), "run")), cast(Listener, link), watches_memory=False)
    for now, order in enumerate((StopRun("enough"), ChangeSettings({"iterations": "9"}))):
        link.arrived.append((b"operator", [encode(order)]))
        daemon.turn(float(now))
    assert link.sent[b"operator"][-1][1] == Refused(golden.text("server.ending"))


def test_a_server_that_takes_over_answers_nobody_before_its_own_node_follows_it(monkeypatch) -> None:
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)
    link, seconds = Answers(), itertools.count(1.0)
    state = RunState(make_plan(), "run", tenure=Tenure((Term(1, 0), Term(2, 1)), took_over=True))
    standbys = Standbys(Endpoint(1, "tcp://10.0.0.2:1"))
    daemon = GlobalDaemon(Coordinator(state), cast(Listener, link), standbys=standbys, watches_memory=False)

    def are_welcome(**said: bytes) -> list[str]:
        link.arrived += [(peer.encode(), [frame]) for peer, frame in said.items()]
        daemon.turn(next(seconds))
        heard = {peer for peer, words in link.sent.items() if any(isinstance(word, NodeWelcome) for _, word in words)}
        link.sent.clear()
        return sorted(peer.decode() for peer in heard)

    looks = {node: encode(NodeHello(PROTOCOL, node, 1, "here", "0.1.0", looks=True)) for node in (1, 2)}
    assert are_welcome(node2=looks[2], node3=hello(3)) == []
    assert are_welcome(node1=looks[1]) == ["node1"]
    assert are_welcome(node2=looks[2]) == []
    assert are_welcome(node1=hello(1)) == ["node1", "node2", "node3"]
    assert are_welcome(node2=looks[2]) == ["node2"]


@pytest.mark.parametrize(("heard_for_s", "lasts_s"), [(0, 2.3), (6, 8.3), (60, 15.3)])
def test_a_node_that_is_heard_is_told_of_the_end_until_it_is_silent(monkeypatch, heard_for_s, lasts_s) -> None:
    link, clock = Answers(), [100.0]

    def wait(seconds: float, *_: object) -> None:
        clock[0] += seconds
        if clock[0] - 100 <= heard_for_s:
            link.arrived.append((b"node0#1", [hello()]))  # what it is told does not arrive

    monkeypatch.setattr("lsgd.server.global_daemon.wait_for", wait)
    monkeypatch.setattr("lsgd.server.global_daemon.time", SimpleNamespace(monotonic=lambda: clock[0]))
    daemon = GlobalDaemon(Coordinator(RunState(make_plan(), "run")), cast(Listener, link), watches_memory=False)
    link.arrived += [(b"node0#1", [hello()]), (b"operator", [encode(StopRun("enough"))])]
    assert daemon.run(Ending()) == 0
    assert RunOver("enough", 0) in [message for _, message in link.sent[b"node0#1"]]
    assert clock[0] - 100 == pytest.approx(lasts_s, abs=0.3)


def test_nodes_of_another_stage_are_none_of_this_one() -> None:
    link = Answers()
    daemon = GlobalDaemon(Coordinator(RunState(make_plan(), "f00d-stage2")), cast(Listener, link), watches_memory=False)

    def says(node: int, stage: int, now: float) -> list[object]:
        link.sent.clear()
        link.arrived.append((b"node%d#1" % node, [encode(NodeHello(PROTOCOL, node, 1, "here", "0.1.0", stage=stage))]))
        daemon.turn(now)
        return [message for _, message in link.sent[f"node{node}#1".encode()]]

    assert [type(message) for message in says(1, 2, 100.0)] == [NodeWelcome]
    assert says(2, 1, 100.1) == [RunOver(golden.text("stages.over"), 1)]  # it has missed its end
    assert says(1, 3, 100.2) == []  # it has gone on
    assert [type(message) for message in says(2, 0, 100.3)] == [NodeWelcome]  # it asks which one there is
    assert daemon.coordinator.state.gathering.announced == {2: 1}


def test_a_node_whose_server_was_killed_is_taken_over_by_the_next_one(cluster, peer) -> None:
    peer.say(hello(incarnation=1))
    peer.hears(NodeWelcome)
    peer.link.close()
    cluster.start_local(0).says(golden.pattern("runs.connected"))


def test_a_join_waits_until_its_node_is_known(cluster, peer) -> None:
    peer.say(encode(greeting(0, 0)))
    assert cluster.status()["members"] == []
    peer.say(hello(), encode(greeting(0, 0)))
    until(lambda: [m["worker"] for m in cluster.status()["members"]] == ["node0/worker0"], "it is a member")


def test_the_rendezvous_needs_a_generation(cluster, peer) -> None:
    peer.say(hello(), encode(Put("node0/worker0", 1, 1, "key", b"x")), encode(Get("node0/worker0", 1, 1, "key")))
    peer.hears(NodeWelcome)
    peer.say(encode(StatusQuery(0)))
    peer.hears(Status)
    assert peer.got == []


def test_a_taken_port_and_a_foreign_address_are_told(cluster, tmp_path) -> None:
    with Listener("tcp://127.0.0.1:0") as listener:
        server = cluster.server("taken", "--global", "--listen", listener.address)
        assert server.wait() == 2
        assert golden.text("server.taken", address=listener.address, pid=os.getpid()) in server.output
    server = cluster.server("foreign", "--global", "--listen", "tcp://192.0.2.1:0", "--insecure")
    assert server.wait() == 2
    assert golden.text("server.no_address") in server.output


def test_it_writes_the_plan_as_used(cluster, tmp_path) -> None:
    path = tmp_path / "plan.toml"
    cluster.start_global("--iterations", "7", "--save-plan", str(path))
    again = tmp_path / "again.toml"
    cluster.start_global("--plan", str(path), "--save-plan", str(again))
    assert "iterations = 7" in path.read_text()
    assert again.read_text() == path.read_text()


def test_a_closed_terminal_is_no_reason_to_stay(tmp_path) -> None:
    """The line at the start goes to a pipe nobody reads: the server must still end by a signal."""
    server = subprocess.Popen(
        [sys.executable, "-m", "lsgd.server", "--global", "--listen", "tcp://127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert server.stdout
    server.stdout.readline()
    server.stdout.close()
    server.send_signal(signal.SIGTERM)
    assert server.wait(DEADLINE_S) == 0


def test_output_that_nobody_reads_keeps_nobody_waiting(cluster) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"\0")
    os.set_blocking(writing, True)
    cluster.address = f"tcp://127.0.0.1:{free_port()}"
    server = subprocess.Popen(
        [sys.executable, "-m", "lsgd.server", "--global", "--listen", cluster.address],
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    try:
        assert cluster.status()["state"] == "waiting"
        peer = Peer(cluster.address, "node0#1")
        peer.say(b"\x00", hello(), encode(greeting(0, 0)))
        until(lambda: [m["worker"] for m in cluster.status()["members"]] == ["node0/worker0"], "it is a member")
        peer.link.close()
        assert isinstance(cluster.ask(StopRun("enough")), Status)
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGINT)
        assert server.wait(DEADLINE_S) == EXIT_AT_ONCE
    finally:
        server.kill()
        os.close(reading)


FLOOD = pack([b"\x00"] * 65_000) * 40
"""Messages of one peer that take a server many seconds, and are not too many to wait."""


def test_a_peer_that_sends_much_keeps_no_signal_waiting(cluster, peer) -> None:
    (server,) = cluster.processes
    peer.say(hello())
    peer.hears(NodeWelcome)
    peer.link._socket.send_multipart([*FLOOD, encode(StopRun("the flood is over"))])
    server.says(golden.pattern("server.dropped"))
    server.send(signal.SIGTERM)
    server.succeeds()
    assert Why.ENDED(reason="the global server got SIGTERM") in server.output


def test_a_peer_that_sends_much_keeps_no_other_waiting(cluster, peer) -> None:
    (server,) = cluster.processes
    peer.say(hello())
    peer.hears(NodeWelcome)
    peer.link._socket.send_multipart([*FLOOD, encode(StopRun("the flood is over"))])
    server.says(golden.pattern("server.dropped"))
    assert cluster.status()["state"] == "waiting"
    server.send(signal.SIGTERM)
    server.succeeds()
