"""Learning rates that follow the run: one worker in this process, real servers."""

import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lsgd
from lsgd.client import Worker
from lsgd.client.control import joining
from lsgd.errors import ConfigError, LsgdError
from lsgd.learning_rate import factor
from lsgd.run_folder import CHECKPOINTS
from tests import golden

from .running import Cluster, Process, until

RATE = 0.05
ITERATIONS = 64
WHOLE_RUN = ("--workers", "1", "--iterations", str(ITERATIONS), "--period")


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=RATE)


def train(worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer, most: int, micro: int = 1) -> list[float]:
    """Make at most so many iterations of some micro-batches; return the rate that each forward pass has seen."""
    rates = []
    for _ in range(most):
        for last in range(1, micro + 1):
            if not worker.begin_step():
                return rates
            rates.append(optimizer.param_groups[0]["lr"])
            loss = model(torch.ones(4, 6)).square().mean()
            loss.backward()
            worker.status()  # what was asked for before is answered before
            if last == micro:
                optimizer.step()
                optimizer.zero_grad()
            if not worker.end_step(loss):
                return rates
    return rates


@pytest.fixture
def join(cluster, monkeypatch):
    """Start the servers, and have this process join with a model and its optimizer."""
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")

    def start(period: int, *arguments: str):
        servers = cluster.start(*WHOLE_RUN, str(period), "--local-period", str(period), *arguments)
        monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
        return servers

    return start


@pytest.mark.parametrize("lookahead", [0, 64])
@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_each_iteration_has_the_rate_of_its_place_in_the_run(join, kind: str, lookahead: int) -> None:
    """Also where answers come for up to 16 iterations at once, a quarter of the period."""
    join(ITERATIONS, "--lookahead", str(lookahead))
    model, optimizer = parts()
    with Worker.join(model, optimizer) as worker:
        wrapper = SimpleNamespace(optimizer=optimizer)  # as accelerate's
        worker.schedule(wrapper, kind, warmup=0.25, decay=0.25)
        rates = train(worker, model, optimizer, ITERATIONS + 1, micro=2)
        assert worker.stopped and worker.progress == 1.0
    assert rates[::2] == rates[1::2], "it changed within an iteration"
    wanted = [RATE * factor(kind, (i + 0.5) / ITERATIONS, 0.25, 0.25) for i in range(ITERATIONS)]
    assert rates[::2] == pytest.approx(wanted, rel=1e-6)


def test_a_resumed_run_goes_on_from_its_base_rate(join, tmp_path: Path, monkeypatch) -> None:
    server, locals_ = join(16, "--lookahead", "0", "--checkpoint-every", "1")
    model, optimizer = parts()
    with Worker.join(model, optimizer, checkpoint_dir=tmp_path / CHECKPOINTS) as worker:
        worker.schedule(optimizer, "linear")
        assert train(worker, model, optimizer, 40)[-1] < 0.5 * RATE
    for process in (server, *locals_):
        if process.poll() is None:
            process.send(signal.SIGKILL)
        process.wait()
    monkeypatch.setenv("LSGD_RESUME", str(tmp_path / CHECKPOINTS))
    monkeypatch.setattr(joining, "_been_in", Counter())  # as in a process of its own
    join(16, "--lookahead", "0")
    model, optimizer = parts()
    with Worker.join(model, optimizer) as worker:
        assert optimizer.param_groups[0]["lr"] == RATE, "a rate that a schedule sets is not the checkpoint's"
        worker.schedule(optimizer, "linear")
        rates = train(worker, model, optimizer, ITERATIONS)
        assert worker.stopped
    wanted = [RATE * (1 - (i + 0.5) / ITERATIONS) for i in range(ITERATIONS - len(rates), ITERATIONS)]
    assert len(rates) == ITERATIONS - 32, "it goes on after the last global round"
    assert rates == pytest.approx(wanted, rel=1e-6)


def warm_cosine(optimizer: torch.optim.Optimizer, steps: int) -> lr_scheduler.SequentialLR:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, steps - 10)], [10])


def uninterrupted(steps: int, rate: float) -> list[float]:
    """Return the rates of a script without lsgd."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate)
    scheduler, rates = warm_cosine(optimizer, steps), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def done_by(cluster: Cluster, worker: str) -> int:
    return next(int(member["done"]) for member in cluster.status()["members"] if member["worker"] == worker)


def test_a_worker_that_was_killed_has_the_rates_of_its_place_or_is_refused(cluster) -> None:
    """The first time that it comes back, its script does not say worker.follow."""
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "4")
    steady = cluster.worker("scheduled", 0, 0, "--wait-at", '{"30": 1, "60": 2}')
    assert cluster.worker("scheduled", 0, 1, "--die-at", 20).wait() == -signal.SIGKILL
    until(lambda: done_by(cluster, "node0/worker0") >= 29, "the steady one is where it waits")
    untold = cluster.worker("scheduled", 0, 1, "--life", 1, "--untold")
    assert untold.wait() == 1
    untold.says(golden.pattern("schedulers.at_30_of_90"))
    untold.says(golden.pattern("schedulers.follow"))
    until(lambda: done_by(cluster, "node0/worker0") >= 59, "the steady one is where it waits")
    told = cluster.worker("scheduled", 0, 1, "--life", 2)
    told.succeeds()
    steady.succeeds()
    wanted = uninterrupted(90, 0.1)
    for index, begun in ((0, [0]), (1, [59, 60])):
        rates = cluster.result(0, index)
        first, _ = rates[0]
        assert first in begun and [step for step, _ in rates] == [*range(first, 90)]
        assert [rate for _, rate in rates] == pytest.approx(wanted[first:], rel=1e-9)


def test_a_resumed_script_has_the_rates_of_its_place_or_is_refused(cluster, monkeypatch) -> None:
    """With its scheduler made before or after the join."""
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")
    wanted = uninterrupted(ITERATIONS, RATE)

    def begin(*arguments: str) -> list[Process]:
        server, locals_ = cluster.start("--workers", "1", "--algorithm", "local", "--period", "4", *arguments)
        monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
        return [server, *locals_]

    def end(servers: list[Process]) -> None:
        for process in servers:
            process.end()
        monkeypatch.setenv("LSGD_RESUME", str(cluster.folder / CHECKPOINTS))

    def run(worker: Worker, scheduler: Any, model: nn.Module, optimizer: torch.optim.Optimizer, until: int) -> None:
        for step in range(worker.step, until):
            loss = model(torch.ones(4, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted[step], rel=1e-9)
            optimizer.step()
            scheduler.step()

    servers, (model, optimizer) = begin("--checkpoint-every", "1"), parts()
    worker = lsgd.wrap(model, optimizer, steps=ITERATIONS, checkpoint_dir=cluster.folder / CHECKPOINTS)
    run(worker, worker.follow(warm_cosine(optimizer, ITERATIONS)), model, optimizer, 31)
    worker.fails(RuntimeError("as the test wants it"))
    end(servers)
    servers, (model, optimizer) = begin(), parts()
    worker = lsgd.wrap(model, optimizer, steps=ITERATIONS)
    scheduler = warm_cosine(optimizer, ITERATIONS)
    with pytest.raises(LsgdError, match=golden.pattern("schedulers.at", place="step 28 of 64")):
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
    worker.fails(RuntimeError("as the test wants it"))
    end(servers)
    servers, (model, optimizer) = begin(), parts()
    scheduler = warm_cosine(optimizer, ITERATIONS)
    worker = lsgd.wrap(model, optimizer, steps=ITERATIONS)
    run(worker, worker.follow(scheduler), model, optimizer, ITERATIONS)
    assert worker.iterations == ITERATIONS and worker.finish()


def test_a_run_without_an_end_has_no_schedule(here) -> None:
    model, optimizer = parts()
    with (
        Worker.join(model, optimizer) as worker,
        pytest.raises(ConfigError, match=golden.pattern("schedulers.needs_end")),
    ):
        worker.schedule(optimizer, "cosine")
