"""Rounds and autograd: no weight changes between a forward pass and the backward pass that uses it, in any loop."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lsgd
from lsgd.client import Worker
from lsgd.client.control.identity import Identity
from lsgd.client.wrap import WrappedWorker, roots
from lsgd.errors import LsgdError
from tests import golden

from .test_wrap import in_threads, join_here

ROUNDS = ("--algorithm", "local", "--period", "2", "--compression", "none")
TURNS = 12
SEEDED = threading.Lock()
"""Held while a model is made from the seed that all threads share."""


class Gan:
    """Two networks, two optimizers, and a count of the steps in which the generator changed under its live graph."""

    def __init__(self) -> None:
        with SEEDED:
            torch.manual_seed(0)
            self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            self.critic = nn.Linear(2, 1)
        self.both = nn.ModuleDict({"g": self.generator, "d": self.critic})
        self.og = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        self.od = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.random = torch.Generator()
        self.changed = 0

    def noise(self, width: int) -> Tensor:
        return torch.randn(16, width, generator=self.random)

    def learn(self, fake: Tensor) -> None:
        """Take a step of the discriminator."""
        self.od.zero_grad()
        (self.critic(fake.detach()).mean() - self.critic(self.noise(2)).mean()).backward()
        self.od.step()

    def turn(self, critics: int = 1) -> None:
        """Make the turn of DCGAN's loop: the fake images come first, and their graph is used last."""
        fake = self.generator(self.noise(4))
        before = [p.clone() for p in self.generator.parameters()]
        for _ in range(critics):
            self.learn(fake)
        self.changed += any(not torch.equal(*pair) for pair in zip(before, self.generator.parameters(), strict=True))
        self.og.zero_grad()
        (-self.critic(fake)).mean().backward()
        self.og.step()

    def turn_generator_first(self, critics: int = 1) -> None:
        """Make the turn of a loop whose last optimizer is the discriminator's."""
        fake = self.generator(self.noise(4))
        self.og.zero_grad()
        (-self.critic(fake)).mean().backward()
        self.og.step()
        for _ in range(critics):
            self.learn(fake)


def wrapped(gan: Gan, identity: Identity | None = None) -> WrappedWorker:
    worker = lsgd.wrap(gan.both, [gan.og, gan.od], steps=TURNS, **({"identity": identity} if identity else {}))
    gan.random.manual_seed(worker.rank)
    return worker


@pytest.mark.parametrize("critics", [1, 5])
@pytest.mark.parametrize("turn", [Gan.turn, Gan.turn_generator_first], ids=["fakes first", "generator first"])
def test_a_gan_whose_container_nobody_calls(cluster, turn, critics) -> None:
    cluster.start("--workers", "2", *ROUNDS)

    def train(index: int, identity: Identity) -> tuple[Any, ...]:
        gan = Gan()
        worker = wrapped(gan, identity)
        for _ in range(TURNS):
            turn(gan, critics)
        assert worker.finish()
        return gan.changed, worker.iterations, worker._steps.rounds.last.committed, gan.both.state_dict()

    (*one, first), (*two, second) = in_threads(cluster, train)
    assert one[0] == two[0] == 0, "weights changed under a live graph"
    # With the generator first, the other steps of its critics belong to the next iteration, and so do the last ones.
    made = TURNS + (critics > 1 and turn is Gan.turn_generator_first)
    assert one[1] == two[1] == made and one[2] > 3
    assert all(torch.equal(first[name], second[name]) for name in first)


class Wgan(Gan):
    """Clips the weights of its critic after each of its steps, as WGAN's paper does; notes with which it trains."""

    limit = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.clipped, self.widest = 0, 0.0
        self.clip()
        self.critic.register_forward_pre_hook(lambda *_: self.note())

    def width(self) -> float:
        return max(float(p.detach().abs().max()) for p in self.critic.parameters())

    def note(self) -> None:
        self.widest = max(self.widest, self.width())

    def clip(self) -> None:
        for p in self.critic.parameters():
            p.data.clamp_(-self.limit, self.limit)

    def learn(self, fake: Tensor) -> None:
        super().learn(fake)
        self.clipped += self.width() > self.limit
        self.clip()


@pytest.mark.parametrize("turn", [Gan.turn, Gan.turn_generator_first], ids=["fakes first", "generator first"])
@pytest.mark.parametrize(
    "algorithm",
    # A mean of clipped weights is clipped; with a mean change made longer, it would not be.
    [(*ROUNDS, "--rescale", "false"), ("--algorithm", "leader", "--period", "2", "--local-period", "2")],
    ids=["local", "leader"],
)
def test_a_wgan_trains_on_the_weights_that_it_clips_after_a_step(cluster, algorithm, turn) -> None:
    """In the second order, a call in between finds other weights than the step has left, and goes on all the same."""
    cluster.start("--workers", "2", *algorithm)

    def train(index: int, identity: Identity) -> tuple[Any, ...]:
        gan = Wgan()
        worker = wrapped(gan, identity)
        for number in range(TURNS):
            turn(gan)
            if number == TURNS // 2:
                assert worker.mean({"turn": number}) == {"turn": number}
        assert worker.finish()
        gan.note()
        return gan.clipped, gan.widest, worker.iterations, gan.both.state_dict()

    (*one, first), (*two, second) = in_threads(cluster, train)
    assert one[0] > 3 < two[0], "nothing was clipped"
    assert one[1] == two[1] == pytest.approx(Wgan.limit)
    assert one[2] == two[2] == TURNS
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_forward_pass_before_the_last_step_whose_backward_pass_follows_the_round_is_refused(
    cluster, monkeypatch
) -> None:
    """No weight that the stale pass needs is saved in its graph, so torch would not notice."""
    join_here(cluster, monkeypatch, "--algorithm", "local", "--period", "1")
    gan = Gan()
    gan.generator = nn.Linear(4, 2)
    gan.both["g"], gan.og = gan.generator, torch.optim.Adam(gan.generator.parameters(), lr=0.01)
    with wrapped(gan) as worker, pytest.raises(LsgdError, match=golden.pattern("exchange.forward_first")):
        fake = gan.generator(gan.noise(4))
        for _ in range(3):
            gan.og.zero_grad()
            (-gan.critic(fake)).mean().backward()
            gan.og.step()
            fake = gan.generator(gan.noise(4))
            gan.learn(fake)
    assert worker.iterations == 1


def test_a_gan_in_batches_whose_rounds_come_between_two(cluster) -> None:
    cluster.start("--workers", "2", *ROUNDS)

    def train(index: int, identity: Identity) -> tuple[int, int]:
        gan = Gan()
        gan.random.manual_seed(index)
        with Worker.join(gan.both, [gan.og, gan.od], identity=identity) as worker:
            worker.steps = TURNS
            for _ in worker.batches([torch.full((1,), index * 1.0 + i) for i in range(TURNS)]):
                gan.turn()
            assert worker.finish()
            return gan.changed, worker.iterations

    assert in_threads(cluster, train) == [(0, TURNS)] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--algorithm", "decentralized"), golden.pattern("exchange.no_gradient_yet")),
        (("--algorithm", "allreduce"), golden.pattern("exchange.second_backward")),
    ],
    ids=["decentralized", "allreduce"],
)
def test_a_gan_is_refused_where_a_round_spans_the_backward_pass(cluster, monkeypatch, arguments, says) -> None:
    join_here(cluster, monkeypatch, *arguments)
    gan = Gan()
    worker = wrapped(gan)
    with pytest.raises(LsgdError, match=says):
        gan.turn()
    worker.fails(RuntimeError())


class Parts(nn.Module):
    """A model with a forward pass of its own, which the loop does not use."""

    def __init__(self, gan: Gan) -> None:
        super().__init__()
        self.g, self.d = gan.generator, gan.critic

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.d(self.g(x))
        return out


def test_a_gan_is_refused_where_nobody_knows_when_its_step_begins(cluster, monkeypatch) -> None:
    join_here(cluster, monkeypatch, *ROUNDS)
    gan = Gan()
    worker = lsgd.wrap(Parts(gan), [gan.og, gan.od], steps=TURNS)
    with pytest.raises(LsgdError, match=golden.pattern("exchange.round_may_come")):
        gan.turn()
    worker.fails(RuntimeError())


def test_what_a_loop_calls() -> None:
    gan = Gan()
    nested = nn.ModuleList([gan.both, nn.ModuleList([nn.Tanh()])])
    assert roots(gan.both) == [gan.generator, gan.critic] and roots(gan.critic) == [gan.critic]
    assert roots(nested) == [gan.generator, gan.critic, nested[1][0]]
    nested.forward = lambda x: x  # type: ignore[method-assign]
    assert roots(nested) == [nested]


def regression() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(16, 6, generator=random)
        yield x, x.sum(1, keepdim=True)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization in two passes, around an optimizer in ``base_optimizer``."""

    def __init__(self, parameters: Iterator[nn.Parameter], rho: float = 0.05) -> None:
        super().__init__(list(parameters), {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05)
        self._climbed: list[tuple[nn.Parameter, Tensor]] = []

    @torch.no_grad()
    def first_step(self) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        self._climbed = [(p, p.clone()) for p in trained]
        for p in trained:
            p.add_(p.grad * self.param_groups[0]["rho"] / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, before in self._climbed:
            p.copy_(before)
        self.base_optimizer.step()
        self.zero_grad()


def sam(model: nn.Module, wrap: Callable[[Any], Any]) -> Iterator[None]:
    optimizer = Sam(model.parameters())
    wrap(optimizer)
    for x, y in regression():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.first_step()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.second_step()
        yield


def double_backward(model: nn.Module, wrap: Callable[[Any], Any]) -> Iterator[None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    wrap(optimizer)
    for x, y in regression():
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (nn.functional.mse_loss(out, y) + slope.square().mean()).backward()
        optimizer.step()
        yield


def closures(model: nn.Module, wrap: Callable[[Any], Any]) -> Iterator[None]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    wrap(optimizer)
    for x, y in regression():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        yield


@pytest.fixture
def double() -> Iterator[None]:
    """Makes tensors of float64: what a round of one worker rounds, a line search makes large in float32."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("loop", [sam, double_backward, closures])
def test_a_step_of_several_passes_is_one_iteration_and_learns_what_it_learns_alone(cluster, monkeypatch, loop) -> None:
    """A run of one worker changes nothing, in any of its rounds, so the weights are those of the loop without lsgd."""
    join_here(cluster, monkeypatch, *ROUNDS)

    def network() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    workers: list[WrappedWorker] = []
    alone, inside = network(), network()
    plain = loop(alone, lambda optimizer: None)
    run = loop(inside, lambda optimizer: workers.append(lsgd.wrap(inside, optimizer, steps=TURNS)))
    for _ in range(TURNS):
        next(plain), next(run)
    (worker,) = workers
    assert worker.finish() and worker.iterations == TURNS and worker._steps.rounds.last.committed > 3
    for one, other in zip(alone.parameters(), inside.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
