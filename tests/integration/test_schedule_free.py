"""Schedule-free optimizers: the weights to evaluate with are one model, too, whenever a script asks for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, ScheduleFreeWrapper, SGDScheduleFree
from torch import Tensor, nn

import lsgd
from lsgd.client import Worker
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control.identity import Identity
from lsgd.client.control.island import Island
from lsgd.errors import ConfigError
from lsgd.flat import describe
from tests import golden

from .test_wrap import in_threads

STEPS = 8
LOCAL = ("--algorithm", "local", "--period", "4")
CASES = [
    *(pytest.param(LOCAL, kind, id=kind.__name__) for kind in (AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree)),
    pytest.param((*LOCAL, "--delay", "2"), AdamWScheduleFree, id="delay"),
    *(
        pytest.param(("--algorithm", *arguments), AdamWScheduleFree, id=arguments[0])
        for arguments in (("leader", "--period", "4", "--local-period", "4"), ("decentralized",), ("allreduce",))
    ),
]


def made(kind: type = AdamWScheduleFree) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, kind(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, random: torch.Generator) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, 4, generator=random)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def evaluates_after(worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    assert worker.finish()
    optimizer.eval()
    return weights(model)


def evaluates_before(worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    optimizer.eval()
    assert worker.finish()
    return weights(model)


@pytest.mark.parametrize(("arguments", "kind"), CASES)
def test_the_weights_to_evaluate_with_are_one_model(cluster, tmp_path: Path, arguments, kind) -> None:
    """One worker evaluates every three steps and waits in a call meanwhile, and is to train as if it did not."""
    cluster.start("--workers", "2", *arguments)
    ends: list[Callable[..., list[Tensor]]] = [evaluates_after, evaluates_before]

    def train(index: int, identity: Identity) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = made(kind)
        worker = lsgd.wrap(model, optimizer, steps=STEPS, identity=identity, checkpoint_dir=tmp_path)
        random = torch.Generator().manual_seed(index)
        optimizer.train()
        for number in range(STEPS):
            step(model, optimizer, random)
            if number % 3 == 2:
                optimizer.eval()
                seen = weights(model)
                worker.mean({"loss": 1.0})
                if arguments[1] == "allreduce":
                    assert all(map(torch.allclose, seen, weights(model)))
                optimizer.train()
        trained = ends[index](worker, model, optimizer)
        optimizer.train()
        return trained, weights(model)

    (one, to_train_on), (other, others) = in_threads(cluster, train)
    assert same(one, other) and same(to_train_on, others)
    assert not same(one, to_train_on), "the average is another model than the one to train on"
    begun, _ = made(kind)
    assert not same(one, weights(begun))
    again, restored = made(kind)
    saved = Checkpoints(again, [restored], {}, None, tmp_path, Island())
    assert saved.load("node0/worker0", *describe(again)).iterations == 2 * STEPS
    restored.eval()
    assert all(torch.allclose(x, y, atol=0.2) for x, y in zip(weights(again), one, strict=True))


def test_a_wrapper_that_swaps_weights_within_its_step_is_refused(here) -> None:
    model, _ = made()
    wrapper = ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=golden.pattern("integrations.own_class")):
        Worker.join(model, wrapper)
