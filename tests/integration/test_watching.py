"""A run that is watched: what a reader and the view say while workers die and stall, and its server is killed."""

import io
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from rich.console import Console

from lsgd.errors import JoinError
from lsgd.protocol.messages import StopRun
from lsgd.watch import terminal as operate
from lsgd.watch.reader import Reader
from lsgd.watch.view import RunView
from tests import golden

from .running import DEADLINE_S, LIGHT
from .test_crashes import EVERY, JournaledRun, kill


class Watched:
    """A reader with its view, read until something is seen."""

    def __init__(self, address):
        self.reader, self.view = Reader(address), RunView()
        self.restarts = 0

    def until(self, seen, what):
        end = time.monotonic() + DEADLINE_S
        while not seen(self.view):
            assert time.monotonic() < end, f"the view does not show {what}: {list(self.view.log)}"
            batch = self.reader.read(0.5)
            self.restarts += batch.restarted
            self.view.apply(batch)

    def worker(self, index):
        return self.view.workers[f"node0/worker{index}"]


@pytest.fixture
def watch():
    """Return what watches the run at an address."""
    made = []

    def begin(address):
        made.append(Watched(address))
        return made[-1]

    yield begin
    for each in made:
        each.reader.close()


def test_a_run_is_seen_with_its_dead_its_stalled_and_a_killed_server(cluster, watch) -> None:
    run = JournaledRun(cluster, "--workers", "3", "--patience-s", "6", "--lease-s", "60", *EVERY)
    watched = watch(cluster.address)
    watched.until(lambda view: view.now.state == "waiting", "a run that waits")
    local = cluster.start_local()
    hold = cluster.folder / "hold"
    stalls = ((), ("--stall-while", hold), ())
    workers = [cluster.worker("crash", 0, index, "--sleep", 0.01, *stalls[index], **LIGHT) for index in range(3)]
    watched.until(lambda view: len(list(view.rounds)) > 3 and view.rate, "rounds")
    watched.until(lambda view: all(w.totals.last and w.totals.last.sent_nbytes for w in view.workers.values()), "bytes")
    assert (watched.view.now.state, watched.view.now.generation) == ("running", 1)
    assert [worker.rank for worker in watched.view.workers.values()] == [0, 1, 2]
    done = next(each for each in watched.view.rounds if each.state == "completed")
    assert done.took_s is not None and done.sent_nbytes and done.leader in watched.view.workers

    kill(workers[2])
    watched.until(lambda _: watched.worker(2).state == "left", "a worker that is gone")
    assert watched.worker(2).code == "failed" and "process has ended" in watched.worker(2).reason
    assert [(gap.state, gap.end) for gap in watched.worker(2).gaps] == [("left", None)]

    gone = list(watched.view.rounds)[-1].round
    watched.until(lambda view: list(view.rounds)[-1].round > gone + 2, "rounds of those that are left")
    hold.touch()
    watched.until(lambda _: watched.worker(1).state == "straggler", "a straggler")
    assert watched.worker(1).code == "evicted"
    hold.unlink()
    watched.until(lambda _: watched.worker(1).state in ("live", "held"), "the straggler's return")
    assert watched.worker(1).gaps[-1].end is not None

    kill(run.server)
    watched.until(lambda view: not view.connected, "that the server is away")
    known = list(watched.view.rounds)
    run.start_again()
    last = known[-1].round
    watched.until(lambda view: view.connected and list(view.rounds)[-1].round > last, "rounds after the restart")
    assert watched.restarts == 1
    numbers = [each.round for each in watched.view.rounds]
    assert all(after == before + 1 for before, after in pairwise(numbers)) and numbers[: len(known)][-1] == last
    assert watched.worker(2).state == "left"

    watching = subprocess.Popen(
        [sys.executable, "-m", "lsgd.client", "status", "--watch", "--connect", cluster.address],
        stdout=subprocess.PIPE,
        text=True,
    )
    first = watching.stdout.readline()
    assert first.startswith("running: ")
    cluster.ask(StopRun("seen enough"))
    watched.until(lambda view: view.now.state == "over", "the end")
    assert watched.view.now.reason == "seen enough"
    for process in (workers[0], workers[1], run.server, local):
        process.succeeds()
    output, _ = watching.communicate(timeout=DEADLINE_S)
    assert watching.returncode == 0 and "over: seen enough" in output
    console = Console(width=100, file=io.StringIO())
    console.print(operate.view(watched.view))
    table = console.file.getvalue().splitlines()
    header = next(at for at, line in enumerate(table) if line.startswith("worker "))
    assert [line.split()[0] for line in table[header + 1 :][:3]] == [f"node0/worker{index}" for index in range(3)]


def test_a_read_never_takes_longer_than_told_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with Reader("tcp://127.0.0.1:9") as reader:
        for _ in range(3):
            assert not reader.read(0.05).connected
    monkeypatch.setattr("lsgd.watch.reader.ANSWER_WITHIN_S", 0.2)
    with pytest.raises(JoinError, match=golden.pattern("operate.no_answer_9")):
        next(operate.watch("tcp://127.0.0.1:9"))
