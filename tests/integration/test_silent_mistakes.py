"""Mistakes that once ended well, or never: each is said, in a run with real servers."""

import itertools
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lsgd.client import Worker
from lsgd.client.control.identity import Identity
from lsgd.client.iteration import steps
from lsgd.client.iteration.steps import FAIL_AFTER_STEPS, WARN_AFTER_STEPS
from lsgd.errors import ConfigError, JoinError, LsgdError
from tests import golden

from .test_steps import BATCH, network


class Loop:
    """A model, its optimizer, and the steps of a worker in this process."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.worker = Worker.join(self.model, self.optimizer)

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(BATCH).square().mean()
        loss.backward()
        return loss

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            assert self.worker.begin_step()
            self.backward()
            self.optimizer.step()
            self.worker.end_step()


@pytest.fixture
def loop(here) -> Iterator[Loop]:
    made = Loop()
    with made.worker:
        yield made


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.ones(8, 6))


def replace_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 1)


def replace_all_modules(model: nn.Sequential) -> None:
    model._modules = {**model._modules, "2": nn.Linear(8, 1)}


def assign_state(model: nn.Sequential) -> None:
    model.load_state_dict(network().state_dict(), assign=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.append(nn.Linear(1, 1)), golden.pattern("silent.frozen")),
        (lambda model: model[0].register_parameter("bias", None), "the parameter 0.bias was removed, since"),
    ],
)
def test_another_set_of_parameters_is_an_error_at_the_next_iteration(loop, change, message) -> None:
    loop.train(2)
    change(loop.model)
    with pytest.raises(LsgdError, match=message):
        loop.train(2)


@pytest.mark.parametrize("change", [replace_parameter, replace_module, replace_all_modules, assign_state])
def test_other_parameters_of_the_same_names_are_taken_and_it_is_said_that_no_optimizer_trains_them(
    loop, caplog, change
) -> None:
    loop.train(2)
    change(loop.model)
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        loop.train(3)
    assert caplog.text.count(golden.text("silent.another_object")) == 1
    loop.optimizer.param_groups[0]["params"] = list(loop.model.parameters())
    before = loop.model[2].weight.clone()
    loop.train(2)
    assert not torch.equal(loop.model[2].weight, before)


def test_new_names_for_the_joined_parameters_are_no_error(loop) -> None:
    loop.train(2)
    loop.model[0] = nn.Sequential(loop.model[0])
    loop.train(2)
    loop.model.append(nn.Tanh())
    loop.train(2)
    assert loop.worker.iterations == 6


def test_an_optimizer_that_loses_a_parameter_is_an_error(loop) -> None:
    loop.train(2)
    loop.optimizer.param_groups[0]["params"] = list(network().parameters())
    with pytest.raises(LsgdError, match=golden.pattern("silent.lost_parameter")):
        loop.train(2)


def test_a_parameter_that_changes_its_group_is_no_error(loop) -> None:
    head = loop.optimizer.param_groups[0]["params"].pop()
    loop.optimizer.add_param_group({"params": [head], "lr": 0.01})
    loop.train(2)


@pytest.mark.parametrize("other", [True, False], ids=["another optimizer", "no step"])
def test_steps_without_the_joined_optimizer_warn_once_and_then_fail(loop, caplog, other) -> None:
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    steps = 0
    with (
        caplog.at_level(logging.WARNING, logger="lsgd"),
        pytest.raises(LsgdError, match=golden.pattern("silent.created_after")),
    ):
        while loop.worker.begin_step():
            loop.backward()
            if other:
                optimizer.step()
            loop.worker.end_step()
            steps += 1
    assert steps == FAIL_AFTER_STEPS
    (message,) = caplog.messages
    assert golden.text("silent.no_step", count=WARN_AFTER_STEPS) in message


@pytest.mark.parametrize(("micro_batches", "marked"), [(64, False), (FAIL_AFTER_STEPS + 1, True)])
def test_accumulation_is_no_mistake(loop, caplog, micro_batches, marked) -> None:
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        for number in range(2 * micro_batches):
            assert loop.worker.begin_step()
            last = number % micro_batches == micro_batches - 1
            with loop.worker.no_sync() if marked and not last else nullcontext():
                loop.model(BATCH).mean().backward()
            if last:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            loop.worker.end_step()
    assert loop.worker.iterations == 2 and not caplog.messages


@pytest.fixture
def exchanging(cluster, monkeypatch) -> nn.Sequential:
    """A model to join with, in a run that exchanges gradients."""
    cluster.start("--workers", "1", "--algorithm", "allreduce")
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")
    return network()


def test_steps_that_are_all_skipped_fail(exchanging, monkeypatch) -> None:
    monkeypatch.setattr(steps, "FAIL_AFTER_STEPS", WARN_AFTER_STEPS)
    optimizer = torch.optim.SGD(exchanging.parameters(), lr=0.01)
    made = 0
    with (
        pytest.raises(LsgdError, match=golden.pattern("silent.every_step_skipped")),
        Worker.join(exchanging, optimizer) as worker,
    ):
        while worker.begin_step():
            optimizer.zero_grad()
            (exchanging(BATCH).mean() * float("inf")).backward()
            optimizer.step()
            worker.end_step()
            made += 1
    assert made == WARN_AFTER_STEPS and worker.iterations == 0


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer):
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(BATCH).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("named", [True, False])
def test_gradients_are_exchanged_in_the_closure_of_a_step(exchanging, named) -> None:
    optimizer = torch.optim.LBFGS(exchanging.parameters(), lr=0.1, max_iter=1)
    closure = closure_of(exchanging, optimizer)
    losses = []
    with Worker.join(exchanging, optimizer) as worker:
        for _ in range(5):
            assert worker.begin_step()
            losses.append((optimizer.step(closure=closure) if named else optimizer.step(closure)).item())
            worker.end_step()
        assert worker.iterations == 5
        assert worker.status()["rounds_global"] == 6  # and that of the next iteration
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("max_iter", "closure", "message"),
    [
        (4, None, golden.pattern("silent.lbfgs")),
        (1, lambda: 0.0, golden.pattern("silent.no_backward")),
    ],
)
def test_a_closure_that_cannot_be_exchanged_is_an_error(exchanging, max_iter, closure, message) -> None:
    optimizer = torch.optim.LBFGS(exchanging.parameters(), max_iter=max_iter)
    with pytest.raises(LsgdError, match=message), Worker.join(exchanging, optimizer) as worker:
        assert worker.begin_step()
        optimizer.step(closure or closure_of(exchanging, optimizer))


class Wrapped(torch.optim.Optimizer):
    """Is an optimizer by its class only, and steps another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wrap", [Wrapped, lambda o: SimpleNamespace(optimizer=Wrapped(o)), lambda o: [Wrapped(o)]])
def test_a_wrapped_optimizer_is_joined(here, wrap) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Worker.join(model, wrap(optimizer)) as worker:
        for _ in range(3):
            assert worker.begin_step()
            model(BATCH).mean().backward()
            Wrapped(optimizer).step()
            worker.end_step()
        assert worker.iterations == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: SimpleNamespace(optimizer="sgd"), r"not a types\.SimpleNamespace; pass"),
        (lambda model: model.parameters(), r"not a torch\.nn\.parameter\.Parameter"),
        (lambda model: None, r"not a builtins\.NoneType"),
        (lambda model: [], "got no optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused_before_the_join(here, given, message) -> None:
    joined = here.processes[0].output.count("joins from")
    model = network()
    with pytest.raises(ConfigError, match=message):
        Worker.join(model, given(model))
    assert here.processes[0].output.count("joins from") == joined


@pytest.mark.parametrize(("algorithm", "warns"), [("leader", True), ("local", False)])
def test_losses_that_elect_nobody_are_said_once(cluster, algorithm, warns) -> None:
    periods = ["--local-period", "4"] if algorithm == "leader" else []
    cluster.start("--workers", "2", "--iterations", "60", "--algorithm", algorithm, "--period", "4", *periods)
    workers = [cluster.worker("mistakes", 0, index, f"--loss={loss}") for index, loss in enumerate(("none", "nan"))]
    outputs = [worker.succeeds() for worker in workers]
    for index, trouble in enumerate((golden.text("loss.no_loss"), golden.text("silent.nonfinite_losses"))):
        assert outputs[index].count(trouble) == warns
        assert outputs[index].count(golden.text("silent.report_loss")) == warns


def test_a_seed_by_rank_is_found_before_anything_is_learned(cluster) -> None:
    """Each worker would take its part of another order: some rows twice, others never."""
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "4")
    identities = [Identity(index, index + 1, cluster.local_address(0), None) for index in range(2)]

    def train(identity: Identity) -> str:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = Worker.join(model, optimizer, identity=identity)
        loader = worker.loader(torch.ones(64, 1), seed=worker.rank)
        try:
            for batch in itertools.chain.from_iterable(worker.batches(loader) for _ in range(100)):
                model(batch).sum().backward()
                optimizer.step()
        except JoinError as error:
            worker.fails(error)
            return str(error)
        return "nothing"

    with ThreadPoolExecutor(2) as threads:
        for said in threads.map(train, identities):
            assert re.search(golden.pattern("silent.divided_at"), said), said
            assert golden.text("silent.same_seed") in said
