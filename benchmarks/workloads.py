"""What the benchmarks train: tasks that are learned, and a wide model that is only sent.

- :class:`Digits` (W1): handwritten digits, a small convolutional network with batch-norm.
- :class:`Bytes` (W2): the next byte of the standard library's own sources, a transformer of 0.25 million parameters.
- :class:`Text`, :class:`TextFull`, :class:`Gpt`, :class:`VisionDigits`, :class:`SkewedDigits`: tasks in which
  exchanging is worth something, since one worker sees too few samples; their learning rate warms up and decays.
- :class:`TimedMLP` (W3): 25 million parameters, whose layers take a set time beside what they compute.
- :class:`WideDigits` (W4): the digits of W1 for an MLP of 5 million parameters: real compute, and many bytes.
"""

import argparse
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.transformers import Transformer, VisionTransformer
from lsgd.learning_rate import factor

DECAY = 0.2
"""Share of the run, its end, in which the learning rate of tasks with a warm-up falls to 0."""

SHARDS = ("dealt", "fixed", "skewed")
"""Whose images a worker has: dealt anew in each epoch, as ``Worker.loader`` does; dealt once; dealt once by label."""

OPTIMIZERS = ("task", "muon")
"""The task's own optimizer, or ``lsgd.client.muon`` with the same learning rate in its place."""

PROBE_IMAGES, PROBE_WINDOWS, TEST_WINDOWS = 128, 16, 64

PARTS = 64
"""Equal parts, in their order, of what a trained model is measured on: how much they differ is the error of a loss."""


def add_learner_options(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the options that say how all methods learn."""
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="task", help="the task's, or lsgd.client.muon in its place"
    )
    parser.add_argument(
        "--learning-rate-times", type=float, default=1.0, metavar="X", help="of the task's learning rate"
    )


# -- tasks that are learned ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """How good a model is on what it was not trained on; ``parts``: its loss on each of :data:`PARTS`, if measured."""

    loss: float
    accuracy: float
    parts: Sequence[float] = ()


class Task:
    """A task with its model, optimizer and data; the same for every method that is compared.

    Attributes:
        name: what the command line calls it.
        steps: of each worker, in a full run.
        evaluate_every: steps between two evaluations.
        target_loss: on the test data; workers of DistributedDataParallel reach it before their last step.
        batch_size: of each worker.
        learning_rate: chosen with DistributedDataParallel.
        shards: of :data:`SHARDS`.
        chosen_optimizer: of :data:`OPTIMIZERS`.
        warmup: share of the run in which the learning rate rises; None: it is constant, and does not decay either.
    """

    name: ClassVar[str]
    steps: ClassVar[int]
    evaluate_every: ClassVar[int]
    target_loss: ClassVar[float]
    batch_size: ClassVar[int]
    learning_rate: float
    shards: str = "dealt"
    chosen_optimizer: str = "task"
    warmup: ClassVar[float | None] = None

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, progress: float) -> None:
        """Set the learning rate of a step that is made when this share of the run is."""
        times = 1.0 if self.warmup is None else factor("wsd", progress, self.warmup, DECAY)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * times

    def model(self) -> nn.Module:
        """Return a new model, from torch's random numbers."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the task's own optimizer, of one worker."""
        raise NotImplementedError

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the chosen optimizer of one worker."""
        if self.chosen_optimizer == "task":
            return self.optimizer(model)
        from lsgd.client import muon  # the baselines' environments may have an older torch

        return muon(model, lr=self.learning_rate)

    def batches(self, rank: int, workers: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of one worker's share of the training data, without end."""
        raise NotImplementedError

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        output = model(x)
        return functional.cross_entropy(output.flatten(0, -2), y.flatten())

    def reached(self, score: Score) -> bool:
        """Return whether a model with this score is as good as the target."""
        return score.loss <= self.target_loss

    def probe_data(self) -> tuple[Tensor, Tensor]:
        """Return the batch of training data that all workers have in common, for elections by it."""
        raise NotImplementedError

    def test_data(self) -> tuple[Tensor, Tensor]:
        """Return what models are tested on while they are trained."""
        raise NotImplementedError

    def all_test_data(self) -> tuple[Tensor, Tensor]:
        """Return what a trained model is measured on."""
        return self.test_data()

    def test(self, model: nn.Module) -> Score:
        """Return the score of a model; it is in training mode afterwards."""
        return _scored(model, *self.test_data())

    def measure(self, model: nn.Module) -> Score:
        """Return the score of a trained model, and its loss on each part of the data."""
        data = [part.tensor_split(PARTS) for part in self.all_test_data()]
        scores = [_scored(model, x, y) for x, y in zip(*data, strict=True)]
        lengths = torch.tensor([len(x) for x in data[0]], dtype=torch.float64)
        loss, accuracy = (
            float(lengths @ torch.tensor(each, dtype=torch.float64) / lengths.sum())
            for each in zip(*((score.loss, score.accuracy) for score in scores), strict=True)
        )
        return Score(loss, accuracy, [score.loss for score in scores])


@torch.no_grad()
def _scored(model: nn.Module, x: Tensor, y: Tensor) -> Score:
    model.eval()
    output = model(x).flatten(0, -2)
    model.train()
    loss = float(functional.cross_entropy(output, y.flatten()))
    return Score(loss, float((output.argmax(1) == y.flatten()).float().mean()))


class Digits(Task):
    """scikit-learn's handwritten digits: 1,437 images of 8x8 pixels to train on, 360 to test on."""

    name = "digits"
    steps = 512
    evaluate_every = 8
    target_loss = 0.1
    batch_size = 16
    learning_rate = 0.02

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.train_data = (images[order[:1437]], labels[order[:1437]])
        self._test = (images[order[1437:]], labels[order[1437:]])

    def model(self) -> nn.Module:
        """Return three convolutions with batch-norm."""
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if after == 16 else []
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def batches(self, rank: int, workers: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield full batches of the worker's images, in another order in each epoch."""
        x, y = self.train_data
        generator = torch.Generator().manual_seed(seed * workers + rank)
        split = torch.Generator().manual_seed(seed)
        shard = torch.randperm(len(y), generator=split)[rank::workers]
        if self.shards == "skewed":
            shard = y.argsort(stable=True).tensor_split(workers)[rank]
        while True:
            if self.shards == "dealt":  # all workers draw the same permutation, and so are at the same epoch
                order = torch.randperm(len(y), generator=split)[rank::workers]
            else:
                order = shard[torch.randperm(len(shard), generator=generator)]
            for batch in order.split(self.batch_size):
                if len(batch) == self.batch_size:
                    yield x[batch], y[batch]

    def probe_data(self) -> tuple[Tensor, Tensor]:
        """Return 128 images, in the order of a lot."""
        x, y = self.train_data
        return x[:PROBE_IMAGES], y[:PROBE_IMAGES]

    def test_data(self) -> tuple[Tensor, Tensor]:
        """Return the 360 images."""
        return self._test


class SkewedDigits(Digits):
    """The digits, of which each worker has some labels only."""

    name = "skewed"
    shards = "skewed"
    warmup = 1 / 16


class VisionDigits(Digits):
    """The digits for a small vision transformer, each image moved by a pixel at random, and with noise."""

    name = "vit"
    steps = 2048
    evaluate_every = 64
    target_loss = 0.3
    learning_rate = 2e-3
    warmup = 1 / 32
    noise = 0.2

    def model(self) -> nn.Module:
        """Return the transformer, of 26,000 parameters."""
        return VisionTransformer(width=32, layers=2, heads=4, side=8, patch=2, classes=10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.05)

    def batches(self, rank: int, workers: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what the digits yield, moved and with noise."""
        generator = torch.Generator().manual_seed(seed * workers + rank)
        pixels = torch.arange(8)
        for x, y in super().batches(rank, workers, seed):
            rows, columns = torch.randint(3, (2, len(y), 1), generator=generator) + pixels
            each = torch.arange(len(y))[:, None, None]
            moved = functional.pad(x, (1, 1, 1, 1))[each, 0, rows[:, :, None], columns[:, None]].unsqueeze(1)
            yield moved + self.noise * torch.randn(x.shape, generator=generator), y


class WideDigits(Digits):
    """The digits for an MLP with two hidden layers of ``width``; all of its compute is real."""

    name = "wide-digits"
    steps = 200
    evaluate_every = 8
    batch_size = 64
    learning_rate = 0.1
    target_accuracy = 0.97

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def reached(self, score: Score) -> bool:
        """Return whether the accuracy is that of the target."""
        return score.accuracy >= self.target_accuracy

    def model(self) -> nn.Module:
        """Return the MLP."""
        hidden = (nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU())
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(self.width, 10))


class Bytes(Task):
    """The Python standard library's sources as bytes: one file in ten is for the test.

    Attributes:
        all_windows: how many a trained model is measured on; two models' losses on 4,096 differ with an error of less
            than 0.2 % of them.
    """

    name = "bytes"
    steps = 1024
    evaluate_every = 32
    target_loss = 2.0
    batch_size = 8
    learning_rate = 2e-3
    context = 64
    all_windows = 4096

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"))
        texts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, file in enumerate(files):
            texts[index % 10 == 0].append(file.read_bytes())
        self._train, self._test = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in texts)

    def model(self) -> nn.Module:
        """Return the transformer."""
        return Transformer(width=96, layers=2, heads=4, context=self.context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.01)

    def batches(self, rank: int, workers: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random windows of the text or, where shards are not dealt anew, of the worker's part of it."""
        share, text = len(self._train) // workers, self._train
        if self.shards != "dealt":
            text = text[rank * share : (rank + 1) * share]
        generator = torch.Generator().manual_seed(seed * workers + rank)
        while True:
            starts = torch.randint(len(text) - self.context - 1, (self.batch_size,), generator=generator)
            yield windows(text, starts, self.context)

    def probe_data(self) -> tuple[Tensor, Tensor]:
        """Return 16 windows, spread evenly over the training files."""
        return evenly(self._train, PROBE_WINDOWS, self.context)

    def test_data(self) -> tuple[Tensor, Tensor]:
        """Return 64 windows, spread evenly over the test files."""
        return evenly(self._test, TEST_WINDOWS, self.context)

    def all_test_data(self) -> tuple[Tensor, Tensor]:
        """Return :attr:`all_windows`, spread evenly over the test files."""
        return evenly(self._test, self.all_windows, self.context)


def evenly(text: Tensor, count: int, context: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` windows, spread evenly over the text."""
    return windows(text, torch.linspace(0, len(text) - context - 2, count).long(), context)


class Text(Bytes):
    """:class:`Bytes` in longer windows, for a transformer of 0.12 million parameters."""

    name = "text"
    target_loss = 1.95
    warmup = 1 / 16
    context = 128
    width, layers = 64, 2

    def model(self) -> nn.Module:
        """Return the transformer."""
        return Transformer(self.width, self.layers, heads=4, context=self.context)


class TextFull(Text):
    """:class:`Text` with a transformer of a million parameters, for four times the steps, with 32 windows in each."""

    name = "text-full"
    steps = 4096
    evaluate_every = 32
    target_loss = 1.5
    batch_size = 32
    warmup = 1 / 64
    width, layers = 160, 3


class Gpt(Text):
    """:class:`Text` for a transformer of 49 million parameters and few steps: a step of seconds, a model of 198 MB."""

    name = "gpt"
    steps = 96
    evaluate_every = 8
    target_loss = 2.6
    batch_size = 4
    learning_rate = 6e-4
    all_windows = 1024  # more would take longer than the training
    width, layers = 640, 10


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return bytes and the bytes that follow them, each int64 of shape (windows, context)."""
    places = starts[:, None] + torch.arange(context + 1)
    found = text[places].long()
    return found[:, :-1], found[:, 1:]


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Text, VisionDigits, SkewedDigits, TextFull, Gpt, Digits, Bytes)
}
"""What is learned, by name."""

# -- a wide model that is only sent --------------------------------------------------------------------------------

LAYERS = 16
WIDTH = 1250
"""Of :class:`TimedMLP` as W3: 25.0 million parameters."""

BACKWARD_SHARE = 2 / 3
"""Of a layer's time; the backward pass of a matrix product is two of them."""


class _Sleep(torch.autograd.Function):
    """Does nothing to a tensor, and takes its time for it in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class TimedMLP(nn.Module):
    """``LAYERS`` square layers without bias, ``width² LAYERS`` parameters; :attr:`sleep_s` is shared out among them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self.sleep_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last layer gives, shape (batch, width)."""
        for layer in self.layers:
            share_s = self.sleep_s / LAYERS
            x = _Sleep.apply(layer(x).relu(), share_s * (1 - BACKWARD_SHARE), share_s * BACKWARD_SHARE)
        return x


def timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Make one iteration of a :class:`TimedMLP`, or of what wraps it."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
