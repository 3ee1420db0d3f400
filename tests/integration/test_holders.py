"""What a run has learned outlives servers that freeze, workers that all die, and a journal that is lost."""

import contextlib
import re
import signal
from pathlib import Path

from lsgd.errors import JoinError
from lsgd.protocol.events import Note, WorkerChanged
from tests import golden

from ..speed import SLOWNESS
from .running import Process, until
from .test_crashes import EVERY, JournaledRun, finish, kill, steps, trains


def test_a_frozen_local_server_costs_nobody_the_model(cluster) -> None:
    server, (local,) = cluster.start("--workers", "2", "--lease-s", str(6 * SLOWNESS), *EVERY)
    workers = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    trains(cluster)
    local.send(signal.SIGSTOP)
    cluster.tells(Note, code="all_silent")
    for worker in workers:
        worker.says(golden.pattern("crashes.local_silent"))
    local.send(signal.SIGCONT)
    trains(cluster)
    assert cluster.status()["generation"] == 1
    assert finish(cluster, server, *workers, local) == steps(cluster)
    for worker in workers:
        assert "global server" not in "".join(re.findall(golden.pattern("crashes.waits_for_next"), worker.output))


def test_nobody_waits_for_the_lease_of_a_worker_whose_process_has_ended(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--lease-s", "600", *EVERY)
    survivor, victim = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    trains(cluster)
    kill(victim)
    cluster.tells(WorkerChanged, worker="node0/worker1", state="left", code="failed")
    assert cluster.generation(2).members == ("node0/worker0",)
    trains(cluster)
    again = cluster.worker("crash", 0, 1, "--sleep", 0.02)
    assert len(cluster.generation(3).members) == 2
    finish(cluster, server, survivor, again, *locals_)


def test_a_local_server_that_was_started_again_sees_the_deaths_of_the_workers_it_finds(cluster) -> None:
    server, (local,) = cluster.start("--workers", "2", "--lease-s", "600", *EVERY)
    survivor, victim = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    trains(cluster)
    kill(local)
    again = cluster.start_local()
    again.says("node0/worker1 is here already")
    trains(cluster)
    until(lambda: watches(again, victim), "the new local server watches the worker")
    kill(victim)
    cluster.tells(WorkerChanged, worker="node0/worker1", state="left", code="failed")
    trains(cluster)
    finish(cluster, server, survivor, again)


def watches(server: Process, worker: Process) -> bool:
    """Return whether a process has a descriptor of another."""
    for info in Path(f"/proc/{server.pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # it is closed already
            if f"Pid:\t{worker.pid}\n" in info.read_text():
                return True
    return False


def test_a_run_that_has_lost_its_model_fails_and_says_what_to_do(cluster) -> None:
    server, (local,) = cluster.start("--workers", "2", *EVERY)
    victims = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    trains(cluster)
    kill(*victims)
    again = [cluster.worker("crash", 0, index) for index in (0, 1)]
    assert [worker.wait() for worker in again] == [JoinError.exit_code] * 2
    assert golden.text("crashes.model_lost") in again[0].output and "RESUME=1" in again[0].output
    assert server.wait() == 1
    local.succeeds()


def test_a_run_that_has_lost_its_model_goes_back_to_its_checkpoints(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--checkpoint-every", "2", *EVERY)
    workers = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    until(lambda: len(list(cluster.folder.glob("checkpoints/**/*.safetensors"))) >= 4, "checkpoints are there")
    kill(*workers)
    resume = {"LSGD_RESUME": str(cluster.folder / "checkpoints")}
    workers = [cluster.worker("crash", 0, index, "--sleep", 0.02, **resume) for index in (0, 1)]
    again = int(server.says(golden.pattern("crashes.gone_back"))[1])
    until(lambda: server.output.count("worker1 joins from") == 2, "the other one is back, too")
    trains(cluster)
    limit = finish(cluster, server, *workers, *locals_)
    assert steps(cluster) >= limit + again
    assert len({cluster.result(0, index)["model"] for index in (0, 1)}) == 1


def test_a_server_without_the_journal_of_the_run_does_not_begin_another(cluster) -> None:
    run = JournaledRun(cluster, "--workers", "2", "--server-timeout-s", "8", *EVERY)
    local = cluster.start_local()
    go = cluster.folder / "go"
    pause = ("--pause-at", 40, "--until", go)
    workers = [cluster.worker("train", 0, index, "--sleep", 0.02, *pause) for index in (0, 1)]
    for worker in workers:
        worker.says("^naps$")  # and so waits for no server
    kill(run.server)
    other = cluster.start_global("--workers", "2", listen=cluster.address)
    local.says(rf"connected to the global server at \S+, run (?!{run.run}\b)\w")
    go.touch()
    for worker in workers:
        assert worker.wait() == 75
        told = golden.text("crashes.without_journal", run=run.run)
        assert told in worker.output
        assert golden.text("crashes.state_saved") in worker.output
    other.send(signal.SIGTERM)
    for server in (other, local):
        server.succeeds()
