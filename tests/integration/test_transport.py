"""Training over each transport, through real servers: with keys, tensors are encrypted, and the bits are the same."""

import re
from pathlib import Path

import pytest

from lsgd.protocol.keys import KeyRing, node_name, token_path

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
        locals_[-1].says("local server of node")
    workers = [cluster.worker("steps", *place, "--seed", 1) for place in PLACES]
    end_well(*workers, *locals_, server)
    over = {"auto": "tcp"}.get(transport, transport) + (", encrypted" if keys and transport != "gloo" else "")
    for worker in workers:
        assert re.search(rf"generation 1: rank \d of 2, over {over} on 127", worker.output), worker.output
    return [cluster.result(*place) for place in PLACES]


@pytest.mark.parametrize("algorithm", ["leader", "local", "bytegrad", "decentralized"])
def test_training_over_encrypted_connections(cluster, tmp_path, algorithm) -> None:
    results = train(cluster, tmp_path, algorithm, "auto", keys=True)
    assert sum(result["iterations"] for result in results) == 80
    assert len({result["final"] for result in results}) == 1
    assert all(result["loss"] < 1.0 for result in results)


@pytest.mark.slow
def test_the_transport_changes_no_bit_of_the_model(tmp_path) -> None:
    """ByteGrad's workers go in step, so that the same run comes out whatever their speed is."""
    made = []
    for name, transport, keys in (("gloo", "gloo", False), ("plain", "tcp", False), ("tls", "tcp", True)):
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
