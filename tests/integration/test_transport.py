"""Training over each transport, through real servers: with keys, tensors are encrypted, and the bits are the same."""

import re
import signal
from pathlib import Path

import pytest

from lsgd.protocol.keys import KeyRing, node_name, token_path
from lsgd.server.reasons import Why
from tests import golden

from .running import Cluster
from .test_algorithms import digests, end_well

PLACES = [(0, 0), (1, 0)]


def train(cluster: Cluster, folder: Path, algorithm: str, transport: str, *, keys: bool) -> list[dict]:
    """Train on two nodes and return what the workers have noted."""
    ring, tokens = folder / "keys", {}
    arguments = ["--workers", "2", "--iterations", "80", "--algorithm", algorithm, "--transport", transport]
    if keys:
        KeyRing.make(ring, map(node_name, range(2)))
        arguments += ["--keys", str(ring)]
        tokens = {node: ["--token", str(token_path(node_name(node), ring))] for node in range(2)}
    server = cluster.start_global(*arguments)
    locals_ = []
    for node in range(2):
        where = ["--listen", cluster.local_address(node), "--connect", cluster.address, *tokens.get(node, [])]
        locals_.append(cluster.server(f"local{node}", "--local", "--node", str(node), *where))
        locals_[-1].says(golden.pattern("server.local_server_of"))
    like_nccl = ["--like-nccl"] if transport == "nccl" else []
    workers = [cluster.worker("steps", *place, "--seed", 1, *like_nccl) for place in PLACES]
    end_well(*workers, *locals_, server)
    over = {"auto": "tcp", "nccl": "gloo"}.get(transport, transport) + (", encrypted" if keys else "")
    for worker in workers:
        assert re.search(golden.pattern("links.rank_over", over=over), worker.output), worker.output
    return [cluster.result(*place) for place in PLACES]


@pytest.mark.parametrize("algorithm", ["leader", "local", "bytegrad", "decentralized"])
def test_training_over_encrypted_connections(cluster, tmp_path, algorithm) -> None:
    results = train(cluster, tmp_path, algorithm, "auto", keys=True)
    assert sum(result["iterations"] for result in results) == 80
    assert len({result["final"] for result in results}) == 1
    assert all(result["loss"] < 1.0 for result in results)


@pytest.mark.slow
def test_the_transport_changes_no_bit_of_the_model(tmp_path) -> None:
    """ByteGrad's workers go in step, so that the same run comes out whatever their speed is.

    ``nccl`` is a group of torch.distributed over Gloo in NCCL's place.
    """
    made = []
    for name, transport, keys in (("nccl", "nccl", False), ("plain", "tcp", False), ("tls", "tcp", True)):
        (tmp_path / name).mkdir()
        cluster = Cluster(tmp_path / name)
        try:
            made.append(
                [digests(result) for result in train(cluster, tmp_path / name, "bytegrad", transport, keys=keys)]
            )
        finally:
            cluster.close()
    assert made[0] == made[1] == made[2]
    assert len(set(made[0][0])) == 40


def test_workers_that_are_killed_free_the_others_inside_their_node_and_between_nodes(cluster) -> None:
    """Each generation builds both kinds of groups anew, long before the deadline of an exchange."""
    settings = ["--algorithm", "local", "--period", "4", "--exchange-timeout-s", "600", "--lease-s", "600"]
    server, locals_ = cluster.start("--workers", "4", "--iterations", "480", *settings, nodes=2)
    survivors = [cluster.worker("steps", *place, "--like-nccl") for place in ((0, 0), (1, 1))]
    first = cluster.worker("steps", 0, 1, "--like-nccl", "--die-at", "21")
    second = cluster.worker("steps", 1, 0, "--like-nccl", "--die-at", "61")  # several rounds after the first
    assert first.wait() == second.wait() == -signal.SIGKILL
    end_well(*survivors, *locals_, server)
    for number, words in (
        (1, "4 workers on 2 nodes, over tcp, and nccl inside nodes"),
        (3, "2 workers on 2 nodes, over tcp"),
    ):
        assert f"generation {number}: {words}" in server.output
    assert golden.text("links.gloo_inside_node") in survivors[0].output
    assert cluster.result(0, 0)["final"] == cluster.result(1, 1)["final"]


def test_a_worker_that_is_killed_frees_the_other_from_a_group_of_torch(cluster) -> None:
    """Long before the deadline of an exchange."""
    settings = ["--algorithm", "local", "--period", "4", "--transport", "nccl", "--exchange-timeout-s", "600"]
    server, locals_ = cluster.start("--workers", "2", "--iterations", "120", *settings, nodes=2)
    survivor = cluster.worker("steps", 0, 0, "--like-nccl")
    victim = cluster.worker("steps", 1, 0, "--like-nccl", "--die-at", "21")
    assert victim.wait() == -signal.SIGKILL
    end_well(survivor, *locals_, server)
    assert Why.GENERATION(number=2, workers="1 worker", nodes="1 node", transport="nccl", why="") in server.output
    assert cluster.result(0, 0)["loss"] < 1.0
