"""Trainers of transformers as workers, by LsgdCallback: the real library, real servers, two processes."""

import importlib
import math
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lsgd.client.checkpoint.file import pack, unpack
from lsgd.errors import ConfigError
from lsgd.server.reasons import Why
from tests import golden

from .running import Cluster, ForkServer, check_trainers_without_an_end, train_two

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"
MODULE = "lsgd.integrations.transformers"


class TrainerCluster(Cluster):
    """Its workers have imported transformers before the fork."""

    worker_forks = ForkServer("torch", "torch._dynamo", MODULE, "transformers.trainer", "transformers.models.gpt2")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TrainerCluster]:
    pytest.importorskip("transformers", reason="pip install 'lsgd[transformers]'")
    made = TrainerCluster(tmp_path)
    yield made
    made.close()


train = partial(train_two, "trainer")


@pytest.mark.parametrize("algorithm", ["local", "bytegrad"])
def test_two_trainers_train_one_model(cluster, algorithm) -> None:
    plan = ["--algorithm", algorithm, "--iterations", "60"]
    plan += ["--period", "9"] if algorithm == "local" else []  # all make a step after the round at 54 of 60
    output, workers = train(cluster, plan, "--micro-batches", 2)
    assert f"{Why.ALL_MADE(limit=60)}; 60 iterations" in output and "failed" not in output
    assert [w["steps"] for w in workers] == [w["iterations"] for w in workers]
    assert sum(w["iterations"] for w in workers) == 60 and all(w["stopped"] for w in workers)
    assert workers[0]["final"] == workers[1]["final"]
    assert max(w["rates"][0] for w in workers) == pytest.approx(0.02 * (1 - 1 / 60), rel=1e-3)  # in its middle
    first, second = (w["drawn"] for w in workers)
    assert len(first) >= 48 and sorted(first[:48] + second[:48]) == list(range(96))
    assert all(len(w["drawn"]) >= 4 * 2 * w["iterations"] for w in workers)
    for w in workers:
        assert len(w["losses"]) == w["steps"]
        assert abs(w["losses"][0] - math.log(16)) < 0.5 and w["losses"][-1] < 0.5 * w["losses"][0]
        assert 0.015 < w["rates"][0] <= 0.02 and w["rates"] == sorted(w["rates"], reverse=True)
        assert w["rates"][-1] < 0.003  # the Trainer's schedule ends with the run, long before max_steps
    leads = next(w for w in workers if w["rank"] == 0)
    assert leads["logs"]["lsgd_progress"] == 1.0 and leads["logs"]["lsgd_round"] > 0


def test_groups_of_a_sampler_that_repeats_are_dealt_whole(cluster) -> None:
    """Else a group's completions would be of two prompts, and both workers would draw the same ones."""
    plan = ["--algorithm", "local", "--iterations", "40", "--period", "4"]
    _, workers = train(cluster, plan, "--sampler", "repeats")
    groups = [[w["drawn"][first : first + 4] for first in range(0, len(w["drawn"]), 4)] for w in workers]
    assert all(len(set(group)) == 1 for each in groups for group in each)
    first, second = ({group[0] for group in each} for each in groups)
    assert len(first) == len(groups[0]) >= 8 and len(second) == len(groups[1]) >= 8 and not first & second


def test_a_batch_sampler_with_a_fixed_seed_deals_each_worker_its_batches(cluster) -> None:
    plan = ["--algorithm", "local", "--iterations", "16", "--period", "4"]
    _, workers = train(cluster, plan, "--sampler", "batches")
    batches = [[w["drawn"][first : first + 4] for first in range(0, len(w["drawn"]), 4)] for w in workers]
    assert all(batch == [*range(batch[0], batch[0] + 4)] for each in batches for batch in each)
    first, second = ({batch[0] for batch in each[:12]} for each in batches)
    assert first and second and not first & second


def test_a_stream_is_dealt_element_by_element(cluster) -> None:
    plan = ["--algorithm", "bytegrad", "--iterations", "40"]
    _, workers = train(cluster, plan, "--sampler", "stream")
    first, second = (w["drawn"][:48] for w in workers)
    assert sorted(first + second) == list(range(96))


def test_it_pauses_to_evaluate_and_one_worker_saves(cluster) -> None:
    plan = ["--algorithm", "local", "--iterations", "40", "--period", "4"]
    _, workers = train(cluster, plan, "--every", 3)
    assert workers[0]["final"] == workers[1]["final"]
    for w in workers:
        assert w["states"] and set(w["states"]) == {"away"}
        assert w["steps"] == w["iterations"]
    assert workers[0]["saved"] and not workers[1]["saved"]
    assert workers[0]["saved_last"] + workers[1]["saved_last"] == [workers[0]["final"]]  # the consensus, once


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_run_that_ends_while_a_trainer_evaluates(cluster, micro_batches) -> None:
    """The Trainer makes one step more before it stops, which is taken back."""
    plan = ["--algorithm", "bytegrad", "--iterations", "40"]
    waits = ("--every", 3, "--wait-at", 3)
    _, workers = train(cluster, plan, "--micro-batches", micro_batches, first=waits)
    assert sum(w["iterations"] for w in workers) == 40
    assert [w["steps"] for w in workers] == [w["iterations"] for w in workers]
    assert workers[0]["iterations"] <= 4 and workers[0]["final"] == workers[1]["final"]


def test_trainers_that_stop_before_the_run_leave_with_a_consensus(cluster) -> None:
    plan = ["--algorithm", "local", "--iterations", "1000", "--period", "64"]  # no round before both leave
    _, workers = train(cluster, plan, "--max-steps", 7)
    assert [w["steps"] for w in workers] == [w["iterations"] for w in workers] == [7, 7]
    assert workers[0]["final"] == workers[1]["final"]
    assert workers[0]["rates"][-1] == pytest.approx(0.02 / 7)
    assert all(
        golden.text("integrations.leaves_after", count=7) in p.output
        for p in cluster.processes
        if p.name.startswith("worker")
    )


def test_without_an_end_in_the_plan_all_trainers_have_the_consensus(cluster) -> None:
    check_trainers_without_an_end("trainer", cluster)


def test_an_evaluation_at_the_end_of_an_epoch_drops_no_round(cluster) -> None:
    plan = ["--algorithm", "bytegrad", "--iterations", "60"]  # an epoch has 24 batches
    output, workers = train(cluster, plan, "--at-epochs")
    assert "failed" not in output and all(w["states"] for w in workers)
    assert workers[0]["final"] == workers[1]["final"] and sum(w["iterations"] for w in workers) >= 59


def test_a_second_training_alone_is_the_next_stage(cluster) -> None:
    alone = {"LSGD_LOCAL": "", "LSGD_SOLO": "1"}
    cluster.worker("trainer", 0, 0, "--max-steps", 3, "--trainings", 2, **alone).succeeds()
    result = cluster.result(0, 0)
    assert result["iterations"] == result["steps"] == 3 and result["stopped"]


def test_servers_that_were_started_by_hand_refuse_a_second_training_with_a_code_of_its_own(cluster) -> None:
    cluster.start("--workers", "1")
    trainer = cluster.worker("trainer", 0, 0, "--max-steps", 3, "--trainings", 2)
    assert trainer.wait() == 64
    trainer.says(golden.pattern("integrations.joins_again"))


def test_an_exception_in_training_leaves_the_run_which_goes_on(cluster) -> None:
    server, _ = cluster.start("--workers", "2", "--algorithm", "bytegrad", "--iterations", "20")
    failing = cluster.worker("trainer", 0, 0, "--fail-at", 3)
    other = cluster.worker("trainer", 0, 1, "--no-loss")
    assert failing.wait() == 1
    other.succeeds()
    output = server.succeeds()
    failed = Why.FAILED(error="RuntimeError: as the test wants it, in line ")
    assert re.search(rf"{failed}\d+ of trainer.py \(3 iterations\)", output)
    assert re.search(golden.pattern("integrations.makes_consensus"), output)  # what the Trainer computed
    assert cluster.result(0, 1)["iterations"] == 17


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="lsgd.client.muon needs torch 2.9")
def test_the_example(cluster) -> None:
    cluster.start("--workers", "2", "--iterations", "24", "--period", "4")
    workers = [cluster.worker("trainer", 0, i, "--example", EXAMPLE) for i in range(2)]
    outputs = [worker.succeeds() for worker in workers]
    assert any("lsgd_consensus_distance" in each for each in outputs)
    results = [cluster.result(0, i) for i in range(2)]
    assert results[0]["final"] == results[1]["final"]
    assert sum(w["iterations"] for w in results) == 24
    assert (cluster.folder / "transformers-model" / "model.safetensors").exists()


@pytest.mark.slow
def test_what_cannot_be_a_worker_is_refused(monkeypatch, tmp_path) -> None:
    pytest.importorskip("transformers", reason="pip install 'lsgd[transformers]'")
    from transformers import TrainingArguments

    integration = importlib.import_module(MODULE)
    with monkeypatch.context() as environment:
        environment.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=golden.pattern("integrations.in_environment", name="WORLD_SIZE")):
            integration.LsgdCallback()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    integration.check(arguments)
    for name, value, what in (
        ("load_best_model_at_end", True, "load_best_model_at_end"),
        ("auto_find_batch_size", True, "per_device_train_batch_size"),
        ("_n_gpu", 2, "sees 2 GPUs.*CUDA_VISIBLE_DEVICES"),
    ):
        with monkeypatch.context() as changed, pytest.raises(ConfigError, match=what):
            changed.setattr(arguments, name, value)
            integration.check(arguments)


def test_all_stop_early_by_the_mean_of_their_metrics(cluster) -> None:
    """Alone, one would stop at its second evaluation, and the other at its third; by the mean, both at the fourth."""
    plan, scores = ["--algorithm", "local", "--period", "4"], ("--scores", "[10, 12, 2, 9, 9, 9]")
    _, workers = train(
        cluster, plan, "--max-steps", 40, "--every", 5, "--scores", "[10, 4, 12, 13, 9, 9]", first=scores
    )
    assert [w["steps"] for w in workers] == [20, 20] and [w["best"] for w in workers] == [7.0, 7.0]
    assert workers[0]["final"] == workers[1]["final"]


def test_a_worker_that_is_started_again_is_as_patient_as_the_others(tmp_path) -> None:
    """The others have counted evaluations without a better metric; a newcomer takes over what the callback follows."""
    transformers = pytest.importorskip("transformers")
    from transformers.trainer_callback import CallbackHandler

    integration, handlers = importlib.import_module(MODULE), list[Any]()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        eval_strategy="steps",
        metric_for_best_model="loss",
        greater_is_better=False,
    )

    class Asks(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            followed.append(integration.Decisions(state, integration.callbacks_here()))

    followed, states = list[Any](), [transformers.TrainerState(max_steps=40) for _ in range(2)]
    for state in states:
        callbacks = [transformers.EarlyStoppingCallback(3), Asks()]
        handlers.append(CallbackHandler(callbacks, torch.nn.Linear(1, 1), None, None, None))
        handlers[-1].on_train_begin(arguments, state, transformers.TrainerControl())
    states[0].best_metric, states[0].best_global_step = 1.0, 5
    for _ in range(2):
        control = handlers[0].on_evaluate(arguments, states[0], transformers.TrainerControl(), {"eval_loss": 2.0})
        assert not control.should_training_stop
    followed[1].load_state_dict(unpack(pack(followed[0].state_dict())))
    assert states[1].best_metric == 1.0 and states[1].best_global_step == 5
    for handler, state in zip(handlers, states, strict=True):
        control = handler.on_evaluate(arguments, state, transformers.TrainerControl(), {"eval_loss": 2.0})
        assert control.should_training_stop
    assert followed[1].state_dict() == followed[0].state_dict()
    assert [*integration.callbacks_here()] == []


def test_an_evaluation_before_the_training_is_none_of_its_business(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    integration = importlib.import_module(MODULE)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    logs = {"eval_loss": 1.0}
    integration.LsgdCallback().on_log(arguments, state, control, logs=logs)
    assert logs == {"eval_loss": 1.0}


@pytest.mark.parametrize("place", [{"progress": 0.75, "steps": 0}, {"progress": 0.9, "steps": 40, "step": 30}])
def test_a_step_has_the_learning_rate_of_the_runs_progress(place) -> None:
    """Also the first one of a worker that joins late, and the first one after an evaluation.

    Without a length in the plan, it is that of this worker's place: the run's progress falls when a fast one leaves.
    """
    transformers = pytest.importorskip("transformers")
    callback, state = importlib.import_module(MODULE).LsgdCallback(), transformers.TrainerState(max_steps=100)
    callback._worker = SimpleNamespace(**place)
    assert callback._scheduled(state.global_step, 100, 100) == 75
    state.global_step = 80
    assert callback._scheduled(state.global_step, 100, 100) == 80, "the Trainer's own steps end it"


@pytest.mark.parametrize(("step", "stops"), [(38, False), (39, True)])
def test_a_worker_that_was_started_again_ends_where_the_others_do(tmp_path, step: int, stops: bool) -> None:
    """Its Trainer has made five steps of 40, and it was told to begin in the middle."""
    transformers = pytest.importorskip("transformers")
    integration = importlib.import_module(MODULE)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    callback, control = integration.LsgdCallback(), transformers.TrainerControl()
    callback._worker = SimpleNamespace(steps=40, step=step, progress=0.9, end_step=lambda: True)
    state = transformers.TrainerState(max_steps=40, global_step=5)
    callback.on_step_end(arguments, state, control)
    assert control.should_training_stop == stops


def test_a_worker_whose_steps_are_made_asks_for_none(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    integration, calls = importlib.import_module(MODULE), list[str]()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    callback, control, model = integration.LsgdCallback(), transformers.TrainerControl(), torch.nn.Linear(1, 1)
    callback._worker = SimpleNamespace(
        steps=40, step=40, stopped=False, close_step=lambda: None, finish=lambda: calls.append("finish")
    )
    state = transformers.TrainerState(max_steps=40)
    callback.on_step_begin(arguments, state, control, model=model)
    assert control.should_training_stop and calls == ["finish"]
    with torch.no_grad():
        consensus = model.weight.clone()
        model.weight.zero_()  # the step that the Trainer makes before it stops
    state.global_step = 1
    callback.on_step_end(arguments, state, control)
    callback._worker.stopped, callback._worker.leave, callback._worker.first = True, lambda: True, True
    callback.on_epoch_end(arguments, state, control, model=model)
    assert state.global_step == 0 and torch.equal(model.weight, consensus)


@pytest.mark.parametrize("saves", [True, False])
def test_a_save_that_a_metric_asks_for_is_made_by_one_worker(tmp_path, saves: bool) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, save_strategy="no")
    callback, control = importlib.import_module(MODULE).LsgdCallback(), transformers.TrainerControl()
    callback._let_save(arguments, saves)
    control.should_save = True
    callback.on_evaluate(arguments, transformers.TrainerState(), control)
    assert control.should_save == saves


def test_without_the_library_the_import_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'lsgd\[transformers\]'"):
        importlib.import_module(MODULE)
