"""The learning curve of several workers that train one task: what benchmarks/convergence measures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.workloads import Score, Task
from lsgd.flat import floating_buffers

Point = tuple[int, float, float]
"""Steps of a worker, loss and accuracy of the average of all models on the test data."""


class Evaluation:
    """Tests the average of all workers' models, batch-norm statistics included, now and then.

    Args:
        task: what is learned.
        model: this worker's, which stays as it is.
        average: replaces a tensor by its mean over all workers; called by all.
        tests: this worker is the one that tests.
        or_own: test this worker's model too, and keep the better of the two: for workers that never exchange.
    """

    def __init__(
        self, task: Task, model: nn.Module, average: Callable[[Tensor], None], *, tests: bool, or_own: bool = False
    ) -> None:
        self.curve: list[Point] = []
        self._task, self._model, self._average, self._tests = task, model, average, tests
        self._or_own = or_own
        self._mean = task.model()

    def after(self, step: int) -> None:
        """Test if it is time to."""
        if step % self._task.evaluate_every == 0 and (score := self._score(self._task.test)):
            self.curve.append((step, score.loss, score.accuracy))

    def end(self) -> Score | None:
        """Measure the average of the trained models; return its score where this worker is the one that tests."""
        return self._score(self._task.measure)

    @torch.no_grad()
    def _score(self, test: Callable[[nn.Module], Score]) -> Score | None:
        own = [*self._model.parameters(), *floating_buffers(self._model)]
        flat = torch.cat([x.detach().reshape(-1) for x in own])
        self._average(flat)
        if not self._tests:
            return None
        means = [*self._mean.parameters(), *floating_buffers(self._mean)]
        for mean, part in zip(means, flat.split([x.numel() for x in own]), strict=True):
            mean.copy_(part.view(mean.shape))
        score = test(self._mean)
        return min(score, test(self._model), key=lambda found: found.loss) if self._or_own else score
