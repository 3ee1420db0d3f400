"""Several workers that train one task with an algorithm of lsgd, simulated in threads."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks._evaluation import Evaluation, Point
from benchmarks.workloads import Task
from lsgd.algorithms.base import Algorithm
from lsgd.client.iteration.loss import LossWindow
from lsgd.collectives.simulation import SimulatedGroup, simulate
from lsgd.flat import FlatParameters, floating_buffers
from lsgd.protocol.messages import Generation, Round
from lsgd.settings import AlgorithmSettings


class Member:
    """One simulated worker, which does what the client does in an iteration (client/iteration/).

    Args:
        group: all workers, each a node of its own.
        task: what is learned.
        settings: of the algorithm.
        seed: of the rounding.
        start: the first model's state.
    """

    def __init__(
        self, group: SimulatedGroup, task: Task, settings: AlgorithmSettings, seed: int, start: dict[str, Any]
    ) -> None:
        self.group, self.task, self.schedule = group, task, settings.schedule()
        self.model = task.model()
        self.model.load_state_dict(start)
        self.flat = FlatParameters(self.model)
        self.gradients = [torch.zeros_like(x) for x in self.flat.buffers]
        for slot, window in zip(self.flat.slots, self.flat.windows(self.gradients), strict=True):
            slot.parameter.grad = window
        self.optimizer = task.optimizer(self.model)
        self.algorithm: Algorithm = settings.create(self.flat.buffers, f"seed {seed}")
        self.losses = LossWindow(self.schedule.local_period)

    def iterate(self, step: int, x: Tensor, y: Tensor) -> None:
        """Make iteration number ``step``, from 0, after its round if it has one."""
        parameters = self.flat.buffers
        round = self._begin_round(step) if step % self.schedule.period == 0 else None
        self.algorithm.before_forward(parameters, self.group, round)
        for gradient in self.gradients:
            gradient.zero_()
        loss = self.task.loss(self.model, x, y)
        loss.backward()
        self.algorithm.after_backward(parameters, self.gradients, self.group, round)
        self.optimizer.step()
        self.algorithm.after_step(parameters)
        self.losses.add(loss)

    def average(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its mean over all workers.

        Through a group of its own: a delayed transfer may be under way in the other.
        """
        group = self.group.across
        assert group is not None
        group.all_reduce(tensor.div_(group.size)).wait()

    @torch.no_grad()
    def _begin_round(self, step: int) -> Round:
        round = self._elect(step)
        if step == 0:
            self.algorithm.reset(self.flat.buffers, self.group, round)
        else:
            self.algorithm.settle(self.flat.buffers)
        if not self.schedule.lockstep:
            for buffer in floating_buffers(self.model):
                self.average(buffer)
        return round

    def _elect(self, step: int) -> Round:
        """Return the round before ``step``, led by the worker with the lowest loss."""
        mean = self.losses.mean()
        losses = torch.full((self.group.size,), 0.0, dtype=torch.float64)
        losses[self.group.rank] = math.inf if mean is None or not math.isfinite(mean) else mean
        group = self.group.across
        assert group is not None
        group.all_reduce(losses).wait()
        leader = int(losses.argmin())
        workers = range(self.group.size)
        generation = Generation.of(1, [(rank, 0) for rank in workers], "gloo")
        number = step // self.schedule.period
        return Round(number + 1, generation, "global", leader, tuple(workers), number, (), 0, False)


def train(task: Task, settings: AlgorithmSettings, workers: int, steps: int, seed: int) -> Sequence[Point]:
    """Train simulated workers, each on a node of its own and with its share of the data; return the curve."""
    torch.manual_seed(seed)
    start = task.model().state_dict()

    def member(group: SimulatedGroup) -> Sequence[Point]:
        worker = Member(group, task, settings, seed, start)
        evaluation = Evaluation(task, worker.model, worker.average, tests=group.rank == 0)
        for step, (x, y) in zip(range(steps), task.batches(group.rank, workers, seed), strict=False):
            worker.iterate(step, x, y)
            evaluation.after(step + 1)
        return evaluation.curve

    return simulate((1,) * workers, member, timeout_s=600.0)[0]
