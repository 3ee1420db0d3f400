"""Loops with accelerate as workers, by LsgdLoop: the real library, real servers, two processes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lsgd.errors import ConfigError
from lsgd.server.reasons import Why
from tests import golden

from .running import Cluster, ForkServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
MODULE = "lsgd.integrations.accelerate"


class AccelerateCluster(Cluster):
    """Its workers have imported accelerate before the fork."""

    worker_forks = ForkServer("torch", "torch._dynamo", MODULE, "transformers.models.llama")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[AccelerateCluster]:
    pytest.importorskip("transformers", reason="pip install 'lsgd[transformers]'")
    made = AccelerateCluster(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("algorithm", ["local", "bytegrad"])
def test_two_loops_train_one_model(cluster, algorithm) -> None:
    period = ["--period", "4"] if algorithm == "local" else []  # 8 rounds: each makes its first epoch
    server, _ = cluster.start("--workers", "2", "--algorithm", algorithm, "--iterations", "60", *period)
    for worker in [cluster.worker("accelerated", 0, i, "--micro-batches", 2) for i in range(2)]:
        worker.succeeds()
    assert f"{Why.ALL_MADE(limit=60)}; 60 iterations" in server.succeeds()
    workers = [cluster.result(0, i) for i in range(2)]
    assert sum(w["iterations"] for w in workers) == 60 and workers[0]["final"] == workers[1]["final"]
    first, second = (w["drawn"] for w in workers)
    assert len(first) >= 48 and sorted(first[:48] + second[:48]) == list(range(96))
    for w in workers:
        assert w["rates"][0] > 0.049 and w["rates"][-1] < 0.002, "the scheduler goes through all of itself"
        assert len(w["losses"]) == 2 * w["iterations"] and sum(w["losses"][-8:]) < 0.2 * sum(w["losses"][:8])


def test_a_loop_that_ends_before_the_run_leaves_with_a_consensus(cluster) -> None:
    cluster.start("--workers", "2", "--algorithm", "local", "--iterations", "1000", "--period", "64")
    for worker in [cluster.worker("accelerated", 0, i, "--epochs", 1) for i in range(2)]:
        worker.succeeds()
    workers = [cluster.result(0, i) for i in range(2)]
    assert [w["iterations"] for w in workers] == [24, 24] and workers[0]["final"] == workers[1]["final"]


def test_local_sgd_in_the_loop_is_named(cluster) -> None:
    cluster.start("--workers", "1", "--iterations", "20", "--period", "4")
    worker = cluster.worker("accelerated", 0, 0, "--local-sgd")
    worker.succeeds()
    assert golden.text("integrations.imports_local_sgd") in worker.output


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="lsgd.client.muon needs torch 2.9")
def test_the_example(cluster) -> None:
    cluster.start("--workers", "2", "--iterations", "24", "--period", "4")
    for worker in [cluster.worker("accelerated", 0, i, "--example", EXAMPLE) for i in range(2)]:
        worker.succeeds()
    results = [cluster.result(0, i) for i in range(2)]
    assert results[0]["final"] == results[1]["final"]
    assert sum(w["iterations"] for w in results) == 24
    assert (cluster.folder / "accelerate-model" / "model.safetensors").exists()


@pytest.mark.slow
def test_what_cannot_be_a_worker_is_refused(monkeypatch) -> None:
    pytest.importorskip("accelerate", reason="pip install 'lsgd[accelerate]'")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=golden.pattern("integrations.rank_in_environment")):
        importlib.import_module(MODULE).LsgdLoop(None, None, None, None)


def test_without_the_library_the_import_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"pip install 'lsgd\[accelerate\]'"):
        importlib.import_module(MODULE)
