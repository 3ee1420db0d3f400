"""Runs that are killed as a whole and go on from their checkpoints."""

import shutil
import signal

import pytest

from lsgd.protocol.events import RoundOrdered
from lsgd.run_folder import CHECKPOINTS, checkpoint_path, counts, runs
from lsgd.server.reasons import Why
from tests import golden

from .running import Cluster, Process


def start(cluster: Cluster, workers: int, *arguments: str, worker: tuple[object, ...] = (), **variables: str):
    """Start a run; return its servers and its workers."""
    server, locals_ = cluster.start("--workers", str(workers), *arguments)
    return [server, *locals_], [cluster.worker("resume", 0, index, *worker, **variables) for index in range(workers)]


def kill_all(servers: list[Process], workers: list[Process]) -> None:
    """See all workers dead by their own hand, and kill the servers."""
    assert [worker.wait() for worker in workers] == [-signal.SIGKILL] * len(workers)
    for server in servers:
        server.send(signal.SIGKILL)
        server.wait()


def finish(servers: list[Process], workers: list[Process], count: int) -> str:
    """Wait until all have ended well after so many iterations; return what the global server said."""
    for process in (*workers, *servers):
        process.succeeds()
    assert servers[0].says(rf"the run is over: .*; {count} iterations")
    return servers[0].output


def going_on(cluster: Cluster) -> dict[str, str]:
    return {"LSGD_RESUME": str(cluster.folder / CHECKPOINTS)}


def newest(cluster: Cluster) -> tuple[str, list[int]]:
    """Return the run whose checkpoints are the newest, and their counts."""
    folder = cluster.folder / CHECKPOINTS
    run = runs(folder)[0]
    return run, counts(folder, run)


@pytest.mark.parametrize(
    ("workers", "arguments", "options", "die_in_round"),
    [
        (1, ("--algorithm", "diloco", "--period", "6", "--checkpoint-every", "2"), ("--batch-norm",), 6),
        (2, ("--algorithm", "allreduce", "--checkpoint-every", "10"), (), 15),
    ],
    ids=["diloco", "allreduce"],
)
def test_a_run_that_was_killed_and_goes_on_ends_with_the_same_bits(
    cluster, workers: int, arguments: tuple[str, ...], options: tuple[str, ...], die_in_round: int
) -> None:
    arguments = (*arguments, "--iterations", str(40 * workers))
    finish(*start(cluster, workers, *arguments, worker=options), 40 * workers)
    whole = [cluster.result(0, index) for index in range(workers)]
    shutil.rmtree(cluster.folder / CHECKPOINTS)

    kill_all(*start(cluster, workers, *arguments, worker=(*options, "--die-in-round", die_in_round)))
    killed, (*_, last) = newest(cluster)
    servers, processes = start(cluster, workers, *arguments, worker=options, **going_on(cluster))
    assert f"resumes after {last} iterations" in finish(servers, processes, 40 * workers)
    for index in range(workers):
        result = cluster.result(0, index)
        made = last // workers
        assert result.pop("seen") == whole[index].pop("seen")[made:]
        assert result == whole[index] | {"received_nbytes": result["received_nbytes"]}
        assert result["iterations"] == 40
    run, found = newest(cluster)
    assert run != killed and found[-1] == 40 * workers
    assert counts(cluster.folder / CHECKPOINTS, killed)[-1] == last  # what it went on from is still there


def test_a_run_goes_on_with_other_workers_and_makes_exactly_its_iterations(cluster) -> None:
    arguments, frozen = ("--period", "8", "--local-period", "8", "--checkpoint-every", "1"), ("--frozen-mib", 3)
    kill_all(*start(cluster, 2, *arguments, worker=(*frozen, "--die-in-round", 6)))
    folder = cluster.folder / CHECKPOINTS
    run, (before, last) = newest(cluster)
    # What is left of a write that was cut off: a temporary file, and, after a loss of power, half a file.
    torn = checkpoint_path(folder, run, last, "node0/worker1")
    torn.write_bytes(torn.read_bytes()[:-100])
    half = folder / f"{torn.name}.0a1b2c3d.tmp"
    half.write_bytes(b"half")

    more = ("--iterations", str(last + 50))
    servers, workers = start(cluster, 3, *arguments, *more, worker=frozen, **going_on(cluster))
    output = finish(servers, workers, last + 50)
    assert (golden.text("resume.takes_over", last=last)) in output
    assert f"resumes from {checkpoint_path(folder, run, last, 'node0/worker0')}: {last} iterations" in (
        workers[0].output
    )
    assert f"{torn} cannot be read: " in workers[1].output and not half.exists()
    assert f"resumes from {checkpoint_path(folder, run, before, 'node0/worker1')}" in workers[1].output
    assert golden.text("resume.no_checkpoint") in workers[2].output
    assert golden.text("resume.dealt_again") in workers[0].output
    # Who has an older checkpoint gets what has changed since, and who has none gets all.
    received = [cluster.result(0, index)["received_nbytes"] for index in range(3)]
    assert max(received[:2]) < 1 << 20 and received[2] > 3 << 20

    servers, workers = start(cluster, 1, *arguments, *more, worker=frozen, **going_on(cluster))
    finish(servers, workers, last + 50)
    workers[0].says(golden.pattern("resume.stops_at_once", last=last + 50))


def test_checkpoints_that_cannot_be_written_are_a_warning(cluster) -> None:
    (cluster.folder / CHECKPOINTS).write_text("not a folder")
    servers, workers = start(
        cluster, 1, "--period", "4", "--local-period", "4", "--checkpoint-every", "1", "--iterations", "12"
    )
    finish(servers, workers, 12)
    workers[0].says(golden.pattern("resume.not_written"))
    workers[0].says(golden.pattern("resume.not_written_12"))


def test_a_worker_that_loses_its_servers_saves_its_state(cluster) -> None:
    every = ("--period", "4", "--local-period", "4")
    (server, local), (worker,) = start(cluster, 1, *every, "--server-timeout-s", "6")
    cluster.tells(RoundOrdered, round=3)
    server.send(signal.SIGKILL)
    server.wait()
    local.send(signal.SIGKILL)
    local.wait()
    assert worker.wait() == 75
    run, (count,) = newest(cluster)
    path = checkpoint_path(cluster.folder / CHECKPOINTS, run, count, "node0/worker0")
    assert golden.text("resume.state_saved", path=path) in worker.output
    servers, workers = start(cluster, 1, *every, "--iterations", str(count + 9), **going_on(cluster))
    assert f"resumes after {count} iterations" in finish(servers, workers, count + 9)


def test_a_run_whose_model_is_no_number_fails_and_leaves_its_last_good_checkpoint(cluster) -> None:
    every = ("--period", "4", "--local-period", "4", "--checkpoint-every", "1")
    server, (local,) = cluster.start("--workers", "1", *every, "--iterations", "40")
    worker = cluster.worker("crash", 0, 0, "--poison-at", 18)
    assert worker.wait() == 65
    run, found = newest(cluster)
    assert found == [12, 16]
    last = checkpoint_path(cluster.folder / CHECKPOINTS, run, 16, "node0/worker0")
    assert worker.output.count("no checkpoint of") == 1
    worker.says(golden.pattern("resume.nonfinite_end", last=last))
    for process in (server, local):  # it left as any other does
        process.succeeds()
    assert Why.LEAVES(worker="node0/worker0", reason=Why.ALL_MADE(limit=40), done=40) in server.output

    server, locals_ = cluster.start("--workers", "1", *every, "--iterations", "40")
    again = cluster.worker("crash", 0, 0, **going_on(cluster))
    assert "resumes after 16 iterations" in finish([server, *locals_], [again], 40)
