"""What is not heard, because the server that was to hear it is away or has forgotten the run."""

import pytest

from lsgd.protocol.events import GenerationBegan
from tests import golden

from .running import Cluster, until
from .test_crashes import EVERY, JournaledRun, finish, kill, trains


@pytest.mark.slow
def test_a_pause_that_is_not_heard_costs_the_others_their_patience(cluster: Cluster) -> None:
    run = JournaledRun(cluster, "--workers", "2", "--patience-s", "1", *EVERY)
    local = cluster.start_local()
    killed = cluster.folder / "killed"  # until then both nap, so that nobody waits for the other
    stays = cluster.worker("train", 0, 0, "--sleep", 0.02, "--nap-at", 1, "--until", killed)
    nap = ("--nap-at", 8, "--pause-at", 8, "--nap", 20, "--until", killed)
    pauses = cluster.worker("train", 0, 1, "--sleep", 0.02, *nap)
    steps = cluster.folder / "node0-worker1.steps"
    pauses.says("^naps$")  # with its iteration granted
    kill(run.server)
    killed.touch()
    pauses.says(golden.pattern("exchange.pauses_unheard"))
    run.start_again()
    without = cluster.tells(GenerationBegan, code="evicted").generation
    assert without.members == ("node0/worker0",)
    trains(cluster)
    assert len(cluster.generation(without.number + 1).members) == 2
    until(lambda: len(steps.read_text().split()) > 8, "it is back")
    assert finish(cluster, run.server, stays, pauses, local)
