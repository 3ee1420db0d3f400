"""Trainers of Lightning as workers, by LsgdCallback: the real library, real servers, two processes."""

import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lsgd.client.data.trainers import TrainerData
from lsgd.errors import ConfigError, LsgdError
from lsgd.server.reasons import Why
from tests import golden

from .running import Cluster, ForkServer, check_trainers_without_an_end, train_two

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_trainer.py"
MODULE = "lsgd.integrations.lightning"


class LightningCluster(Cluster):
    """Its workers have imported Lightning before the fork."""

    worker_forks = ForkServer("torch", "torch._dynamo", "lightning", MODULE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LightningCluster]:
    pytest.importorskip("lightning", reason="pip install 'lsgd[lightning]'")
    made = LightningCluster(tmp_path)
    yield made
    made.close()


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return Lightning and the integration, for one test."""
    lightning = pytest.importorskip("lightning", reason="pip install 'lsgd[lightning]'")
    integration = importlib.import_module(MODULE)
    monkeypatch.setattr(integration.rank_zero_only, "rank", 0)
    return lightning, integration


def become_its_worker(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the servers of a run without an end, with this process as its worker to be."""
    cluster.start("--workers", "1", "--period", "4")
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")


def fit(lightning: Any, callback: Any, loader: DataLoader[Any]) -> list[torch.Tensor]:
    """Return the batches of one epoch of a Trainer in this process."""
    drawn = []

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            drawn.append(batch[0])
            return self.layer(batch[0].reshape(-1, 1) / 96).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, enable_checkpointing=False, callbacks=[callback], **quiet
    )
    trainer.fit(Line(), loader)
    return drawn


train = partial(train_two, "lightning_worker")


@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [("bytegrad", ("--micro-batches", 2)), ("local", ("--manual", "--num-workers", 1))],
    ids=["accumulated", "manual-and-prefetched"],
)
def test_two_trainers_train_one_model(cluster, algorithm, arguments) -> None:
    plan = ["--algorithm", algorithm, "--iterations", "60"]
    plan += ["--period", "2"] if algorithm == "local" else []  # 15 rounds: each makes its first epoch
    output, workers = train(cluster, plan, "--min-steps", 500, *arguments)
    assert f"{Why.ALL_MADE(limit=60)}; 60 iterations" in output and "failed" not in output
    assert [w["steps"] for w in workers] == [w["iterations"] for w in workers]
    assert sum(w["iterations"] for w in workers) == 60 and all(w["stopped"] for w in workers)
    assert workers[0]["final"] == workers[1]["final"]
    first, second = (w["drawn"] for w in workers)
    assert len(first) >= 48 and sorted(first[:48] + second[:48]) == list(range(96))
    assert all(w["losses"][-1] < 0.1 * w["losses"][0] for w in workers)
    batches = 1 if "--manual" in arguments else 2
    assert all(len(w["losses"]) in (batches * w["iterations"], batches * w["iterations"] + 1) for w in workers)
    logs = next(w for w in workers if w["rank"] == 0)["logs"]
    assert float(logs[-1]["lsgd_progress"]) == 1.0 and float(logs[-1]["lsgd_consensus_distance"]) >= 0
    assert max(float(row["lsgd_round"] or 0) for row in logs) > 0


def test_each_of_two_loaders_is_dealt(cluster) -> None:
    plan = ["--algorithm", "bytegrad", "--iterations", "24"]
    _, workers = train(cluster, plan, "--two")
    for name, size in (("drawn", 4), ("others", 8)):
        first, second = (w[name] for w in workers)
        share = min(48, 12 * size)
        assert len(first) >= share and sorted({*first[:share]} | {*second[:share]}) == list(range(96))[: 2 * share]


class Pairs(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5], [6, 7]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
@pytest.mark.parametrize("kind", [dict, list])
def test_loaders_that_lightning_combines_are_dealt_in_every_mode(mode, kind) -> None:
    """Also those of a batch sampler of the script, and of rows of its own. A Trainer trains in each but the last."""
    combined = importlib.import_module("lightning.pytorch.utilities.combined_loader")
    drawn = list[list[set[int]]]()
    for rank in range(2):
        torch.manual_seed(rank)
        loaders = [
            DataLoader(range(16), 4, shuffle=True),
            DataLoader(range(100, 108), batch_sampler=Pairs(range(8), 2, False)),
            DataLoader(range(200, 216), 2, sampler=SubsetRandomSampler(range(8))),
        ]
        given = loaders if kind is list else dict(zip("abc", loaders, strict=True))
        loader = combined.CombinedLoader(given, mode)
        iter(loader)  # before the join, as in a Trainer
        TrainerData(loader.iterables, lambda rank=rank: (rank, 2), 0)
        leaves = [leaf for batch, *_ in loader for leaf in tree_leaves(batch) if leaf is not None]
        values = [*map(int, torch.cat(leaves))]
        first = [[x for x in values if low <= x < low + 100] for low in (0, 100, 200)]
        drawn.append([{*each[:size]} for each, size in zip(first, (8, 4, 4), strict=True)])
    for one, other, rows in zip(*drawn, (range(16), range(100, 108), range(200, 208)), strict=True):
        assert sorted(one | other) == [*rows] and not one & other


def test_trainers_that_learn_the_same_end_the_run(cluster) -> None:
    server, _ = cluster.start("--workers", "2", "--iterations", "40", "--period", "4")
    workers = [cluster.worker("lightning_worker", 0, index, "--shared") for index in range(2)]
    assert [worker.wait() for worker in workers] == [77, 77] and server.wait() == 1
    assert (
        golden.text("crashes.same_batches") in server.output
        and golden.text("integrations.not_the_noise") in server.output
    )


def test_it_pauses_to_validate_and_one_worker_saves(cluster) -> None:
    """And a checkpoint of Lightning is where another run begins."""
    plan = ["--algorithm", "local", "--iterations", "40", "--period", "4"]
    _, workers = train(cluster, plan, "--every", 3)
    assert workers[0]["final"] == workers[1]["final"]
    for w in workers:
        assert w["states"] and set(w["states"]) == {"away"}
        assert w["steps"] == w["iterations"]
    saved = sorted((cluster.folder / "saved").iterdir(), key=lambda path: path.stat().st_mtime)
    assert saved and not any("-v1" in path.name for path in saved)
    assert workers[0]["best"] == workers[1]["best"] and Path(workers[0]["best"][0]) == saved[-1]

    (cluster.folder / "again").mkdir()
    again = LightningCluster(cluster.folder / "again")
    early = next(path for path in saved if "step=3.ckpt" in path.name)
    _, workers = train(again, ["--algorithm", "local", "--period", "4"], "--max-steps", 8, "--resume", early)
    assert all(w["started"] == [3] and w["steps"] == 8 and w["iterations"] == 5 for w in workers)
    assert workers[0]["final"] == workers[1]["final"]
    again.close()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_run_that_ends_while_a_trainer_validates(cluster, micro_batches) -> None:
    plan = ["--algorithm", "bytegrad", "--iterations", "40"]
    _, workers = train(
        cluster, plan, "--micro-batches", micro_batches, first=("--every", 3 * micro_batches, "--wait-at", 3)
    )
    assert sum(w["iterations"] for w in workers) == 40
    assert [w["steps"] for w in workers] == [w["iterations"] for w in workers]
    assert workers[0]["iterations"] <= 4 and workers[0]["final"] == workers[1]["final"]


def test_trainers_that_stop_before_the_run_leave_with_a_consensus(cluster) -> None:
    plan = ["--algorithm", "local", "--iterations", "1000", "--period", "64"]  # no round before both leave
    _, workers = train(cluster, plan, "--max-steps", 7)
    assert [w["steps"] for w in workers] == [w["iterations"] for w in workers] == [7, 7]
    assert workers[0]["final"] == workers[1]["final"]
    assert all(
        golden.text("integrations.leaves_after", count=7) in p.output
        for p in cluster.processes
        if p.name.startswith("worker")
    )


def test_without_an_end_in_the_plan_all_trainers_have_the_consensus(cluster) -> None:
    check_trainers_without_an_end("lightning_worker", cluster)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("passed_in", [False, True], ids=["shuffle", "batch-sampler"])
def test_a_loader_that_shuffles_does_so_in_each_fit(cluster, monkeypatch, passed_in) -> None:
    lightning, integration = in_this_process(monkeypatch)
    data = TensorDataset(torch.arange(96.0))
    batches = BatchSampler(RandomSampler(data), 8, drop_last=True)
    loader = DataLoader(data, batch_sampler=batches) if passed_in else DataLoader(data, 8, shuffle=True)
    for name in ("first", "second"):
        (cluster.folder / name).mkdir()
        run = LightningCluster(cluster.folder / name)
        become_its_worker(run, monkeypatch)
        drawn = fit(lightning, integration.LsgdCallback(), loader)
        run.close()
        assert [len(each) for each in drawn] == [8] * 12
        order = torch.cat(drawn)
        assert len(order.unique()) == 96 and not torch.equal(order, order.sort().values)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return iter([[x] for x in torch.arange(8.0)])


@pytest.mark.filterwarnings("ignore")
def test_a_stream_has_no_number_of_steps(cluster, monkeypatch, caplog) -> None:
    lightning, integration = in_this_process(monkeypatch)
    become_its_worker(cluster, monkeypatch)
    assert len(fit(lightning, integration.LsgdCallback(shard=False), DataLoader(Stream(), 4))) == 2
    assert golden.text("integrations.leaves_after", count="inf") in caplog.text and "-1 steps" not in caplog.text


def test_all_stop_early_and_lower_their_rates_by_the_mean_of_their_metrics(cluster) -> None:
    """Alone, one would stop at its third validation, and the other at its fourth; by the mean, both at the sixth."""
    plan, scores = ["--algorithm", "local", "--period", "4"], ("--scores", "[10, 12, 12, 0, 9, 9, 9, 9]")
    given = ("--max-steps", 40, "--every", 5, "--scores", "[10, 4, 4.5, 15, 11, 9, 9, 9]")
    _, workers = train(cluster, plan, *given, first=scores)
    assert [w["steps"] for w in workers] == [30, 30]
    assert len({w["rate"] for w in workers}) == 1 and workers[0]["rate"] < 0.05


def test_an_exception_in_training_leaves_the_run_which_goes_on(cluster) -> None:
    server, _ = cluster.start("--workers", "2", "--algorithm", "bytegrad", "--iterations", "20")
    failing = cluster.worker("lightning_worker", 0, 0, "--fail-at", 3)
    other = cluster.worker("lightning_worker", 0, 1)
    assert failing.wait() == 1
    other.succeeds()
    failed = Why.FAILED(error="RuntimeError: as the test wants it, in line ")
    assert re.search(rf"{failed}\d+ of lightning_worker.py \(3 iterations\)", server.succeeds())
    assert cluster.result(0, 1)["iterations"] == 17


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="lsgd.client.muon needs torch 2.9")
def test_the_example(cluster) -> None:
    cluster.start("--workers", "2", "--iterations", "24", "--period", "4")
    for worker in [cluster.worker("lightning_worker", 0, i, "--example", EXAMPLE) for i in range(2)]:
        worker.succeeds()
    results = [cluster.result(0, i) for i in range(2)]
    assert results[0]["final"] == results[1]["final"]
    assert sum(w["iterations"] for w in results) == 24
    assert (cluster.folder / "lightning-model.ckpt").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_a_worker_is_refused(monkeypatch) -> None:
    lightning = pytest.importorskip("lightning", reason="pip install 'lsgd[lightning]'")
    integration = importlib.import_module(MODULE)
    with monkeypatch.context() as environment:
        environment.setenv("LOCAL_RANK", "1")
        with pytest.raises(ConfigError, match=golden.pattern("integrations.in_environment", name="LOCAL_RANK")):
            integration.LsgdCallback()
    average = lightning.pytorch.callbacks.StochasticWeightAveraging(0.1)
    link = {"callbacks": [lightning.pytorch.callbacks.ModelCheckpoint(save_last="link")], "enable_checkpointing": True}
    for options, what in (
        ({"strategy": "ddp"}, "strategy DDPStrategy.*devices=1.*lsgd launch"),
        ({"devices": 2}, "devices=1"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
        ({"overfit_batches": 2}, "overfit_batches trains on the same batches"),
        ({"callbacks": [average]}, "StochasticWeightAveraging would put another model"),
        (link, r"ModelCheckpoint\(save_last='link'\)"),
    ):
        trainer = lightning.Trainer(**{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options})
        with pytest.raises(ConfigError, match=what):
            integration.check(trainer)


@pytest.mark.parametrize(
    ("place", "step", "epoch"),
    [
        ({"steps": 40, "step": 25}, 25, 2),
        ({"steps": 0, "progress": 0.5}, 20, 2),
        ({"steps": 0, "progress": 0.1}, 12, 1),
    ],
)
def test_the_modules_scheduler_follows_the_run_by_step_or_by_epoch(place, step, epoch) -> None:
    """Of 40 steps in four epochs: by the worker's own steps, the run's progress, or the Trainer's steps."""
    module = importlib.import_module(MODULE)
    callback, followed = module.LsgdCallback(), {}
    callback._worker = SimpleNamespace(
        follow=lambda scheduler, place=None: followed.update({scheduler: place}), **place
    )

    def follow(**config: object) -> None:
        configs = [SimpleNamespace(**{"reduce_on_plateau": False, "frequency": 1, **each}) for each in config.values()]
        trainer = SimpleNamespace(
            lr_scheduler_configs=configs,
            lightning_module=SimpleNamespace(automatic_optimization=True),
            num_training_batches=20,
            accumulate_grad_batches=2,
            global_step=12,
        )
        followed.clear()
        callback._follow_schedules(trainer, 40)

    plateau = {"scheduler": "plateau", "reduce_on_plateau": True, "interval": "epoch"}
    follow(one={"scheduler": "one", "interval": "step"}, plateau=plateau)
    assert followed["one"]() == step and followed["plateau"] is None
    follow(one={"scheduler": "one", "interval": "epoch"})
    assert followed["one"]() == epoch
    follow(one={"scheduler": "one", "interval": "step", "frequency": 2})
    assert followed["one"]() == step // 2
    follow(one={"scheduler": "one", "interval": "step"}, other={"scheduler": "other", "interval": "epoch"})
    assert not followed, "nobody knows how they are combined"


@pytest.mark.slow
def test_a_worker_that_starts_again_keeps_the_log_of_the_first(tmp_path, monkeypatch) -> None:
    _, integration = in_this_process(monkeypatch)
    logs = importlib.import_module("lightning.pytorch.loggers")

    def write(rank: int, loss: float) -> str:
        monkeypatch.setenv("LSGD_RANK", str(rank))
        integration.LsgdCallback()
        logger = logs.CSVLogger(tmp_path, "run", "mine")
        logger.log_metrics({"loss": loss}, step=1)
        logger.save()
        return (tmp_path / "run" / "mine" / "metrics.csv").read_text()

    of_first = write(0, 4.0)
    assert "4.0" in of_first and write(1, 5.0) == of_first


@pytest.mark.slow
def test_a_checkpoint_that_another_worker_has_saved_is_an_error_in_words(tmp_path, monkeypatch) -> None:
    _, integration = in_this_process(monkeypatch)
    inner = importlib.import_module("lightning.pytorch.plugins").TorchCheckpointIO()
    saves = integration._OneSaves(inner, integration.LsgdCallback())
    with pytest.raises(LsgdError, match=golden.pattern("integrations.best_path")):
        saves.load_checkpoint(tmp_path / "best.ckpt")
    saves.save_checkpoint({"global_step": 3}, tmp_path / "best.ckpt")
    assert saves.load_checkpoint(tmp_path / "best.ckpt") == {"global_step": 3}


def test_paths_that_are_not_here_are_not_claimed(tmp_path, monkeypatch, caplog) -> None:
    lightning, integration = in_this_process(monkeypatch)
    (tmp_path / "b.ckpt").touch()
    here, gone = str(tmp_path / "b.ckpt"), str(tmp_path / "a.ckpt")
    callback = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, monitor="loss")
    integration._settle(callback, gone, here, {here: 0.5})
    assert (callback.best_model_path, callback.last_model_path, float(callback.best_model_score)) == (here, here, 0.5)
    assert callback.kth_best_model_path == here and not caplog.messages
    integration._settle(callback, gone, gone, {})
    assert (callback.best_model_path, callback.last_model_path, callback.best_model_score) == ("", "", None)
    assert golden.text("integrations.no_best_path") in caplog.text


def test_without_the_library_the_import_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match=r"pip install 'lsgd\[lightning\]'"):
        importlib.import_module(MODULE)
