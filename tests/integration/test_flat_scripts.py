"""How a flat script ends that goes wrong: each by the exit code of its error, without a ``with`` block."""

import signal

import pytest

from tests import golden

from ..speed import SLOWNESS
from .running import until

ROUNDS = ("--algorithm", "local", "--period", "4")


@pytest.mark.parametrize("without", [(), ("--without-finish",)], ids=["finish", "no finish"])
@pytest.mark.parametrize("nan_from", [0, 12], ids=["all run", "late"])
def test_a_model_that_is_no_number_ends_with_65(cluster, nan_from, without) -> None:
    cluster.start("--workers", "1", *ROUNDS)
    worker = cluster.worker("flat", 0, 0, "--steps", 20, "--nan-from", nan_from, *without)
    assert worker.wait() == 65
    assert golden.text("crashes.nonfinite_end") in worker.output
    assert ("the last line of the script" in worker.output) == bool(without) and "Traceback" not in worker.output


def test_lost_servers_end_it_with_75(cluster) -> None:
    server, (local,) = cluster.start("--workers", "1", *ROUNDS, "--server-timeout-s", "10")
    worker = cluster.worker("flat", 0, 0, "--steps", 1_000_000)
    until(lambda: cluster.status()["count"] > 8, "it trains")
    for process in (server, local):
        process.send(signal.SIGKILL)
    assert worker.wait() == 75
    assert golden.text("crashes.exit_75") in worker.output and "Traceback" not in worker.output


def test_one_that_was_evicted_ends_with_76_and_the_others_go_on(cluster) -> None:
    server, _ = cluster.start("--workers", "2", *ROUNDS, "--lease-s", str(8 * SLOWNESS))
    frozen, other = (cluster.worker("flat", 0, index, "--steps", 1_000_000) for index in range(2))
    until(lambda: cluster.status()["count"] > 8, "they train")
    frozen.send(signal.SIGSTOP)
    server.says(r"node0/worker0 leaves")
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == 76 and "Traceback" not in frozen.output
    count = cluster.status()["count"]
    until(lambda: cluster.status()["count"] > count + 8, "the other goes on")
    assert other.poll() is None


def test_equal_data_end_both_with_77(cluster) -> None:
    cluster.start("--workers", "2", *ROUNDS, "--own-noise", "false")
    workers = [cluster.worker("flat", 0, index, "--steps", 1_000_000, "--equal") for index in range(2)]
    assert [worker.wait() for worker in workers] == [77, 77]
    for worker in workers:
        assert golden.text("crashes.same_batches") in worker.output and "Traceback" not in worker.output
