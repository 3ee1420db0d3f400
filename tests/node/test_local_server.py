"""What the local server of a launcher tells it and does for it: the words that need no global server."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lsgd.errors import ConfigError
from lsgd.node.candidates import Candidates
from lsgd.node.farewell import LAST_LEAVE_WITHIN_S, LEAVE_WITHIN_S
from lsgd.node.local_server import LocalServer
from lsgd.node.uplink import SILENT_AFTER_S
from lsgd.protocol.messages import (
    LOOP_ENDED,
    PROTOCOL,
    Endpoint,
    GivenUp,
    Join,
    Leave,
    Left,
    NodeHello,
    NodeWelcome,
    Over,
    Refused,
    Request,
    RunOver,
    Status,
    Stop,
    StopRun,
    Term,
    Waiting,
    WorkerHello,
    WorkerHelloReply,
    decode,
    encode,
)
from lsgd.protocol.processes import pid_namespace
from lsgd.protocol.socket_folder import ISLAND_NAME, SOCKET_NAME, socket_folder
from lsgd.protocol.sockets import Connector, Listener, default_local_address
from lsgd.server.daemon import TICK_S
from tests import golden

from ..integration.running import until
from ..server.helpers import greeting

REQUEST = Request("node3/worker0", 7, 1, 0, 0, 0, None)


class Between:
    """A local server, turned by hand, between a global server and a worker that the test plays, on a clock it moves."""

    def __init__(self) -> None:
        token = secrets.token_hex(4)
        above, below = f"inproc://above-{token}", f"inproc://below-{token}"
        self.listener, self.workers = Listener(above), Listener(below)
        link, self.worker = Connector(above, b"node3#5"), Connector(below, b"7")
        self.open = [self.worker, link, self.workers, self.listener]
        self.said: list[str] = []
        self.now = 1000.0
        self.complained: list[str] = []
        candidates = Candidates(3, lambda place: self.worker, lambda address, now, since: None)

        def complain(text: str) -> None:
            self.said.append(text)
            self.complained.append(text)

        self.server = LocalServer(
            3,
            5,
            self.workers,
            link,
            say=self.said.append,
            complain=complain,
            candidates=candidates,
            clock=lambda: self.now,
        )
        self.above: list[object] = []
        self.below: list[object] = []

    def turn(self) -> None:
        self.now += TICK_S
        self.server.turn()
        self.above += [decode(frame) for _, frames in self.listener.receive() for frame in frames]
        self.below += [decode(frame) for frames in self.worker.receive() for frame in frames]

    def until(self, condition: Callable[[], object], what: str) -> None:
        def seen() -> object:
            self.turn()
            return condition()

        until(seen, what)

    def join(self) -> None:
        self.until(lambda: any(isinstance(m, NodeHello) for m in self.above), "a greeting comes")
        self.say(NodeWelcome("run"))
        self.until(lambda: "connected to the global server" in "".join(self.said), "it is welcome")
        self.worker.send([encode(greeting(3, 0, 7))])
        self.until(lambda: any(isinstance(m, Join) for m in self.above), "a join comes")

    def say(self, message: object, worker: bytes = b"") -> None:
        assert self.listener.send(b"node3#5", [worker, encode(message)])  # type: ignore[arg-type]


@pytest.fixture
def between() -> Iterator[Between]:
    made = Between()
    yield made
    for each in made.open:
        each.close()


def test_a_run_is_stopped_by_words_that_are_repeated_until_they_are_heard(between) -> None:
    between.join()
    between.server.stop_run("Ctrl-C")
    between.until(lambda: between.above.count(StopRun("Ctrl-C")) == 2, "it is said twice")
    between.say(Status("{}"))
    between.until(lambda: isinstance(between.above[-1], NodeHello), "it is said no more")


def test_a_worker_with_a_number_that_no_process_has_is_answered(between) -> None:
    between.worker.send([encode(WorkerHello(PROTOCOL, 7, 1 << 40, pid_namespace()))])
    between.until(lambda: [m for m in between.below if isinstance(m, WorkerHelloReply)], "an answer comes")


def test_a_node_whose_processes_do_not_join_says_so_every_minute(between) -> None:
    between.until(lambda: any(isinstance(m, NodeHello) for m in between.above), "a greeting comes")
    between.say(NodeWelcome("run"))
    between.until(lambda: "connected to the global server" in "".join(between.said), "it is welcome")
    began = 1000.0
    for minute in (1, 2):
        for between.now in (began + 60 * minute + 1, began + 60 * minute + 30):
            between.turn()
        (*_, last) = said = [line for line in between.complained if "has joined for" in line]
        assert len(said) == minute and f"has joined for {60 * minute + 1}" in last and "call lsgd.wrap" in last
    between.join()
    between.now = began + 200
    between.turn()
    assert len([line for line in between.said if "has joined for" in line]) == 2


@pytest.mark.parametrize(
    ("places", "remedy"),
    [
        ((Endpoint(0, "tcp://10.0.0.1:1"), Endpoint(1, "tcp://10.0.0.2:1")), golden.text("node.node1_serves")),
        ((), golden.text("node.restart_journal")),
    ],
)
def test_who_waits_for_the_global_server_says_what_will_happen_or_what_to_do(between, places, remedy) -> None:
    between.until(lambda: any(isinstance(m, NodeHello) for m in between.above), "a greeting comes")
    between.say(NodeWelcome("run", (Term(1, 0),), 5, places))
    between.until(lambda: between.server.following.uplink.heard_at, "it is welcome")
    between.now += SILENT_AFTER_S
    between.until(lambda: any("has been silent" in line for line in between.said), "it says so")
    assert remedy in between.said[-1]


@pytest.mark.parametrize("stays", [True, False])
def test_the_last_request_that_could_not_be_forwarded_goes_up_as_soon_as_the_server_answers(between, stays) -> None:
    between.join()
    for _ in range(int(SILENT_AFTER_S / TICK_S) + 2):
        between.turn()
    later = replace(REQUEST, seq=2, done=1)
    for request in (REQUEST, later):
        between.worker.send([encode(request)])
        between.until(
            lambda seq=request.seq: seq in [m.seq for m in between.below if isinstance(m, Waiting)], "it is held"
        )
    if not stays:  # its process ends meanwhile: a round with it would fail
        between.server.workers.here.clear()
    between.say(NodeWelcome("run"))
    between.until(lambda: between.server.following.uplink.heard_at == between.now, "the server is heard")
    between.until(lambda: later in between.above or not stays, "it is carried")
    for _ in range(3):
        between.turn()
    assert [m for m in between.above if isinstance(m, Request)] == [later] * stays


def test_late_words_over_a_connection_that_was_replaced_make_nobody_a_worker_here(between) -> None:
    between.until(lambda: any(isinstance(m, NodeHello) for m in between.above), "a greeting comes")
    between.say(NodeWelcome("run"))
    between.until(lambda: "connected to the global server" in "".join(between.said), "it is welcome")
    with Connector(between.workers.address, b"\x00k\x8bEg") as replaced:
        replaced.send([encode(REQUEST)])
        between.until(lambda: any(isinstance(m, Request) for m in between.above), "the request is carried")
    assert not any("here already" in line for line in between.said)
    between.worker.send([encode(REQUEST)])
    between.until(lambda: any("here already" in line for line in between.said), "the worker is noted")


def test_workers_are_given_up_at_once_and_whenever_they_ask(between) -> None:
    between.join()
    between.server.workers.give_up()
    between.until(lambda: GivenUp() in between.below, "it is told")
    between.below.clear()
    between.worker.send([encode(REQUEST)])
    between.until(lambda: GivenUp() in between.below, "it is told again")


def test_who_still_asks_long_after_the_end_of_the_run_is_given_up(between) -> None:
    between.join()
    between.say(RunOver("all is done"))
    between.until(lambda: between.server.of_run.over, "the run is over")
    between.worker.send([encode(REQUEST)])
    between.turn()
    assert GivenUp() not in between.below
    between.now += LEAVE_WITHIN_S + 1
    between.worker.send([encode(REQUEST)])
    between.until(lambda: GivenUp() in between.below, "nobody will answer")


@pytest.mark.parametrize(("reason", "ended"), [(LOOP_ENDED, set()), ("it has completed its", {"node3/worker0"})])
def test_it_knows_who_has_joined_and_who_has_left_in_order(between, reason, ended) -> None:
    between.join()
    assert between.server.workers.joined == {"node3/worker0"} and between.server.workers.ended == set()
    between.worker.send([encode(Leave("node3/worker0", 7, 5, False, reason))])
    between.until(lambda: any(isinstance(m, Leave) for m in between.above), "a leave comes")
    assert between.server.workers.ended == ended


def test_it_knows_who_has_heard_of_the_end(between) -> None:
    between.join()
    between.say(Stop(1, None, "all is done"), b"7")
    between.until(lambda: between.server.workers.ended == {"node3/worker0"}, "the worker has heard it")


def test_who_joins_too_late_has_heard_of_the_end_too(between) -> None:
    between.server.end("the node leaves")
    between.worker.send([encode(greeting(3, 0, 7))])
    between.until(lambda: Over("the node leaves") in between.below, "it is told")
    assert between.server.workers.ended == {"node3/worker0"}


def test_a_global_server_that_is_gone_does_not_keep_a_node_that_leaves(between) -> None:
    between.until(lambda: any(isinstance(m, NodeHello) for m in between.above), "a greeting comes")
    between.say(NodeWelcome("run"))
    between.until(lambda: between.server.following.uplink.heard_at, "it is welcome")
    began = between.now
    between.server.end("the node leaves")
    between.until(lambda: between.server.finished, "it has ended")
    assert between.now - began < LAST_LEAVE_WITHIN_S + 1.0


def test_a_refused_node_says_why(between) -> None:
    between.join()
    between.say(Refused("node 3 is alpha already"))
    between.until(lambda: between.server.failure, "it is refused")
    assert between.server.failure == golden.text("node.refused")


class TestStages:
    """Workers that come for the next stage of the run."""

    STAGE2 = encode(WorkerHello(PROTOCOL, 8, stage=2))

    @pytest.fixture
    def open(self, between) -> Between:
        between.server = LocalServer(
            *(3, 5, between.workers, between.server.following.uplink.link),
            say=between.said.append,
            complain=between.said.append,
            candidates=between.server.following.candidates,
            clock=lambda: between.now,
            stages=True,
        )
        between.join()
        return between

    def test_one_waits_until_this_one_is_over_for_all(self, open) -> None:
        open.worker.send([self.STAGE2])
        open.until(lambda: [m for m in open.below if isinstance(m, Waiting)], "it is told to wait")
        assert open.server.of_run.wanted and not open.server.next_is_due
        open.say(RunOver("all is done", 2))
        open.until(lambda: open.server.of_run.over, "the run is over")
        assert not open.server.next_is_due  # node3/worker0 has yet to leave
        open.worker.send([encode(Leave("node3/worker0", 7, 5, False, "it has completed its last round"))])
        open.until(lambda: open.server.next_is_due, "it begins")
        assert open.server.next_run == "run-stage2"
        open.below.clear()
        open.worker.send([encode(greeting(3, 0, 9))])  # of a process that was started again meanwhile
        open.until(lambda: open.below, "it is answered")
        assert isinstance(open.below[0], Waiting)

    @pytest.mark.parametrize("stopped", [True, False])
    def test_there_is_none_after_a_stop_or_where_the_node_leaves(self, open, stopped) -> None:
        if stopped:
            open.say(RunOver("an operator's order", 0))
            open.until(lambda: open.server.of_run.over, "the run is over")
        else:
            open.server.end("this node leaves")
        open.worker.send([self.STAGE2])
        open.until(lambda: [m for m in open.below if isinstance(m, Over)], "it is told so")
        assert not open.server.of_run.wanted

    def test_its_local_server_lets_those_of_the_one_before_leave(self, open) -> None:
        former = open.server
        former.workers.ended.add("node3/worker0")
        open.server = LocalServer(
            *(3, 6, open.workers, former.following.uplink.link),
            say=open.said.append,
            complain=open.said.append,
            candidates=Candidates(3, lambda place: open.worker, lambda address, now, since: None),
            clock=lambda: open.now,
            stages=True,
            former=former,
        )
        assert open.server.stage == 2 and open.server.workers.ended == {"node3/worker0"}
        open.above.clear()
        open.worker.send([encode(Leave("node3/worker0", 7, 5, False, "late"))])
        open.until(lambda: Left() in open.below, "it may end")
        open.worker.send([encode(REQUEST)])
        open.until(lambda: GivenUp() in open.below, "nobody will answer it")
        assert {type(message) for message in open.above} <= {NodeHello}
        open.worker.send([self.STAGE2])
        open.until(lambda: [m for m in open.below if isinstance(m, WorkerHelloReply)], "another one is welcome")


class TestFolders:
    """The folders of sockets, in a place where others may write too."""

    def test_what_a_killed_process_has_left_is_deleted_and_nothing_else(self, monkeypatch) -> None:
        with tempfile.TemporaryDirectory(dir="/tmp") as base:
            monkeypatch.setattr(tempfile, "tempdir", base)
            code = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from lsgd.protocol.socket_folder import *; "
            code += "import socket; folder = socket_folder(); socket.socket(socket.AF_UNIX).bind(f'{folder}/local'); "
            code += "print(folder, flush=True); sys.stdin.read()"
            command = [sys.executable, "-c", code, base]
            processes = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
            ]
            killed, lives = (Path(process.stdout.readline().strip()) for process in processes)  # type: ignore[union-attr]
            processes[0].kill()
            processes[0].wait()
            other = Path(base, "lsgd-of-another")
            other.mkdir()
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(other / "local"))
            assert killed.exists()
            mine = socket_folder()
            assert sorted(os.listdir(base)) == sorted(path.name for path in (other, lives, mine))
            processes[1].communicate()
            for process in processes:
                process.stdout.close()  # type: ignore[union-attr]
                process.stdin.close()  # type: ignore[union-attr]

    @pytest.mark.parametrize("nbytes", [85, 86, 87, 200])
    def test_every_socket_fits_into_it_however_long_the_name_of_the_temporary_folder(self, monkeypatch, nbytes) -> None:
        with tempfile.TemporaryDirectory(dir="/tmp") as base:
            long = Path(base, "x" * (nbytes - len(base) - 1))
            long.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(long))
            folder = socket_folder()
            assert folder.is_relative_to(long) == (nbytes <= 86)
            for name in (SOCKET_NAME, ISLAND_NAME):
                with Listener(f"ipc://{folder / name}"):
                    assert (folder / name).is_socket()
            shutil.rmtree(folder)

    def test_a_folder_with_a_name_is_found_again(self) -> None:
        name = secrets.token_hex(4)
        folder = socket_folder(name)
        assert socket_folder(name) == folder and folder.name == f"lsgd.{name}"
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.rmdir()

    def test_a_folder_with_a_name_that_is_another_user_s_is_refused(self, monkeypatch) -> None:
        name = secrets.token_hex(4)
        folder = socket_folder(name)
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        with pytest.raises(ConfigError, match="is another user's"):
            socket_folder(name)
        folder.rmdir()

    @pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o777, True)])
    def test_a_default_folder_that_others_can_write_is_refused(self, monkeypatch, tmp_path, mode, refused) -> None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        folder = tmp_path / f"lsgd-{os.getuid()}"
        assert default_local_address() == f"ipc://{folder}/lsgd-local.sock"
        folder.mkdir()
        folder.chmod(mode)
        if refused:
            with pytest.raises(ConfigError, match=golden.pattern("node.not_yours")):
                default_local_address()
        else:
            assert default_local_address().endswith("/lsgd-local.sock")

    def test_a_default_folder_of_another_user_is_refused(self, monkeypatch, tmp_path) -> None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        other = os.getuid() + 1
        (tmp_path / f"lsgd-{other}").mkdir()
        monkeypatch.setattr(os, "getuid", lambda: other)
        with pytest.raises(ConfigError, match=golden.pattern("node.not_yours")):
            default_local_address()
