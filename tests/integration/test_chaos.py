"""A training in which something is killed every few seconds."""

import random
import signal

import pytest

from lsgd.protocol.messages import ChangeSettings, Status

from ..speed import SLOWNESS
from .running import Cluster, Process, until
from .test_crashes import JournaledRun, kept, kill, trains

PLACES = ((0, 0), (0, 1), (1, 0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_every_few_seconds_costs_neither_the_accuracy_nor_the_count(cluster: Cluster) -> None:
    run = JournaledRun(
        cluster, "--workers", "3", "--period", "16", "--local-period", "4", "--lease-s", str(20 * SLOWNESS)
    )
    servers = {node: cluster.start_local(node) for node in (0, 1)}
    workers = {place: cluster.worker("digits", *place) for place in PLACES}
    trains(cluster)
    victims = ["worker"] * 2 + ["frozen"] + ["local"] + ["global"]
    chance = random.Random(0)
    chance.shuffle(victims)
    for kind in victims:
        place, node = chance.choice(PLACES), chance.choice((0, 1))
        match kind:
            case "worker":
                kill(workers[place])
                workers[place] = cluster.worker("digits", *place)
            case "frozen":
                freeze(cluster, workers[place])
                workers[place] = cluster.worker("digits", *place)
            case "local":
                kill(servers[node])
                servers[node] = cluster.start_local(node)
            case _:
                kill(run.server)
                run.start_again()
        trains(cluster, 100)  # without the victim
        until(lambda: alive(cluster) == len(PLACES), "all workers are in the run")
        trains(cluster, 50)  # whoever is new has the model now: the next victim may be its last other holder
    limit = cluster.status()["count"] + 450
    assert isinstance(cluster.ask(ChangeSettings({"iterations": str(limit)})), Status)
    for process in (*workers.values(), *servers.values(), run.server):
        process.succeeds()
    assert f"{limit} iterations" in run.server.output
    # Of each lost worker a step may not have been heard of, and the next, if it was granted ahead.
    assert 0 <= kept(cluster) - limit <= 2 * (victims.count("worker") + victims.count("frozen"))
    accuracies = {cluster.result(*place)["accuracy"] for place in PLACES}
    assert len(accuracies) == 1  # they end with one model
    assert accuracies.pop() >= 0.97


def freeze(cluster: Cluster, worker: Process) -> None:
    """Freeze a worker until the run has left it out, then kill it."""
    before = cluster.status()["generation"]
    worker.send(signal.SIGSTOP)
    until(lambda: cluster.status()["generation"] > before, "the others continue without it")
    kill(worker)


def alive(cluster: Cluster) -> int:
    return sum(m["state"] in ("held", "live") for m in cluster.status()["members"])
