"""Muon and AdamW as one optimizer: which parameter goes where, and all that takes an optimizer takes it."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import lsgd.client
from lsgd.algorithms.local import LocalSettings
from lsgd.client import Worker
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.checkpoint.reshard import Resharding
from lsgd.client.control.island import Island
from lsgd.client.room import lack_of_room, left_in
from lsgd.errors import ConfigError
from lsgd.flat import FlatParameters, describe
from lsgd.learning_rate import factor, set_rates
from lsgd.shards import load_optimizer, local, local_state
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, simulate
from tests import golden

WIDTH = 8


class Block(nn.Module):
    """Attention and a perceptron, as in torch's encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.shrink = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


BLOCK = {"attention.in_proj_weight", "attention.out_proj.weight", "widen.weight", "shrink.weight"}
BLOCKS = {f"blocks.{i}.{name}" for i in range(2) for name in BLOCK}


class Decoder(nn.Module):
    """A language model whose head is its own, tied, or the embedding in ``forward``."""

    def __init__(self, head: str = "") -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, WIDTH), nn.Embedding(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        if head:
            self.head = nn.Linear(WIDTH, 16, bias=False)
        if head == "tied":
            self.head.weight = self.tokens.weight


class Vision(nn.Module):
    """A vision transformer with patches by a convolution, and tables as bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.zeros(1, WIDTH)), nn.Parameter(torch.zeros(5, WIDTH))
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)


class Recurrent(nn.Module):
    """An LSTM between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.logits = nn.Embedding(16, WIDTH), nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 16)


class Adapted(nn.Module):
    """A frozen layer with low-rank factors: one pair as layers, one by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.A, self.B = nn.Parameter(torch.zeros(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))
        self.head = nn.Linear(WIDTH, 2).requires_grad_(False)


class Image(nn.Sequential):
    """Layers with norms of two-dimensional weights, and a gate of one row."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm((4, WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 2))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


GATES = {f"lstm.weight_{kind}_l{layer}" for kind in ("ih", "hh") for layer in range(2)}


@pytest.mark.parametrize("kind", ["muon", "a list", "adamw"])
def test_the_servers_hear_whether_a_worker_bears_a_delay(monkeypatch, tmp_path, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LSGD_ITERATIONS", "1")
    model = mlp()
    optimizers = {
        "muon": lambda: lsgd.client.muon(model),
        "a list": lambda: [torch.optim.Muon([model[0].weight]), torch.optim.AdamW(model[2].parameters())],
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
    }
    with Worker.join(model, optimizers[kind]()) as worker:
        replica = worker._steps.rounds._replica
        assert worker._membership.join.bears_delay == (kind != "adamw") == replica.algorithm.muon


def test_a_model_that_leaves_no_memory_for_a_copy_has_no_delay(tmp_path) -> None:
    assert lack_of_room(mlp()) == ""
    assert "takes about 24000.0 GB" in lack_of_room(nn.Linear(1_000_000, 1_000_000, device="meta"))
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        group = tmp_path / limit
        group.mkdir()
        (group / limit).write_text("1000\n"), (group / used).write_text("600\n")
        assert [*left_in(group)] == [400]
    (tmp_path / "memory.max" / "memory.max").write_text("max\n")
    assert [*left_in(tmp_path / "memory.max")] == []


@pytest.mark.parametrize(
    ("model", "hidden"),
    [
        (Decoder("own"), BLOCKS),
        (Decoder("tied"), BLOCKS),
        (Decoder(), BLOCKS),
        (Vision(), BLOCKS),
        (Recurrent(), GATES),
        (nn.LSTM(WIDTH, WIDTH), {"weight_ih_l0", "weight_hh_l0"}),
        (mlp(), {"0.weight", "2.weight"}),
        (Adapted(), {"down.weight", "up.weight"}),
        (Image(), {"1.weight"}),
        (torch.compile(mlp(), backend="eager"), {"_orig_mod.0.weight", "_orig_mod.2.weight"}),
        (mlp().to(torch.bfloat16), {"0.weight", "2.weight"}),
    ],
    ids=["gpt", "tied", "tied-by-hand", "vit", "lstm", "lstm-alone", "mlp", "lora", "norms", "compiled", "bfloat16"],
)
def test_hidden_matrices_are_muons_and_the_rest_adamws(model: nn.Module, hidden: set[str]) -> None:
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    fast, rest = lsgd.client.muon(model, lr=0.01).param_groups
    assert fast["muon"] and not rest["muon"] and fast["lr"] == rest["lr"] == 0.01
    assert {names[id(p)] for p in fast["params"]} == hidden
    assert {names[id(p)] for p in rest["params"]} == set(names.values()) - hidden


def test_patterns_have_the_last_word() -> None:
    model = mlp()
    for optimizer in (
        lsgd.client.muon(model, exclude=["0.*"], include=["4.weight"]),
        lsgd.client.muon(model, exclude="0.*", include="4.weight"),
    ):
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model[2].weight), id(model[4].weight)]


def test_a_checkpointed_root_renames_its_parameters_and_changes_nothing() -> None:
    model = mlp()
    optimizer = lsgd.client.muon(checkpoint_wrapper(model))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model[0].weight), id(model[2].weight)]


def test_it_logs_what_went_where(caplog) -> None:
    with caplog.at_level(logging.INFO, "lsgd"):
        lsgd.client.muon(Decoder("own"))
    assert caplog.messages == [
        golden.text("muon.muon_tensors"),
        golden.text("muon.adamw_tensors"),
    ]


def test_what_it_cannot_do_is_refused(monkeypatch) -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    for model in (convolutions, nn.Embedding(4, 4)):
        with pytest.raises(ConfigError, match=golden.pattern("muon.no_matrix")):
            lsgd.client.muon(model)
    with pytest.raises(ConfigError, match=golden.pattern("muon.four_dimensions")):
        lsgd.client.muon(convolutions, include=["1.*"])
    for wrong in ({"include": ["x.*"]}, {"exclude": ["x.*"]}):
        with pytest.raises(ConfigError, match=golden.pattern("muon.nothing_fits")):
            lsgd.client.muon(mlp(), **wrong)
    with pytest.raises(ConfigError, match=golden.pattern("muon.no_matrix_included")):
        lsgd.client.muon(nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 8), nn.Linear(8, 2)))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=golden.pattern("muon.old_torch")):
        lsgd.client.muon(mlp())


def test_a_checkpoint_whose_groups_were_others_cannot_be_divided_anew() -> None:
    """As where a router of four rows was Muon's on four processes, and is AdamW's on eight."""
    model = mlp()
    saved = {"optimizers": [lsgd.client.muon(model).state_dict()]}
    resharding = Resharding(model, FlatParameters(model).layout, [lsgd.client.muon(model, exclude=["0.*"])])
    with pytest.raises(ConfigError, match=golden.pattern("muon.other_split")):
        resharding.add(saved, Path("file.pt"))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Train on the same batches in every call."""
    numbers = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    for _ in range(count):
        x = torch.randn(4, 6, generator=numbers).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def bits(model: nn.Module) -> list[Tensor]:
    return [local(p).detach().clone() for p in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_steps_are_those_of_the_two_optimizers(dtype) -> None:
    together, apart = mlp().to(dtype), mlp().to(dtype)
    steps(together, lsgd.client.muon(together, lr=0.01, weight_decay=0.1), 5)
    matrices = [apart[0].weight, apart[2].weight]
    rest = [p for p in apart.parameters() if all(p is not m for m in matrices)]
    both = (
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
    )

    class Both:
        def zero_grad(self) -> None:
            [optimizer.zero_grad() for optimizer in both]

        def step(self) -> None:
            [optimizer.step() for optimizer in both]

    steps(apart, Both(), 5)  # type: ignore[arg-type]
    assert equal(bits(together), bits(apart)) and not equal(bits(apart), bits(mlp().to(dtype)))


def test_a_copy_and_a_pickle_go_on_with_the_same_bits() -> None:
    model = mlp()
    optimizer = lsgd.client.muon(model, lr=0.01)
    steps(model, optimizer, 3)
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    steps(model, optimizer, 3)
    for same, its in copies:
        steps(same, its, 3)
        assert equal(bits(same), bits(model))


def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    def checkpoints(model: nn.Module, optimizer: torch.optim.Optimizer) -> Checkpoints:
        made = Checkpoints(model, [optimizer], {}, tmp_path, tmp_path, Island())
        made.load("node0/worker0", *describe(model))
        return made

    model = mlp()
    optimizer = lsgd.client.muon(model, lr=0.01)
    writer = checkpoints(model, optimizer)
    writer.start("run")
    flat = FlatParameters(model)
    steps(model, optimizer, 4)
    assert writer.save(writer.take(4, LocalSettings().create(flat.buffers), [], 4)) is not None
    steps(model, optimizer, 4)
    later = mlp()
    its = lsgd.client.muon(later, lr=1.0)
    checkpoints(later, its)
    assert [group["lr"] for group in its.param_groups] == [0.01, 0.01]
    steps(later, its, 4)
    assert equal(bits(later), bits(model))
    with pytest.raises(ConfigError, match=golden.pattern("muon.other_optimizer")):
        checkpoints(later, torch.optim.AdamW(later.parameters()))


def test_schedules_set_both_rates() -> None:
    optimizer = lsgd.client.muon(mlp(), lr=0.5)
    set_rates(optimizer, factor("linear", 0.5, 0.0, 0.2))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    optimizer = lsgd.client.muon(mlp(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_scaler_skips_its_steps_and_a_closure_is_evaluated() -> None:
    model = mlp()
    optimizer, scaler, before = lsgd.client.muon(model), torch.amp.GradScaler("cpu"), bits(model)
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 6)).sum() * (float("inf") if bad else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert equal(bits(model), before) == bad

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize(("whose", "state"), [({}, "exp_avg"), ({"muon": True}, "momentum_buffer")])
def test_groups_that_are_added_are_adamws_unless_they_say(whose: dict[str, bool], state: str) -> None:
    model, late = mlp(), nn.Parameter(torch.ones(3, 3))
    optimizer = lsgd.client.muon(model, lr=0.01)
    optimizer.add_param_group({"params": [late], **whose})
    late.grad = torch.ones(3, 3)
    optimizer.step()
    assert state in optimizer.state[late]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_matrices_train_and_their_state_comes_back(mesh) -> None:
    def sharded() -> nn.Sequential:
        model = mlp()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model

    whole, model, later = mlp(), sharded(), sharded()
    optimizer, its = lsgd.client.muon(model, lr=0.01), lsgd.client.muon(later, lr=1.0)
    assert len(optimizer.param_groups[0]["params"]) == 2
    steps(model, optimizer, 3)
    steps(whole, lsgd.client.muon(whole, lr=0.01), 3)
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(bits(model), bits(whole), strict=True))
    later.load_state_dict(model.state_dict())
    load_optimizer(its, copy.deepcopy(local_state(optimizer.state_dict())))
    steps(model, optimizer, 3)
    steps(later, its, 3)
    assert equal(bits(model), bits(later))


def final_loss(made: Callable[..., torch.optim.Optimizer]) -> float:
    """Return the loss of two workers that learn to add modulo 16, in 2 bits every 8 steps."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
    start = nn.Sequential(nn.Embedding(16, 32), nn.Flatten(), nn.Linear(64, 32), nn.GELU(), *hidden, nn.Linear(32, 16))
    every = torch.cartesian_prod(torch.arange(16), torch.arange(16))

    def member(group: SimulatedGroup) -> float:
        model = copy.deepcopy(start)
        settings = LocalSettings(period=8, compression="levels2")
        worker = SimulatedWorker.of_model(group, settings, model, made(model), steps=128)
        numbers = torch.Generator().manual_seed(group.rank)
        for step in range(128):
            set_rates(worker.optimizer, factor("wsd", (step + 0.5) / 128, 0.05, 0.2))
            x = torch.randint(16, (16, 2), generator=numbers)
            worker.step(lambda x=x: cross_entropy(model(x), x.sum(1) % 16))
        return cross_entropy(model(every), every.sum(1) % 16).item()

    return max(simulate((1, 1), member))


def test_two_workers_learn_what_adamw_has_not_learned_by_then() -> None:
    assert final_loss(partial(lsgd.client.muon, lr=0.02)) < 1.0
    for lr in (0.01, 0.02):
        assert final_loss(lambda model, lr=lr: torch.optim.AdamW(model.parameters(), lr=lr)) > 1.4
