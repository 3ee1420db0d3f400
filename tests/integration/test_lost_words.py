"""What is not heard, because the server that was to hear it is away or has forgotten the run."""

import pytest

from .running import Cluster, until
from .test_crashes import EVERY, JournaledRun, finish, kill, trains


@pytest.mark.slow
def test_a_pause_that_is_not_heard_costs_the_others_their_patience(cluster: Cluster) -> None:
    run = JournaledRun(cluster, "--workers", "2", "--patience-s", "1", *EVERY)
    local = cluster.start_local()
    stays = cluster.worker("train", 0, 0, "--sleep", 0.02)
    nap = ("--nap-at", 21, "--pause-at", 21, "--nap", 10)  # the first nap is the time to kill the server in
    pauses = cluster.worker("train", 0, 1, "--sleep", 0.02, *nap)
    steps = cluster.folder / "node0-worker1.steps"
    pauses.says("^naps$")  # with its iteration granted
    kill(run.server)
    pauses.says("node0/worker1 pauses, but could not tell the servers, so others may wait for it: ")
    run.start_again()
    run.server.says(r"node0/worker1 is evicted from round \d+: the others waited 1 s for it")
    trains(cluster)
    run.server.says(r"generation \d+: 2 workers on 1 node")
    until(lambda: len(steps.read_text().split()) > 21, "it is back")
    assert finish(cluster, run.server, stays, pauses, local)
