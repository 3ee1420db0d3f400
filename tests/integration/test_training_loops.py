"""What a training loop may look like: one worker in this process, real servers, and the server's own count."""

import copy
import io
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lsgd.client import Worker
from lsgd.errors import ConfigError, JoinError, LsgdError
from tests import golden

LENGTH = 96
BATCH = 8


def dataset() -> TensorDataset:
    inputs = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def made(status: dict[str, Any]) -> int:
    """Return the iterations of all workers that have been in the run, whose count begins anew with each of them."""
    return sum(member["done"] for member in status["members"])


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def train(worker: Worker, model, step, *, turns: int = 8, loader=None) -> list[float]:
    """Make so many turns of the loop; ``step`` does what follows the loss. Return the losses."""
    loader = loader or worker.loader(dataset(), batch_size=BATCH)
    losses: list[float] = []
    while len(losses) < turns:
        for x, y in worker.batches(loader):
            loss = nn.functional.mse_loss(model(x), y)
            step(loss, x, y)
            worker.report(loss)
            losses.append(loss.item())
            if len(losses) == turns:
                break
    return losses


def plain(optimizer):
    def step(loss, *_):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_torch_optimizer(here, name) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = made(here.status())
    with Worker.join(model, optimizer) as worker:
        losses = train(worker, model, plain(optimizer), turns=24)
        assert worker.iterations == 24
    assert sum(losses[-4:]) < sum(losses[:4])
    assert made(here.status()) == before + 24


def test_an_optimizer_with_a_closure_steps_once_an_iteration(here) -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    evaluations = 0

    def step(loss, x, y):
        def closure():
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            again = nn.functional.mse_loss(model(x), y)
            again.backward()
            return again

        optimizer.step(closure)

    with Worker.join(model, optimizer) as worker:
        train(worker, model, step, turns=5)
        assert worker.iterations == 5
    assert evaluations > 10


def test_several_parameter_groups_and_optimizers_that_take_turns(here) -> None:
    model = network()
    first = torch.optim.SGD([{"params": [model[0].weight], "lr": 0.1}, {"params": [model[0].bias], "lr": 0.01}], lr=1.0)
    second = torch.optim.Adam(model[2].parameters())
    turn = 0

    def step(loss, *_):
        nonlocal turn
        turn += 1
        model.zero_grad()
        loss.backward()
        if turn % 2:
            first.step()
        if turn % 3:
            second.step()  # every sixth turn neither steps

    with Worker.join(model, [first, second]) as worker:
        train(worker, model, step, turns=12)
        assert worker.iterations == 10
    assert first.param_groups[0]["params"][0] is model[0].weight


def test_micro_batches_of_gradient_accumulation_ask_nothing(here) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    turn = 0

    def step(loss, *_):
        nonlocal turn
        turn += 1
        (loss / 4).backward()
        if turn % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    before = here.status()
    with Worker.join(model, optimizer) as worker:
        train(worker, model, step, turns=40)
        assert worker.iterations == 10
        status = worker.status()
        assert made(status) - made(before) in (9, 10)  # the last one is reported by the next word
        # With a period of 4 iterations and one worker, ten requests are the first round and two more.
        assert status["rounds_global"] - before["rounds_global"] == 3
    assert made(here.status()) == made(before) + 10


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_a_step_that_the_grad_scaler_skips_is_no_iteration(here, options) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = []
    weights = []

    def step(loss, *_):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if len(weights) in (2, 3, 6):
            model[0].weight.grad.fill_(float("inf"))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < scale)
        weights.append(model[0].weight.detach().clone())

    before = made(here.status())
    with Worker.join(model, optimizer) as worker:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train(worker, model, step, turns=10)
        assert skipped == [turn in (2, 3, 6) for turn in range(10)]
        assert torch.equal(weights[3], weights[2])
        assert worker.iterations == 7
    assert made(here.status()) == before + 7


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_compile(here, when) -> None:
    torch._dynamo.reset()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compiled = torch.compile(model, backend="aot_eager")
    if when == "before":  # and run, so that its graph has seen the parameters where they were
        compiled(torch.ones(BATCH, 6))
    with Worker.join(compiled if when == "before" else model, optimizer) as worker:
        if when == "after":
            compiled = torch.compile(model, backend="aot_eager")
        losses = train(worker, compiled, plain(optimizer), turns=24)
        worker._replica.flat.buffers[0].zero_()  # what an exchange does, as far as the graph can tell
        assert compiled(torch.ones(1, 6)).item() == 0.0
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda model: model.to(torch.float64), "the parameter 0.weight had the shape .* in torch.float32, and is"),
        (lambda model: model[2].to(torch.bfloat16), "the parameter 2.weight had the shape"),
        (lambda model: model.to(torch.device("cpu"), memory_format=torch.channels_last), ""),
        (lambda model: None, ""),
    ],
)
def test_a_model_in_another_dtype_after_the_join_raises_at_the_next_batch(here, change, error) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(*_):
        plain(optimizer)(*_)
        change(model)

    with (
        Worker.join(model, optimizer) as worker,
        pytest.raises(LsgdError, match=error) if error else nullcontext(),
    ):
        train(worker, model, step, turns=2)
    assert worker.iterations == (1 if error else 2)


def test_saving_and_copying_during_training(here) -> None:
    model = nn.Sequential(network(), nn.Linear(1, 5000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Worker.join(model, optimizer) as worker:
        train(worker, model[0], plain(optimizer), turns=3)
        stream = io.BytesIO()
        torch.save(model[0].state_dict(), stream)
        assert len(stream.getvalue()) < 5_000
        average = copy.deepcopy(model)
        kept = average[0][0].weight.clone()
        train(worker, model[0], plain(optimizer), turns=3)
        assert torch.equal(average[0][0].weight, kept)
        assert not torch.equal(model[0][0].weight, kept)
        model.load_state_dict(average.state_dict())
        train(worker, model[0], plain(optimizer), turns=1)


def test_data_loader_processes_beside_our_threads(here) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Worker.join(model, optimizer) as worker:
        loader = worker.loader(dataset(), batch_size=BATCH, num_workers=2, prefetch_factor=2)
        for epoch in range(2):
            for index, (x, y) in enumerate(worker.batches(loader), 1):
                plain(optimizer)(nn.functional.mse_loss(model(x), y))
                assert loader.state_dict() == {"epoch": epoch, "consumed": index * BATCH, "seed": 0}
        assert loader.state_dict() == {"epoch": 2, "consumed": 0, "seed": 0}
        assert worker.iterations == 2 * LENGTH // BATCH


def test_a_learning_rate_by_progress_and_a_run_by_time(here) -> None:
    """Without an end there is no progress: the schedule stays where it begins (other runs: test_training_runs)."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Worker.join(model, optimizer) as worker:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - worker.progress)
        train(worker, model, lambda *a: (plain(optimizer)(*a), schedule.step()), turns=6)
        assert optimizer.param_groups[0]["lr"] == 0.05


def test_break_and_pause_and_exceptions_give_grants_back(here) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = made(here.status())
    with pytest.raises(ZeroDivisionError), Worker.join(model, optimizer) as worker:
        loader = worker.loader(dataset(), batch_size=BATCH)
        for _ in worker.batches(loader):
            break  # granted, and not used
        assert [m["state"] for m in worker.status()["members"]] == ["live"]
        with worker.pause():
            assert [m["state"] for m in worker.status()["members"]] == ["away"]
        train(worker, model, plain(optimizer), turns=3)
        with worker.pause():
            assert made(worker.status()) == before + 3
        for _ in worker.batches(loader):
            raise ZeroDivisionError
    assert worker.iterations == 3
    assert made(here.status()) == before + 3


def test_a_step_after_a_pause_in_the_same_turn_is_an_error(here) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = made(here.status())

    def step(*_):
        with worker.pause():
            pass
        plain(optimizer)(*_)

    with (
        pytest.raises(LsgdError, match=golden.pattern("loop.pause_after")),
        Worker.join(model, optimizer) as worker,
    ):
        train(worker, model, step, turns=5)
    assert made(here.status()) == before


def test_an_unsharded_loader_warns_once(here, caplog, monkeypatch) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with caplog.at_level(logging.WARNING, logger="lsgd"), Worker.join(model, optimizer) as worker:
        rounds = worker._steps.rounds
        rounds.seat = rounds.seat._replace(world_size=2)
        loader = DataLoader(dataset(), batch_size=LENGTH // 2, sampler=RandomSampler(range(LENGTH)))
        train(worker, model, plain(optimizer), turns=6, loader=loader)
    assert [m for m in caplog.messages if "is not sharded" in m] == [caplog.messages[0]]


def test_batches_outside_the_with_block_is_an_error(here) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Worker.join(model, optimizer) as worker:
        loader = worker.loader(dataset(), batch_size=BATCH)
    with pytest.raises(LsgdError, match=golden.pattern("loop.batches_inside")):
        next(iter(worker.batches(loader)))


def test_an_optimizer_of_other_parameters_is_refused(here) -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.05)
    with pytest.raises(ConfigError, match=golden.pattern("loop.foreign_parameter")):
        Worker.join(network(), optimizer)


def test_a_second_worker_of_the_same_name_is_refused(here) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Worker.join(model, optimizer) as worker:
        train(worker, model, plain(optimizer), turns=1)
        other = network()
        with pytest.raises(JoinError, match=golden.pattern("loop.already_in")):
            Worker.join(other, torch.optim.SGD(other.parameters(), lr=0.05))
        train(worker, model, plain(optimizer), turns=1)


def all_but_the_third_count(
    cluster, monkeypatch, turn: Callable[[nn.Module, list[torch.optim.Optimizer], Tensor, bool], None]
) -> None:
    """Let two optimizers make six turns, of which the third has a gradient that is not finite."""
    cluster.start("--workers", "1", "--algorithm", "allreduce")
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    model = network()
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.05) for index in (0, 2)]
    turns = 0

    def step(loss, *_):
        nonlocal turns
        turns += 1
        before = [p.clone() for p in model.parameters()]
        turn(model, optimizers, loss, turns == 3)
        same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert all(same) if turns == 3 else not any(same)

    with Worker.join(model, optimizers) as worker:
        train(worker, model, step, turns=6)
    assert worker.iterations == 5
    assert made(cluster.status()) == 5


def test_with_two_optimizers_a_gradient_that_is_not_finite_is_no_iteration(cluster, monkeypatch) -> None:
    def turn(model, optimizers, loss, overflows):
        (loss * (float("inf") if overflows else 1.0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    all_but_the_third_count(cluster, monkeypatch, turn)


@pytest.mark.parametrize("layer", [0, 2], ids=["first", "last"])
def test_of_two_optimizers_the_grad_scaler_skips_the_one_that_overflows(cluster, monkeypatch, layer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def turn(model, optimizers, loss, overflows):
        overflow = model[layer].weight.register_hook(lambda gradient: gradient / (not overflows))
        scaler.scale(loss).backward()
        overflow.remove()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    all_but_the_third_count(cluster, monkeypatch, turn)
    assert scaler.get_scale() == 2.0
