"""Gradients exchanged in the backward pass: when buckets leave, what takes no part, and what a failure leaves."""

import copy
import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.bytegrad import ByteGradSettings
from lsgd.algorithms.qsgd import QSGDSettings
from lsgd.client.iteration.gradients import GradientExchange
from lsgd.client.iteration.round import ActiveRound, State
from lsgd.errors import ExchangeError, LsgdError
from lsgd.flat import FlatParameters
from lsgd.protocol.messages import Round
from lsgd.testing.simulation import SimulatedGroup, simulate
from tests import golden

from ..speed import scaled
from .bench import generation

BUCKET_MIB = 0.001  # 262 numbers
MEAN = AllReduceSettings(bucket_mib=BUCKET_MIB)


ALIKE = threading.Lock()


class Model(nn.Module):
    """Three layers, one of them used twice, and parameters that some or all passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        with ALIKE:  # members are threads, and share torch's numbers
            torch.manual_seed(0)
            self.first, self.twice, self.last = nn.Linear(5, 17), nn.Linear(17, 17), nn.Linear(17, 3)
        self.unused, self.sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, shifted: bool) -> Tensor:
        x = self.last(torch.tanh(self.twice(torch.tanh(self.twice(self.first(x))))))
        return x + self.sometimes if shifted else x


class Bench:
    """One member's model, and its exchange."""

    def __init__(self, group: SimulatedGroup, settings=MEAN, model: nn.Module | None = None) -> None:
        self.group = group
        self.model = model or Model()
        self.flat = FlatParameters(self.model)
        self.turn = 0
        self.attend(settings)

    def attend(self, settings) -> None:
        self.algorithm = settings.create(self.flat.buffers)
        self.muted = False
        self.exchange = GradientExchange(self.flat, self.algorithm, self.complete, muted=lambda: self.muted)

    def complete(self) -> None:
        self.exchange.wait(self.active).apply()
        self.active.to(State.COMMITTED)

    def entered(self, group=None) -> ActiveRound:
        """Return the next round, entered by ``group``."""
        self.active = ActiveRound(self.round(), group=group or self.group)
        self.active.to(State.ENTERED)
        return self.active

    def arm(self) -> None:
        """Let the next backward pass exchange its gradients."""
        self.entered().to(State.WAITING)
        self.exchange.arm(self.active)

    def round(self) -> Round:
        self.turn += 1
        made = Round(
            id=self.turn,
            generation=generation(self.group.size),
            scope="global",
            leader=0,
            leaders=(0,),
            exchanges=self.turn - 1,
            new=(),
            source=0,
            final=False,
        )
        if self.turn == 1:
            self.algorithm.reset(self.flat.buffers, self.group, made)
        return made

    def loss(self, *, scale: float = 1.0) -> Tensor:
        """Return this member's own loss."""
        generator = torch.Generator().manual_seed(self.group.rank)
        inputs = torch.randn(4, 5, generator=generator)
        return self.model(inputs, self.group.rank == 0).square().mean() * scale

    def backward(self, *, scale: float = 1.0) -> dict[str, Tensor]:
        """Make a pass whose gradients are exchanged; return those that it leaves."""
        self.model.zero_grad()
        self.arm()
        self.loss(scale=scale).backward()
        return self.gradients()

    def own_gradients(self) -> dict[str, Tensor]:
        """Return what a pass of this member alone computes."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model)
        twin.model.zero_grad()
        twin.loss().backward()
        return twin.gradients()

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


def alone(settings=MEAN, model: nn.Module | None = None) -> Bench:
    """Return the bench of a member that has no others."""
    return simulate([1], lambda group: Bench(group, settings, model))[0]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("size", [2, 3])
def test_each_parameter_gets_the_mean_with_zero_for_who_did_not_use_it(size) -> None:
    def member(group):
        bench = Bench(group)
        return bench.own_gradients(), bench.backward(), bench.backward()

    own, first, second = zip(*simulate([size], member), strict=True)
    for name, mean in first[0].items():
        expected = torch.stack([gradients.get(name, torch.zeros_like(mean)) for gradients in own]).mean(0)
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-7)
    assert first[0]["sometimes"].item() != 0.0
    assert "sometimes" not in own[1] and "unused" not in first[0]
    assert all(same(gradients, first[0]) for gradients in (*first, *second))


def test_a_bucket_leaves_while_the_backward_pass_goes_on() -> None:
    left = threading.Event()
    bench = alone(model=nn.Sequential(nn.Linear(5, 60), nn.Linear(60, 60)))
    reduce = bench.algorithm.reduce

    def noted(*arguments):
        left.set()
        return reduce(*arguments)

    bench.algorithm.reduce = noted
    seen = []
    bench.model[0].weight.register_hook(lambda gradient: seen.append(left.wait(scaled(20.0))))
    bench.arm()
    bench.model(torch.ones(1, 5)).sum().backward()
    assert seen == [True]


def test_buckets_leave_in_one_order_whatever_the_order_of_gradients() -> None:
    class Branches(nn.Module):
        def __init__(self, order) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
            self.order = order

        def forward(self, x: Tensor) -> Tensor:
            for index in self.order:
                x = self.layers[index](x)
            return x

    def member(group):
        bench = Bench(group, model=Branches([(0, 1, 2, 3), (2, 0, 3, 1)][group.rank]))
        indices: list[int] = []
        reduce = bench.algorithm.reduce
        bench.algorithm.reduce = lambda *arguments: (indices.append(arguments[2]), reduce(*arguments))[1]
        bench.arm()
        bench.model(torch.ones(1, 20)).sum().backward()
        return indices

    indices = simulate([2], member)
    assert indices[0] == indices[1] == list(range(len(indices[0])))
    assert len(indices[0]) > 4


@pytest.mark.parametrize("changed", [None, ByteGradSettings(bucket_mib=0.002, hierarchical=False)])
def test_a_failed_exchange_leaves_the_own_gradients_which_are_exchanged_again(changed) -> None:
    """Even where the next round is another phase's, whose buffers are others."""

    def member(group):
        bench = Bench(group)
        own = bench.own_gradients()
        reduce = bench.algorithm.reduce

        def failing(gradient, result, index, *others):
            if index == 2:
                raise ExchangeError("the link broke")
            return reduce(gradient, result, index, *others)

        bench.algorithm.reduce = failing
        with pytest.raises(ExchangeError, match="the link broke"):
            bench.backward()
        assert same(bench.gradients(), own)
        bench.algorithm.reduce = reduce
        if changed is not None:
            bench.exchange.close()
            bench.attend(changed)
            bench.turn = 0
        again = bench.entered(group.node)  # in the broken one, buckets are still under way
        bench.algorithm.reset(bench.flat.buffers, group.node, again.order)
        bench.exchange.again(again).apply()
        return own, bench.gradients()

    (own0, mended0), (own1, mended1) = simulate([2], member)
    assert same(mended0, mended1)
    unit = 0.0 if changed is None else 0.02 * max(float(x.abs().max()) for x in own0.values())
    for name, mean in mended0.items():
        torch.testing.assert_close(mean, (own0[name] + own1.get(name, 0.0)) / 2, rtol=1e-5, atol=1e-7 + unit)


def test_muted_passes_add_up_and_the_last_one_exchanges_the_sum() -> None:
    def member(group):
        bench = Bench(group)
        once = bench.backward()
        bench.model.zero_grad()
        bench.arm()
        bench.muted = True
        bench.loss().backward()
        alone = {name: 2 * gradient for name, gradient in bench.own_gradients().items()}
        bench.loss().backward()
        assert all(torch.equal(gradient, alone[name]) for name, gradient in bench.gradients().items())
        bench.muted = False
        bench.loss().backward()
        return once, bench.gradients()

    (once, three), (_, others) = simulate([2], member)
    assert same(three, others)
    for name, gradient in three.items():
        torch.testing.assert_close(gradient, 3 * once[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [MEAN, QSGDSettings(bucket_mib=BUCKET_MIB), QSGDSettings(block=64)])
def test_one_member_that_overflows_spoils_one_pass_of_all_and_no_more(settings) -> None:
    def member(group):
        bench = Bench(group, settings)
        finite = []
        for turn in range(4):
            bench.backward(scale=math.inf if (turn, group.rank) == (1, 1) else 1.0)
            finite.append(bench.active.finite)
        return finite

    assert simulate([2], member) == [[True, False, True, True]] * 2


def test_a_second_backward_pass_says_what_to_do() -> None:
    bench = alone()
    bench.backward()
    with pytest.raises(LsgdError, match=golden.pattern("gradients.second_backward")):
        bench.loss().backward()


class Checkpointed(nn.Module):
    """Its middle layer is in two segments whose activations are computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(5, 20), nn.Linear(20, 20), nn.Linear(20, 20)
        self.reentrant = reentrant

    def forward(self, x: Tensor, shifted: bool) -> Tensor:
        x = checkpoint(self.twice, self.first(x), use_reentrant=self.reentrant)
        return self.last(checkpoint(self.twice, x, use_reentrant=self.reentrant))


def test_a_gradient_that_comes_in_two_parts_is_refused_if_the_first_has_left() -> None:
    bench = alone(model=Checkpointed(reentrant=False))
    assert same(bench.backward(), bench.own_gradients())
    bench = alone(model=Checkpointed(reentrant=True))
    with pytest.raises(LsgdError, match=golden.pattern("gradients.second_gradient")):
        bench.backward()
    bench = alone(replace(MEAN, bucket_mib=1.0), model=Checkpointed(reentrant=True))
    assert same(bench.backward(), bench.own_gradients())  # the only bucket waits for the first layer


def test_a_layer_that_is_frozen_after_the_join_stays_as_it_is() -> None:
    bench = alone()
    bench.model.first.requires_grad_(False)
    for _ in range(2):
        assert {*dict(bench.model.named_parameters())} - {*bench.backward()} == {"first.weight", "first.bias", "unused"}


def test_a_layer_that_is_frozen_before_the_first_round_is_exchanged_once_it_is_not() -> None:
    bench = alone()
    bench.model.first.requires_grad_(False)
    bench.attend(MEAN)
    assert not {*bench.backward()} & {"first.weight", "first.bias"}
    bench.model.first.requires_grad_(True)
    assert {*bench.backward()} == {*dict(bench.model.named_parameters())} - {"unused"}


@pytest.mark.parametrize("settings", [MEAN, ByteGradSettings(), ByteGradSettings(hierarchical=False), QSGDSettings()])
def test_what_nobody_has_a_gradient_for_is_left_alone_by_decay_and_momentum(settings) -> None:
    def member(group):
        bench = Bench(group, settings)
        optimizer = torch.optim.AdamW(bench.model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            bench.backward()
            optimizer.step()
        return bench.model.state_dict()

    one, other, third = simulate([2, 1], member)
    assert one["unused"].tolist() == [1.0] * 3 and one["sometimes"].item() != 1.0
    assert same(one, other) and same(one, third)


def test_a_layer_that_is_frozen_on_some_workers_only_moves_alike_on_all() -> None:
    def member(group):
        bench = Bench(group)
        bench.model.first.requires_grad_(group.rank == 0)
        return bench.backward()

    one, other = simulate([2], member)
    assert same(one, other) and one["first.weight"].any()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    bench = alone(model=nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)))
    bench.arm()
    with pytest.raises(LsgdError, match=golden.pattern("gradients.sparse")):
        bench.model(torch.tensor([1, 2])).sum().backward()


def test_nothing_is_exchanged_unless_it_is_ordered_nor_after_the_end() -> None:
    bench = alone()
    bench.algorithm.reduce = lambda *_: pytest.fail("something was exchanged")
    own = bench.own_gradients()
    bench.loss().backward()  # no round yet
    bench.arm()
    bench.exchange.arm(None)
    bench.model.zero_grad()
    bench.loss().backward()
    gradients = bench.gradients()
    assert all(torch.equal(gradient, own[name]) for name, gradient in gradients.items())
    bench.arm()
    bench.exchange.close()
    bench.model.zero_grad()
    bench.loss().backward()
