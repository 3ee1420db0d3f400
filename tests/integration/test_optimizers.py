"""torch's optimizers, one by one: iterations are counted, the model is one, and a checkpoint brings the state back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

import lsgd
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control.identity import Identity
from lsgd.client.control.island import Island
from lsgd.flat import describe

from .test_wrap import in_threads

STEPS = 6


def rows() -> nn.Module:
    """Return a model whose gradients are sparse."""
    return nn.Embedding(8, 1, sparse=True)


def matrices() -> nn.Module:
    """Return a model of matrices alone, as Muon takes them."""
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "SGD": (layers, {"momentum": 0.9, "nesterov": True}),
    "LBFGS": (layers, {"lr": 0.1, "max_iter": 3}),
    "SparseAdam": (rows, {}),
    "Muon": (matrices, {}),
    **{
        name: (layers, {})
        for name in ("Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
    },
    "Adafactor": (layers, {}),
}


def made(name: str) -> tuple[nn.Module, Optimizer]:
    model, options = CASES[name]
    torch.manual_seed(0)
    return (built := model()), getattr(torch.optim, name)(built.parameters(), **options)


def tensors_of(optimizer: Optimizer) -> list[Any]:
    leaves: list[Any] = _pytree.tree_leaves(optimizer.state_dict()["state"])
    return leaves


def equal(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, Tensor) else bool(one == two)


def test_the_list_is_torchs() -> None:
    classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    assert {kind.__name__ for kind in classes} == {"Optimizer", *CASES}


@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_of_torch(cluster, tmp_path: Path, name: str) -> None:
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "2", "--compression", "none")

    def train(index: int, identity: Identity) -> tuple[nn.Module, Optimizer]:
        model, optimizer = made(name)
        worker = lsgd.wrap(model, optimizer, steps=STEPS, identity=identity, checkpoint_dir=tmp_path)
        random = torch.Generator().manual_seed(index)

        def loss() -> Tensor:
            optimizer.zero_grad()
            x = (
                torch.randint(8, (4,), generator=random)
                if name == "SparseAdam"
                else torch.randn(4, 4, generator=random)
            )
            value: Tensor = model(x).square().mean()
            value.backward()
            return value

        for step in range(STEPS):
            if name == "LBFGS":
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            assert worker.iterations == step + 1
        assert worker.finish()
        return model, optimizer

    (model, optimizer), (other, _) = in_threads(cluster, train)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    begun, _ = made(name)
    assert not any(map(torch.equal, model.parameters(), begun.parameters())), "it has trained"
    again, restored = made(name)
    saved = Checkpoints(again, [restored], {}, None, tmp_path, Island())
    assert saved.load("node0/worker0", *describe(again)).iterations == 2 * STEPS and saved.resumed.iterations == STEPS
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    kept = tensors_of(restored)
    assert kept and all(map(equal, tensors_of(optimizer), kept))
