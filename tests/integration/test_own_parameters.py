"""Scripts that do with their parameters what plain torch lets them do: two workers train as if they did not."""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import lsgd
from lsgd.client import Worker
from lsgd.client.control.identity import Identity
from lsgd.errors import ConfigError, LsgdError
from tests import golden

from .running import Cluster
from .test_wrap import in_threads

ITERATIONS = 16
ALGORITHMS = [  # in which each worker makes as many iterations, so that all runs are alike
    pytest.param(("--algorithm", "local", "--period", "1"), id="local"),
    pytest.param(("--algorithm", "leader", "--period", "1", "--local-period", "1", "--election", "loss"), id="leader"),
    pytest.param(("--algorithm", "allreduce"), id="allreduce"),
    pytest.param(("--algorithm", "decentralized"), id="decentralized"),
]


class Model(nn.Module):
    """Two layers, and one that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.fixed(self.first(x))))


class Script:
    """A worker's script. A kind of it does something with its parameters in each step."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def backward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    def between(self) -> None:
        """Do something between two steps."""

    def step(self, worker: Worker, x: Tensor) -> None:
        worker.report(self.backward(x))
        self.optimizer.step()


class Flattened(Script):
    """As cuDNN does with the weights of an LSTM whose ``forward`` calls ``flatten_parameters()``."""

    def step(self, worker: Worker, x: Tensor) -> None:
        memory = torch.cat([p.detach().reshape(-1) for p in self.parameters()])
        for p, part in zip(self.parameters(), memory.split([p.numel() for p in self.parameters()]), strict=True):
            p.data = part.view(p.shape)
        super().step(worker, x)


class Assigned(Script):
    """Loads a state with ``assign=True``, and gives the optimizer the new parameters."""

    def between(self) -> None:
        self.model.load_state_dict({k: v.clone() for k, v in self.model.state_dict().items()}, assign=True)
        for p in self.model.fixed.parameters():
            p.requires_grad_(False)
        self.optimizer.param_groups[0]["params"] = self.parameters()


class Moved(Script):
    """Moves the model into other memory, as ``model.to(device)`` does."""

    def step(self, worker: Worker, x: Tensor) -> None:
        self.model._apply(torch.clone)
        super().step(worker, x)


class Thawed(Script):
    """Freezes a layer after the join until a later step."""

    def step(self, worker: Worker, x: Tensor) -> None:
        self.model.last.requires_grad_(worker.iterations >= 4)
        super().step(worker, x)


class ThawedByHand(Script):
    """The same, without ``requires_grad``."""

    def step(self, worker: Worker, x: Tensor) -> None:
        for p in self.model.last.parameters():
            p.requires_grad_()
        worker.report(self.backward(x))
        if worker.iterations < 4:
            for p in self.model.last.parameters():
                p.grad = torch.zeros_like(p)
        self.optimizer.step()


class Sharpness(Script):
    """SAM in one step: the gradient at the steepest point around the weights."""

    def step(self, worker: Worker, x: Tensor) -> None:
        with worker.no_sync():
            worker.report(self.backward(x))
        old = {p: p.data.clone() for p in self.parameters()}
        for p in self.parameters():
            p.data.add_(p.grad, alpha=0.05)
        self.backward(x)
        for p in self.parameters():
            self.restore(p, old[p])
        self.optimizer.step()

    def restore(self, parameter: nn.Parameter, old: Tensor) -> None:
        parameter.data.copy_(old)


class SharpnessAsPublished(Sharpness):
    """The same, and the old weights are other memory."""

    def restore(self, parameter: nn.Parameter, old: Tensor) -> None:
        parameter.data = old


def trained(cluster: Cluster, kind: type[Script]) -> list[Tensor]:
    """Return the final weights of two workers that have trained with different data, and ended with the same model."""
    scripts = [kind(), kind()]

    def train(index: int) -> int:
        identity, script = Identity(index, secrets.randbits(63), cluster.local_address(0), None), scripts[index]
        data = torch.Generator().manual_seed(index)
        with Worker.join(script.model, script.optimizer, identity=identity) as worker:
            while worker.begin_step():
                script.step(worker, torch.randn(4, 6, generator=data))
                worker.end_step()
                script.between()
        return worker.iterations

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, (0, 1))) == [ITERATIONS // 2] * 2
    one, two = ([p.detach() for p in script.parameters()] for script in scripts)
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    return one


@pytest.fixture
def run(cluster: Cluster) -> Iterator[Callable[..., list[Tensor]]]:
    clusters = iter([cluster])

    def made(kind: type[Script], arguments: tuple[str, ...], folder: str) -> list[Tensor]:
        own = next(clusters, None) or Cluster(cluster.folder / folder)
        try:
            own.folder.mkdir(exist_ok=True)
            own.start("--workers", "2", *arguments, "--iterations", str(ITERATIONS))
            return trained(own, kind)
        finally:
            if own is not cluster:
                own.close()

    yield made


@pytest.mark.parametrize("arguments", ALGORITHMS)
@pytest.mark.parametrize(
    ("kinds", "plain"),
    [
        ((Flattened, Assigned, Moved), Script),
        ((SharpnessAsPublished,), Sharpness),
        ((Thawed,), ThawedByHand),
    ],
)
def test_what_a_script_does_with_its_parameters_changes_no_bit(run, arguments, kinds, plain) -> None:
    expected = run(plain, arguments, plain.__name__)
    for kind in kinds:
        found = run(kind, arguments, kind.__name__)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), kind


class Averaged(nn.Module):
    """Gains one or more in each weight and step, and is evaluated with other weights."""

    def __init__(self, gain: int) -> None:
        super().__init__()
        self.gain = gain
        self.w = nn.Parameter(torch.zeros(64))
        self.optimizer = torch.optim.SGD([self.w], lr=1.0)
        self.least = 0.0

    def forward(self) -> Tensor:
        return -self.gain * self.w.sum()

    def learn(self) -> None:
        self.least = min(self.least, float(self.w.detach().min()))
        self.optimizer.zero_grad()
        self().backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, worker: Worker) -> None:
        trained = self.w.clone()
        self.w.fill_(-100.0)
        worker.mean({"loss": 1.0})
        assert self.w.tolist() == [-100.0] * 64
        self.w.copy_(trained)
        worker.mean({"loss": 2.0})


EARLY, LATE, STEPS = 8, 40, 48


def in_batches(model: Averaged, identity: Identity, evaluates_at: int) -> None:
    with Worker.join(model, model.optimizer, identity=identity) as worker:
        worker.steps = STEPS
        for step in worker.batches(range(STEPS)):
            model.learn()
            if step + 1 == evaluates_at:
                model.evaluate(worker)
        assert worker.finish()


def in_hooks(model: Averaged, identity: Identity, evaluates_at: int) -> None:
    worker = lsgd.wrap(model, model.optimizer, identity=identity, steps=STEPS)
    for step in range(STEPS):
        model.learn()
        if step + 1 == evaluates_at:
            model.evaluate(worker)
    assert worker.finish()


@pytest.mark.parametrize("loop", [in_batches, in_hooks])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--algorithm", "local", "--period", "4", "--compression", "none", "--rescale", "false"),
        ("--algorithm", "leader", "--period", "4", "--local-period", "4"),
    ],
    ids=["local", "leader"],
)
def test_weights_that_were_not_trained_are_not_exchanged(cluster, caplog, arguments, loop) -> None:
    caplog.set_level("INFO", "lsgd")
    cluster.start("--workers", "2", *arguments)

    def train(index: int, identity: Identity) -> Averaged:
        model = Averaged(1 + index)
        loop(model, identity, EARLY if index else LATE)
        return model

    one, two = in_threads(cluster, train)
    assert torch.equal(one.w, two.w) and float(one.w.detach().min()) > STEPS / 2
    assert min(one.least, two.least) == 0.0
    assert any(golden.text("exchange.other_weights") in message for message in caplog.messages)


class Int8(Tensor):
    """Weights in 8 bits with one scale, as torchao has them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Int8":
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Int8(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, w, bias = args
            return func(x, w.codes * w.scale, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Int8(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(f"{func} of weights in 8 bits")


class Quantized(Script):
    """Trains beside a layer whose weights are a tensor of another class."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-127, 128, (8, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
        weight = Int8(codes, torch.tensor(0.01))
        self.model.fixed.weight = nn.Parameter(weight, requires_grad=False)


class Dequantized(Quantized):
    """The same weights in a tensor of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        own = self.model.fixed.weight
        self.model.fixed.weight = nn.Parameter(own.codes * own.scale, requires_grad=False)


def test_weights_of_another_class_that_do_not_train_are_left_alone(run) -> None:
    arguments = ("--algorithm", "local", "--period", "1")
    expected, found = (run(kind, arguments, kind.__name__) for kind in (Dequantized, Quantized))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_training_weights_of_another_class_is_refused(here) -> None:
    script = Quantized()
    script.model.fixed.weight.requires_grad_()
    with pytest.raises(ConfigError, match=golden.pattern("exchange.int8")):
        Worker.join(script.model, script.optimizer)


def test_a_layer_that_was_frozen_at_the_join_cannot_train(here) -> None:
    script = Script()
    with (
        Worker.join(script.model, script.optimizer) as worker,
        pytest.raises(LsgdError, match=golden.pattern("exchange.trains_later")),
    ):
        script.model.fixed.requires_grad_()
        worker.begin_step()


def test_a_hook_on_the_optimizer_clips_before_the_round_that_comes_in_its_step(cluster) -> None:
    """A worker that clips to 1 and one that clips to 3 meet at 2, after each step."""
    settings = ("--period", "1", "--compression", "none", "--rescale", "false")
    cluster.start("--workers", "2", "--algorithm", "local", *settings)

    def train(index: int, identity: Identity) -> list[float]:
        model, found = Averaged(9 + index), list[float]()
        model.optimizer.register_step_post_hook(lambda *_: model.w.data.clamp_(max=1.0 + 2 * index))
        worker = lsgd.wrap(model, model.optimizer, identity=identity, steps=4)
        for _ in range(4):
            model.learn()
            found.append(float(model.w.detach().max()))
        assert worker.finish()
        return found[:-1]  # after the last step the round comes in finish

    assert in_threads(cluster, train) == [[pytest.approx(2.0)] * 3] * 2
