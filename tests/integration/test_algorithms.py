"""The algorithms in real processes, through real servers: phases, identical bits, deaths, changes."""

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from lsgd.cli.commands import main
from lsgd.client import Worker
from lsgd.errors import LsgdError
from lsgd.server.reasons import Why
from tests import golden

from .running import Cluster, Process, until

PLACES = [(node, index) for node in range(2) for index in range(2)]


def plan(folder: Path, *phases: dict[str, Any], **run: Any) -> tuple[str, str]:
    """Write a plan and return the flags that name it."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in run.items()]
    for phase in phases:
        lines += ["[[phase]]", *(f"{name} = {json.dumps(value)}" for name, value in phase.items())]
    path = folder / "plan.toml"
    path.write_text("\n".join(lines))
    return "--plan", str(path)


def run(cluster: Cluster, places: list[tuple[int, int]], *arguments: str, **flags: Any) -> list[dict]:
    """Train to the end with the same ``flags`` at each of ``places``; return what the workers have noted."""
    nodes = 1 + max(node for node, _ in places)
    server, locals_ = cluster.start("--workers", str(len(places)), *arguments, nodes=nodes)
    workers = [cluster.worker("steps", *place, *as_flags(flags)) for place in places]
    end_well(*workers, *locals_, server)
    return [cluster.result(*place) for place in places]


def as_flags(flags: dict[str, Any]) -> list[str]:
    """Return ``low=True, width=8`` as ``--low --width 8``."""
    texts: list[str] = []
    for name, value in flags.items():
        texts += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return texts


def end_well(*processes: Process) -> None:
    for process in processes:
        process.succeeds()


def digests(result: dict, *algorithms: str) -> list[str]:
    """Return the model's bits before each turn of these algorithms, or of all."""
    return [bits for bits, name, _ in result["turns"] if not algorithms or name in algorithms]


def test_a_run_of_three_phases(cluster, tmp_path) -> None:
    flags = plan(
        tmp_path,
        {"name": "allreduce", "iterations": 120},
        {"name": "leader", "period": 16, "local_period": 4, "iterations": 128},
        {"name": "low_precision_decentralized", "block": 256},
        iterations=400,
    )
    results = run(cluster, PLACES, *flags)
    made = [Counter(name for _, name, _ in result["turns"]) for result in results]
    assert {counts["allreduce"] for counts in made} == {120 // 4}
    assert sum(counts["leader"] for counts in made) == 128
    assert {counts["low_precision_decentralized"] for counts in made} == {(400 - 120 - 128) // 4}
    assert len({tuple(digests(result, "allreduce")) for result in results}) == 1
    assert len(set(digests(results[0], "allreduce"))) == 30  # and each step changed it
    assert len({digests(result, "leader")[-1] for result in results}) == 4

    assert len({result["final"] for result in results}) == 1
    assert {result["distance"] for result in results} == {results[0]["distance"]}
    assert results[0]["distance"] > 0
    assert all(result["loss"] < 1.0 for result in results)
    status = results[0]["status"]
    assert (status["count"], status["algorithm"]) == (400, "low_precision_decentralized")


def test_gradient_methods_keep_models_identical_whatever_model_and_loop_are(cluster, tmp_path) -> None:
    """Several dtypes and buckets, gradient accumulation, a parameter without a gradient on some or on all workers."""
    flags = plan(
        tmp_path,
        {"name": "allreduce", "bucket_mib": 0.001, "iterations": 40},
        {"name": "bytegrad", "bucket_mib": 0.001, "block": 64, "error_feedback": True, "iterations": 40},
        {"name": "bytegrad", "hierarchical": False, "iterations": 40},
        {"name": "qsgd", "bucket_mib": 0.001, "block": 64},
        iterations=160,
    )
    results = run(cluster, PLACES, *flags, low=True, unused=True, micro_batches=2)
    assert len({tuple(digests(result)) for result in results}) == 1
    assert len(set(digests(results[0]))) == 40
    assert Counter(name for _, name, _ in results[0]["turns"]) == {
        "allreduce": 10,
        "bytegrad": 20,
        "qsgd": 10,
    }
    for result in results:
        assert result["iterations"] == 40
        assert result["distance"] == 0.0
        # Its gradient is zero, which 8 bits of a block's range come close to.
        assert result["unused"] == pytest.approx([1.0, 1.0, 1.0], abs=0.02)
        assert result["sometimes"] == results[0]["sometimes"] != 0.0
    assert len({result["final"] for result in results}) == 1


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("qsgd", {"scaler": True}),
        ("bytegrad", {}),
        ("allreduce", {"scaler": True}),
        ("allreduce", {"closure": True, "micro_batches": 2}),
    ],
)
def test_one_infinite_gradient_skips_the_step_on_all_and_counts_nothing(cluster, algorithm, flags) -> None:
    arguments = ("--workers", "2", "--iterations", "40", "--algorithm", algorithm)
    server, locals_ = cluster.start(*arguments, nodes=2)
    good = cluster.worker("steps", 0, 0, *as_flags(flags))
    bad = cluster.worker("steps", 1, 0, *as_flags({**flags, "overflow_at": 5}))
    end_well(good, bad, *locals_, server)
    results = [cluster.result(node, 0) for node in (0, 1)]
    for result in results:
        assert result["iterations"] == 20
        bits = digests(result)
        assert len(bits) == 21
        assert bits[4] == bits[5]  # nothing changed in turn 5
        assert len(set(bits)) == 20
        assert result["scale"] == (4.0 if "scaler" in flags else None)
    assert digests(results[0]) == digests(results[1])
    assert results[0]["status"]["count"] == 40


@pytest.mark.parametrize(("algorithm", "victim"), [("allreduce", (0, 1)), ("qsgd", (1, 1))])
def test_a_worker_killed_in_a_gradient_exchange(cluster, tmp_path, algorithm, victim) -> None:
    """The others exchange the gradients that they have kept, without it, and stay identical."""
    flags = plan(
        tmp_path,
        {"name": algorithm, "bucket_mib": 0.001},
        iterations=96,
        exchange_timeout_s=20.0,
    )
    server, locals_ = cluster.start("--workers", "4", *flags, nodes=2)
    workers = {
        place: cluster.worker("steps", *place, "--meet-at", 12, *(["--die-at", 12] if place == victim else []))
        for place in PLACES
    }
    assert workers[victim].wait() == -signal.SIGKILL
    survivors = [place for place in PLACES if place != victim]
    end_well(*(workers[place] for place in survivors), *locals_, server)

    results = [cluster.result(*place) for place in survivors]
    assert len({tuple(digests(result)) for result in results}) == 1
    # Each batch became a step: the gradients of the twelfth were not thrown away.
    assert {result["iterations"] for result in results} == {len(digests(results[0]))}
    assert len(set(digests(results[0]))) == len(digests(results[0]))
    assert results[0]["distance"] < 1e-6  # the mean of three equal numbers is rounded
    for place in survivors:
        assert re.search(golden.pattern("exchange.gradients_again"), workers[place].output)
    died = 11  # the steps that the victim has made, and told
    assert results[0]["status"]["count"] == 3 * results[0]["iterations"] + died
    assert 96 - 3 < results[0]["status"]["count"] <= 96
    assert golden.text("reasons.generation", number=2, workers=3, nodes=2) in server.output


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "decentralized"},
        {"name": "local", "period": 4, "compression": "levels2", "fragments": 2, "delay": 1},
        {"name": "sparse", "period": 4, "compression": "topk:k=1024", "hierarchical": False},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_a_worker_killed_while_models_are_exchanged(cluster, tmp_path, settings) -> None:
    flags = plan(tmp_path, settings, iterations=240, exchange_timeout_s=20.0)
    server, locals_ = cluster.start("--workers", "4", *flags, nodes=2)
    kill = ["--die-in", "forward", "--die-at", "13"]
    workers = {
        place: cluster.worker("steps", *place, "--width", "600", *(kill if place == (1, 0) else [])) for place in PLACES
    }
    assert workers[1, 0].wait() == -signal.SIGKILL
    survivors = [place for place in PLACES if place != (1, 0)]
    end_well(*(workers[place] for place in survivors), *locals_, server)
    results = [cluster.result(*place) for place in survivors]
    assert len({result["final"] for result in results}) == 1
    assert all(0 < result["distance"] < 0.1 and result["loss"] < 1.0 for result in results)
    # The victim made 12 steps; of what anyone made since its last round, the server says that no model has it.
    assert results[0]["status"]["count"] == sum(result["iterations"] for result in results) + 12 - cluster.lost
    assert golden.text("reasons.generation", number=2, workers=3, nodes=2) in server.output


def test_a_changed_setting_reaches_all_workers_in_one_round_and_the_commands_tell(cluster) -> None:
    server, locals_ = cluster.start("--workers", "4", "--algorithm", "local", "--period", "4", nodes=2)
    workers = [cluster.worker("steps", *place, "--sleep", "0.002") for place in PLACES]
    until(lambda: cluster.status()["rounds_global"] > 3, "some rounds are made")
    assert "outer_lr = 0.5, after" in command(cluster, "set", "outer_lr=0.5")
    rounds = cluster.status()["rounds_global"]
    until(lambda: cluster.status()["rounds_global"] > rounds + 3, "some more rounds are made")
    shown = command(cluster, "status")
    assert ", local: " in shown and "node1/worker1" in shown
    status = json.loads(command(cluster, "status", "--json"))
    assert [member["state"] in ("held", "live") for member in status["members"]] == [True] * 4
    assert "is stopping after" in command(cluster, "stop", "--reason", "enough is learnt")
    end_well(*workers, *locals_, server)
    assert Why.ENDED(reason="enough is learnt") in server.output

    results = [cluster.result(*place) for place in PLACES]
    # With one model after each round, common bits mark a round; its settings have to be common, too.
    settings = [{bits: now["outer_lr"] for bits, _, now in result["turns"]} for result in results]
    after_rounds = [bits for bits in settings[0] if all(bits in other for other in settings)]
    assert len(after_rounds) >= 7
    rates = [settings[0][bits] for bits in after_rounds]
    assert rates == sorted(rates, reverse=True) and set(rates) == {1.0, 0.5}
    assert all([other[bits] for bits in after_rounds] == rates for other in settings)
    assert sum(result["iterations"] for result in results) - cluster.lost == results[0]["status"]["count"]


def command(cluster: Cluster, name: str, *arguments: str) -> str:
    """Return what ``lsgd`` prints when an operator asks it something about the run."""
    done = CliRunner().invoke(main, [name, "--connect", cluster.address, *arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    """Servers of runs of one worker that exchange gradients; a test joins in this process."""
    made = Cluster(tmp_path_factory.mktemp("run"))
    made.start("--workers", "1", "--algorithm", "qsgd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LSGD_LOCAL", made.local_address(0))
        patch.setenv("LSGD_LOCAL_RANK", "0")
        yield made
    made.close()


def forget_a_loop(worker: Worker, loss: torch.Tensor) -> None:
    with worker.no_sync():
        loss.backward()


def go_back_twice(worker: Worker, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("backward", "sparse", "error", "told"),
    [
        (go_back_twice, False, LsgdError, golden.pattern("gradients.wrap_all_but_last")),
        (forget_a_loop, False, LsgdError, golden.pattern("gradients.no_backward")),
        (lambda worker, loss: None, False, LsgdError, golden.pattern("gradients.step_before_exchange")),
        (lambda worker, loss: loss.backward(), True, LsgdError, "the gradient of 0.weight is sparse"),
    ],
)
def test_a_loop_that_a_gradient_method_cannot_serve_is_told_why(one_worker, backward, sparse, error, told) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = one_worker.status()["count"]
    with pytest.raises(error, match=told), Worker.join(model, optimizer) as worker:
        for x in worker.batches([torch.tensor([1, 2])]):
            backward(worker, model(x).sum())
            optimizer.step()
    assert one_worker.status()["count"] == before


def test_a_worker_tells_its_algorithm_and_a_sparse_gradient_serves_where_models_are_exchanged(here) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Worker.join(model, optimizer) as worker:
        for x in worker.batches([torch.tensor([1, 2])]):
            assert (worker.algorithm.name, worker.algorithm.period) == ("leader", 4)
            before = model[0].weight.clone()
            model(x).sum().backward()
            optimizer.step()
    assert worker.iterations == 1
    assert [i for i in range(8) if not torch.equal(before[i], model[0].weight[i])] == [1, 2]


def test_a_bye_in_the_very_first_exchange(cluster: Cluster) -> None:
    """The worker without a peer has to take part in making the group that the others exchange in."""
    arguments = ("--algorithm", "decentralized", "--iterations", "30", "--exchange-timeout-s", "10")
    server, locals_ = cluster.start("--workers", "3", *arguments, nodes=3)
    workers = [cluster.worker("train", node) for node in range(3)]
    for process in (*workers, *locals_, server):
        process.succeeds()
    assert "failed" not in server.output
    assert [cluster.result(node, 0)["iterations"] for node in range(3)] == [10, 10, 10]
