"""Runs whose members change all the time, or come to odd ends: nothing is left behind, and what is made counts."""

import random
from pathlib import Path

import pytest

from lsgd.protocol.messages import StopRun
from tests import golden

from ..speed import SLOWNESS
from .running import Cluster, Process, until
from .test_crashes import EVERY, finish, kill, steps, trains

CHANGES = 50
WARM_UP_CHANGES = 15
GROWTH_KIB = 8192
"""What a process may hold more after all changes: allocators keep some of what they got, the worker has its notes."""


def holds(process: Process) -> tuple[int, int, int]:
    """Return how many descriptors and threads a process has, and its resident memory in KiB."""
    folder = Path(f"/proc/{process.pid}")
    (resident,) = (line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return len([*(folder / "fd").iterdir()]), len([*(folder / "task").iterdir()]), int(resident.split()[1])


class Churn:
    """Workers beside one that stays: they come in threes, and each leaves, pauses and leaves, or is killed."""

    def __init__(self, cluster: Cluster, server: Process, seed: int) -> None:
        self._cluster, self._server, self._random = cluster, server, random.Random(seed)
        self.changes = {"join": 0, "leave": 0, "pause": 0, "kill": 0}

    def wave(self) -> None:
        """Let three come and go, and wait until the run has only the one that stays."""
        fates = self._random.choices(["leave", "pause", "kill"], k=3)
        workers = [self._start(index, fate) for index, fate in enumerate(fates, start=1)]
        self._heard("join", len(fates), r" joins from ")
        doomed = [worker for worker, fate in zip(workers, fates, strict=True) if fate == "kill"]
        for worker in doomed:
            worker.says(r"generation \d+: rank")
        kill(*doomed)
        for worker in workers:
            assert worker in doomed or worker.succeeds()
        self._heard("kill", len(doomed), r" leaves: failed: its process has ended")
        self._heard("leave", len(fates) - len(doomed), r" leaves: its training loop ended")
        self.changes["pause"] += fates.count("pause")

    def _start(self, index: int, fate: str) -> Process:
        after = self._random.randint(4, 20)
        flags = {
            "leave": ("--break-at", after),
            "pause": ("--pause-at", after, "--nap", 0.3, "--break-at", after + 5),
            "kill": (),
        }
        return self._cluster.worker("train", 0, index, "--sleep", 0.02, *flags[fate])

    def _heard(self, change: str, more: int, line: str) -> None:
        """Wait until the server has told of so many more changes of a kind."""
        self.changes[change] += more
        wanted = self.changes[change]
        until(lambda: self._server.output.count(line) >= wanted, f"{wanted} times {line!r}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_50_changes_of_membership_leave_nothing_behind(cluster) -> None:
    deadlines = ("--lease-s", str(20 * SLOWNESS), "--exchange-timeout-s", str(20 * SLOWNESS))
    server, (local,) = cluster.start("--workers", "1", *deadlines, *EVERY)
    stays = cluster.worker("train", 0, 0, "--sleep", 0.02)
    trains(cluster)
    churn = Churn(cluster, server, seed=5)
    while sum(churn.changes.values()) < WARM_UP_CHANGES:
        churn.wave()
    trains(cluster)
    before = {process.name: holds(process) for process in (server, local, stays)}
    while sum(churn.changes.values()) < WARM_UP_CHANGES + CHANGES:
        churn.wave()
    assert all(churn.changes.values()), churn.changes
    trains(cluster)
    for process in (server, local, stays):
        descriptors, threads, resident_kib = before[process.name]
        until(lambda p=process, d=descriptors, t=threads: holds(p)[0] <= d and holds(p)[1] <= t, process.name)
        assert holds(process)[2] <= resident_kib + GROWTH_KIB, (process.name, before, holds(process))
    finish(cluster, server, stays, local)


def test_a_stop_during_a_round_lets_it_complete(cluster) -> None:
    go = cluster.folder / "go"
    server, locals_ = cluster.start("--workers", "2", *EVERY)
    workers = [
        cluster.worker("crash", 0, 0, "--sleep", 0.02),
        cluster.worker("crash", 0, 1, "--sleep", 0.02, "--dwell-in-round", 3, "--until", go),
    ]
    workers[1].says(r"dwells in round \d+")
    cluster.ask(StopRun("enough"))
    assert golden.text("exchange.goes_on") not in workers[1].output  # the stop came in the middle
    go.touch()
    for process in (*workers, *locals_, server):
        process.succeeds()
    count = int(server.says(golden.pattern("runs.over_enough"))[1])
    assert count == steps(cluster)
    assert "failed" not in server.output
    assert len({cluster.result(0, index)["model"] for index in (0, 1)}) == 1


def test_a_model_that_is_no_number_spoils_no_other(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", *EVERY)
    workers = [
        cluster.worker("crash", 0, 0, "--sleep", 0.02),
        cluster.worker("crash", 0, 1, "--sleep", 0.02, "--poison-at", 5),
    ]
    workers[1].says("poisons its model")
    trains(cluster, 60)
    assert finish(cluster, server, *workers, *locals_) == steps(cluster)
    assert golden.text("exchange.nonfinite_left_out") in workers[1].output
    results = [cluster.result(0, index) for index in (0, 1)]
    assert results[0]["finite"] and results[0]["model"] == results[1]["model"]
