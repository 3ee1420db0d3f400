"""Groups composed of two: one of torch.distributed in each node, over Gloo in NCCL's place, and TCP between nodes."""

import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lsgd.algorithms import ALGORITHMS
from lsgd.client.groups import torch_group as torch_groups
from lsgd.client.groups.base import INSIDE_PATIENCE
from lsgd.client.groups.composed_group import ComposedGroup
from lsgd.collectives import composed
from lsgd.collectives.composed import Composed
from lsgd.errors import ExchangeError
from lsgd.settings import AlgorithmSettings
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, simulate
from scripts.link_table import PAGE, table

from ..lsgd.reference import Exchange
from ..lsgd.training import make_round
from ..speed import scaled
from .bench import CERTIFICATE
from .test_groups import HOUR_S, KEPT, TIMEOUT_S, LikeNccl, every_verb, run, switchboard

__all__ = ["switchboard"]

NODES = [(2, 2), (3, 1)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(composed, "PIECE_NBYTES", 20_000)


@pytest.mark.parametrize("node_sizes", [(1,), (3,), (1, 1), (2, 2), (1, 3), (2, 1, 3)])
def test_every_verb_of_two_simulated_groups(node_sizes) -> None:
    assert simulate(node_sizes, lambda group: every_verb(Composed(group.node, group))) == [True] * sum(node_sizes)


@pytest.mark.parametrize(("node_sizes", "nccl_nodes"), [((2, 2), (0, 1)), ((3, 1), (0,)), ((2, 1, 2), (2,))])
def test_every_verb_on_all_members_and_its_subgroups(switchboard, node_sizes, nccl_nodes) -> None:
    def work(group: ComposedGroup) -> str:
        assert every_verb(group)
        assert every_verb(group.node)
        assert group.node._timeout_s == INSIDE_PATIENCE * TIMEOUT_S
        if group.across is not None:
            assert every_verb(group.across)
        x = torch.tensor([float(group.rank)])
        if group.rank != 1:
            others = [rank for rank in reversed(range(group.size)) if rank != 1]
            group._subgroup("some", others, one_node=False).broadcast(x, 0)
            assert x.item() == others[0]
        return group.transport

    said = run(switchboard, node_sizes, work, transport="tcp", nccl_nodes=nccl_nodes, certificate=CERTIFICATE)
    for node, first in enumerate(sum(node_sizes[:node]) for node in range(len(node_sizes))):
        expected = "tcp, encrypted" + ", and gloo inside the node" * (node in nccl_nodes)
        assert said[first:][: node_sizes[node]] == [expected] * node_sizes[node]


def test_what_all_need_enters_a_node_once_and_messages_go_directly() -> None:
    def work(all_: SimulatedGroup) -> list[int]:
        group, counted = Composed(all_.node, all_), [0]
        tensors = [torch.ones(100) for _ in range(4)]

        def count() -> None:
            counted.append(all_.sent_nbytes - all_.node.sent_nbytes)

        group.all_reduce(torch.ones(100)).wait()
        count()
        group.broadcast(torch.ones(100), 1)
        count()
        group.all_gather(tensors, torch.ones(100)).wait()
        count()
        group.all_to_all(tensors, [torch.ones(100) for _ in range(4)]).wait()
        count()
        return [after - before for before, after in pairwise(counted)]

    first, second, third, fourth = simulate((2, 2), work)
    assert first == [400, 400, 800, 800]
    assert third == [400, 0, 800, 800]
    assert second == fourth == [0, 0, 0, 800]


ROUNDS = 4
EXACT = {
    "allreduce": {},
    "decentralized": {"peers": "all"},
    "diloco": {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.5},
    "elastic": {"period": 2, "strength": 0.5},
    "leader": {"period": 2, "local_period": 1, "compression": "none"},
    "local": {"period": 2, "compression": "none", "rescale": False},
}
"""Settings at full precision with which all sums of numbers of few bits are exact, in whatever order they are added."""

COMPRESSED = {
    "bytegrad": {},
    "bytegrad in 4 bits": {"codec": "minmax4"},
    "bytegrad between all": {"hierarchical": False},
    "leader": {"period": 2, "local_period": 2, "compression": "minmax8"},
    "local": {"period": 2},
    "local later": {"period": 2, "delay": 1},
    "local between all": {"period": 2, "hierarchical": False, "compression": "minmax8"},
    "low_precision_decentralized": {},
    "low_precision_decentralized between all": {"hierarchical": False},
    "qsgd": {},
    "sparse": {"period": 2},
}
GOSSIP = {"decentralized": {"hierarchical": False}, "decentralized by turns": {"peers": "shift_one"}}


def settings_of(name: str, values: dict) -> AlgorithmSettings:
    return ALGORITHMS[name.partition(" ")[0]](**values)


def train(switchboard, node_sizes, settings: AlgorithmSettings, number: int, **fields) -> list[Tensor]:
    """Return each worker's model after some rounds; gradients, models and the learning rate have few bits."""

    def work(group: ComposedGroup) -> Tensor:
        random = torch.Generator().manual_seed(group.rank)
        parts = [torch.arange(length) % 31 / 16 - 1 for length in (9000, 70)]
        models = [part.requires_grad_() for part in parts]
        for x in models:
            x.grad = torch.zeros_like(x)
        flat, gradients = [x.detach() for x in models], [x.grad for x in models]
        worker = SimulatedWorker(group, settings, flat, gradients, torch.optim.SGD(models, lr=0.25), run="r")

        def loss() -> Tensor:
            return sum((x * torch.randint(-8, 9, x.shape, generator=random) / 4).sum() for x in models)

        for step in range(settings.schedule().period * ROUNDS):
            since, order = step % settings.schedule().period, None
            if since % settings.schedule().local_period == 0:
                exchange = Exchange(0 if since else None, 1, (1, node_sizes[0]), step)
                order = make_round(node_sizes, step + 1, exchange=exchange)
            if order is not None:
                worker.begin(order) if step == 0 else worker.settle()
            worker.iterate(order, loss)
        worker.settle()
        return torch.cat(flat)

    models = run(switchboard, node_sizes, work, number=number, transport="tcp", **fields)
    assert all(isinstance(x, Tensor) for x in models), models
    return models


def train_twice(switchboard, node_sizes, settings: AlgorithmSettings) -> tuple[list[Tensor], list[Tensor]]:
    """Return the models of workers whose nodes have groups of their own inside, and of workers over TCP alone."""
    inside = tuple(node for node, size in enumerate(node_sizes) if size > 1)
    return train(switchboard, node_sizes, settings, 1, nccl_nodes=inside), train(switchboard, node_sizes, settings, 2)


@pytest.mark.parametrize("node_sizes", NODES)
@pytest.mark.parametrize("name", [*EXACT, *GOSSIP])
def test_at_full_precision_every_bit_is_that_of_tcp(switchboard, node_sizes, name) -> None:
    settings = settings_of(name, (EXACT | GOSSIP)[name])
    ours, theirs = train_twice(switchboard, node_sizes, settings)
    for x, y in zip(ours, theirs, strict=True):
        assert x.equal(y)
    assert not ours[0].equal(ours[0].round())  # it has trained


@pytest.mark.parametrize("node_sizes", NODES)
@pytest.mark.parametrize("name", COMPRESSED)
def test_in_few_bits_the_codec_bounds_the_difference(switchboard, node_sizes, name) -> None:
    """A sum whose last bit differs may change a code, once in each round."""
    settings = settings_of(name, COMPRESSED[name])
    ours, theirs = train_twice(switchboard, node_sizes, settings)
    codec = settings.make_codec()
    reach = max(float(x.max() - x.min()) for x in theirs)
    unit = reach / (255 if "8" in codec.name else 15 if "4" in codec.name else 1)
    for x, y in zip(ours, theirs, strict=True):
        assert float((x - y).abs().max()) <= ROUNDS * unit


@pytest.mark.parametrize("leaver", [1, 2], ids=["of a node", "on a node of its own"])
def test_a_member_that_goes_frees_its_node_and_the_others_at_once(switchboard, leaver) -> None:
    """What fails inside a node cuts its lines to the others, and the other way round."""

    def work(group: ComposedGroup) -> bool:
        group.all_reduce(torch.ones(3)).wait()
        if group.rank == leaver:
            return True
        with pytest.raises(ExchangeError, match=r"all_reduce|broadcast"):
            group.all_reduce(torch.ones(3)).wait()
        for part in (group.node, group._between) if group.rank == 0 else (group._between,):
            with pytest.raises((ExchangeError, OSError)):
                part.all_reduce(torch.ones(3)).wait()
        return True

    fields = {"transport": "tcp", "nccl_nodes": (0,)}
    assert run(switchboard, (2, 1), work, timeout_s=HOUR_S, **fields) == [True] * 3
    assert run(switchboard, (2, 1), every_verb, number=2, **fields) == [True] * 3  # the next generation builds both


def test_a_cut_frees_who_waits_inside_and_between(switchboard, monkeypatch) -> None:
    """Long before the deadline, and without the others' doing anything."""
    monkeypatch.setattr(torch_groups, "gloo_group", LikeNccl)
    waiting, over = threading.Barrier(3), threading.Event()

    def work(group: ComposedGroup) -> bool:
        x = torch.ones(3)
        group.node.all_reduce(x).wait()
        if group.rank == 1:
            waiting.wait(scaled(20))
            return over.wait(scaled(30))
        transfer = group.node.all_reduce(x) if group.rank == 0 else group._begin_exchange({}, {0: x})
        waiting.wait(scaled(20))
        group.cut()
        with pytest.raises(ExchangeError):
            transfer.wait()
        if group.rank == 0:
            over.set()
        return True

    assert run(switchboard, (2, 1), work, timeout_s=HOUR_S, transport="tcp", nccl_nodes=(0,)) == [True] * 3
    KEPT.clear()


def test_the_table_of_what_crosses_which_link_is_that_of_the_code() -> None:
    assert table() in PAGE.read_text(), "make it anew: python -m scripts.link_table"
