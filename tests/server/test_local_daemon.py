"""The local server as a process, between a scripted global server and scripted workers."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from lsgd.protocol.messages import (
    PROTOCOL,
    Join,
    Leave,
    Left,
    NodeHello,
    NodeLeave,
    NodeWelcome,
    Over,
    Pause,
    Refused,
    Request,
    RunOver,
    StatusQuery,
    Waiting,
    WorkerHello,
    WorkerHelloReply,
    decode,
    encode,
)
from lsgd.protocol.processes import pid_namespace
from lsgd.protocol.sockets import Connector, Listener, wait_for
from tests import golden

from ..integration.running import Cluster, Process, free_port, until
from .helpers import greeting


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


class Above:
    """The global server's side of one local server."""

    def __init__(self) -> None:
        self.listener = Listener("tcp://127.0.0.1:0")
        self.peer = b""
        self.got: list[object] = []
        self.requests: list[int] = []  # in each batch

    def hears(self, kind: type) -> object:

        def found() -> object:
            wait_for(0.05, self.listener)
            for peer, frames in self.listener.receive():
                self.peer = peer
                messages = [decode(frame) for frame in frames]
                self.requests.append(sum(isinstance(m, Request) for m in messages))
                self.got += messages
                if any(isinstance(m, NodeHello) for m in messages):
                    self.say(NodeWelcome("run"))
            return next((m for m in self.got if isinstance(m, kind)), None)

        message = until(found, f"a {kind.__name__} comes")
        self.got.remove(message)
        return message

    def say(self, message: object, worker: bytes = b"") -> None:
        assert self.listener.send(self.peer, [worker, encode(message)])  # type: ignore[arg-type]


class Below:
    """A worker's side."""

    def __init__(self, address: str, incarnation: int = 7) -> None:
        self.link = Connector(address, str(incarnation).encode())
        self.got: list[object] = []

    def say(self, *messages: object) -> None:
        frames = [m if isinstance(m, bytes) else encode(m) for m in messages]  # type: ignore[arg-type]
        until(lambda: self.link.send(frames), "the local server takes a message")

    def hears(self, kind: type) -> object:

        def found() -> object:
            wait_for(0.05, self.link)
            for frames in self.link.receive():
                self.got += map(decode, frames)
            return next((m for m in self.got if isinstance(m, kind)), None)

        message = until(found, f"a {kind.__name__} comes")
        self.got.remove(message)
        return message


@pytest.fixture
def above() -> Iterator[Above]:
    made = Above()
    yield made
    made.listener.close()


@pytest.fixture
def local(cluster: Cluster, above: Above) -> Process:
    cluster.address = above.listener.address
    process = cluster.start_local(3)
    hello = above.hears(NodeHello)
    assert isinstance(hello, NodeHello) and (hello.protocol, hello.node, hello.workers) == (PROTOCOL, 3, 1)
    process.says(golden.pattern("server.connected_to_run"))
    return process


@pytest.fixture
def below(cluster: Cluster, local: Process) -> Iterator[Below]:
    made = Below(cluster.local_address(3))
    yield made
    made.link.close()


def request(seq: int) -> Request:
    return Request("node3/worker0", 7, seq, 0, 0, 0, None)


def test_it_says_where_it_is_and_carries_messages_both_ways(above, below, local, cluster) -> None:
    assert golden.text("server.find_it", local_address=cluster.local_address(3)) in local.output
    below.say(WorkerHello(PROTOCOL, 7))
    assert below.hears(WorkerHelloReply) == WorkerHelloReply(3, above.listener.address)
    join = greeting(3, 0, 7)
    below.say(join)
    assert above.hears(Join) == join
    local.says("node3/worker0 joins")
    above.say(Waiting(0, "for the others"), b"7")
    assert below.hears(Waiting) == Waiting(0, "for the others")


def test_what_it_finds_waiting_goes_up_in_one_batch(above, below, local) -> None:
    below.say(*[request(seq) for seq in range(1, 101)])
    while not above.got or above.got[-1] != request(100):
        above.hears(Request)
        if request(100) in above.got:
            break
    assert max(above.requests) == 100


def test_another_protocol_is_refused(below, local) -> None:
    below.say(msgpack.packb([1, PROTOCOL + 1, 7, "a field of the future"]))
    refused = str(below.hears(Refused))
    assert golden.text("server.other_version", ours=PROTOCOL + 1) in refused
    assert golden.text("server.same_release_both") in refused


def test_garbage_does_not_end_it(above, below, local) -> None:
    below.say(b"", b"\x92", b"\x93\x01\xc0\xc0", b"\x92\x03\xc0", b"\x92\x0a\xc0", bytes(300))
    below.say(WorkerHello(PROTOCOL, 7))
    below.hears(WorkerHelloReply)
    assert above.listener.send(above.peer, [b"", b"junk"])
    assert above.listener.send(above.peer, [b"a frame without its pair"])
    assert above.listener.send(above.peer, [b"", b"\x91\x00", b"nobody", b"\x91\x00"])
    below.say(WorkerHello(PROTOCOL, 7))
    below.hears(WorkerHelloReply)
    local.says(golden.pattern("server.invalid_message"))


def test_with_no_global_server_it_tells_the_workers_what_they_wait_for(cluster, above) -> None:
    above.listener.close()
    cluster.address = f"tcp://127.0.0.1:{free_port()}"
    local = cluster.start_local(0)
    below = Below(cluster.local_address(0))
    start = f"lsgd-server --global --listen {cluster.address}"
    by_hand = golden.text("server.start_by_hand", start=start)
    line = golden.text("server.no_answer_by_hand", address=cluster.address, by_hand=by_hand)
    held = [(request(5), 5), (StatusQuery(7), 0), (Pause("node0/worker0", 7, 5, 4), 0)]
    below.say(WorkerHello(PROTOCOL, 7))
    assert below.hears(WorkerHelloReply) == WorkerHelloReply(0, cluster.address)
    below.say(greeting(0, 0, 7))
    assert below.hears(Waiting) == Waiting(0, line, away=True)
    for message, seq in held:
        below.say(message)
        assert below.hears(Waiting) == Waiting(seq, line, away=True)
    local.says(golden.pattern("server.no_answer"))
    below.link.close()
    above.listener = Listener(cluster.address)  # it is started at last
    above.hears(NodeHello)
    local.says(golden.pattern("runs.connected"))
    local.send(signal.SIGTERM)
    local.succeeds()


def test_it_says_at_once_that_a_workers_process_has_ended(above, below, local) -> None:
    process = subprocess.Popen(["sleep", "600"])
    below.say(WorkerHello(PROTOCOL, 7, process.pid, pid_namespace()), greeting(3, 0, 7), request(1))
    above.hears(Request)
    process.kill()
    assert above.hears(Leave) == Leave("node3/worker0", 7, 0, True, golden.text("server.process_ended"))
    local.says(golden.pattern("server.gone"))
    process.wait()


def test_a_process_that_cannot_be_watched_is_none_of_its_business(above, below, local) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    below.say(WorkerHello(PROTOCOL, 7, process.pid, pid_namespace()), greeting(3, 0, 7))
    below.say(WorkerHello(PROTOCOL, 8, os.getpid(), pid_namespace()), WorkerHello(PROTOCOL, 7, os.getpid(), 1))
    below.say(request(1))
    above.hears(Request)
    assert not any(isinstance(m, Leave) for m in above.got)


def test_it_ends_when_the_run_is_over_and_its_workers_have_left(above, below, local) -> None:
    below.say(greeting(3, 0, 7))
    above.hears(Join)
    above.say(RunOver("all is done"))
    leave = above.hears(NodeLeave)
    assert isinstance(leave, NodeLeave) and leave.node == 3
    assert local.poll() is None
    below.say(Leave("node3/worker0", 7, 5, False, "the run is over"))
    below.hears(Left)  # from the local server itself: the global one has gone
    local.succeeds()
    assert golden.text("server.ended") in local.output


def test_who_joins_a_node_that_ends_is_told_that_the_run_is_over(above, below, local) -> None:
    below.say(greeting(3, 0, 7))
    above.hears(Join)
    above.say(RunOver("all is done"))
    above.hears(NodeLeave)
    late = Below(below.link.address, 8)
    late.say(greeting(3, 1, 8))
    assert late.hears(Over) == Over("all is done")
    late.link.close()
    below.say(Leave("node3/worker0", 7, 5, False, "the run is over"))
    local.succeeds()
    assert not any(isinstance(message, Join) for message in above.got)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_makes_its_node_leave(above, below, local, number) -> None:
    below.say(greeting(3, 0, 7))
    above.hears(Join)
    local.send(number)
    leave = above.hears(NodeLeave)
    assert isinstance(leave, NodeLeave)
    assert leave.reason == golden.text("server.local_got_signal", signal=number.name)
    assert above.hears(NodeLeave) == leave, "it says it again until it was heard"
    above.say(Left())
    below.say(Leave("node3/worker0", 7, 5, False, "done"))
    above.hears(Leave)
    above.got.clear()
    above.say(Left(), b"7")
    below.hears(Left)
    assert above.hears(NodeLeave) == leave, "its last word, so that another server of this node is welcome at once"
    assert local.poll() is None
    above.say(Left())
    local.succeeds()


def test_a_global_server_that_is_gone_does_not_keep_a_node_that_leaves(above, local) -> None:
    above.listener.close()
    local.send(signal.SIGTERM)
    local.succeeds()
    above.listener = Listener("tcp://127.0.0.1:0")


def test_a_second_signal_ends_it_at_once(above, below, local) -> None:
    below.say(greeting(3, 0, 7))
    above.hears(Join)
    local.send(signal.SIGTERM)
    above.hears(NodeLeave)
    local.send(signal.SIGTERM)
    assert local.wait() == 3


def test_workers_that_were_refused_or_killed_do_not_keep_it(cluster, above, below, local) -> None:
    below.say(greeting(3, 0, 7))
    above.hears(Join)
    killed = Below(cluster.local_address(3), 8)
    killed.say(greeting(3, 1, 8))
    above.hears(Join)
    above.say(Refused("its model differs"), b"7")
    below.hears(Refused)
    killed.link.close()
    above.say(RunOver("done"))
    local.succeeds()
    assert "did not leave" not in local.output


def test_a_refused_node_ends_with_the_reason(above, local) -> None:
    above.say(Refused("node 3 is alpha already"))
    assert local.wait() == 1
    assert golden.text("node.refused") in local.output
