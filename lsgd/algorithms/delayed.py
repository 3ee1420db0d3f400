"""The base of methods that exchange models beside the training, and take the result over later."""

from __future__ import annotations

from collections.abc import Callable

from lsgd.algorithms.base import Algorithm, Flat
from lsgd.collectives.background import Background
from lsgd.collectives.group import Group
from lsgd.lazy import no_grad
from lsgd.protocol.messages import Round


class Delayed(Algorithm):
    """A transfer begins in a round, and lands when it is settled: at once, some steps later, or at the next round."""

    def __init__(self) -> None:
        self._background = Background()
        self._group: Group | None = None
        self._steps_left = 0

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Forget what was under way."""
        self._background, self._group = Background(), group

    def _begin(self, transfer: Callable[[], None], parameters: Flat, delay: int) -> None:
        """Begin a transfer; without a delay, it lands here."""
        self._steps_left = delay
        if delay and parameters:
            self._background.start(transfer, parameters[0].device)
        else:
            transfer()
            self._land(parameters)

    def _land(self, parameters: Flat) -> None:
        """Take over what has arrived."""
        raise NotImplementedError

    @property
    def acts_after_step(self) -> bool:
        """Whether the next step is the one after which something may be taken over."""
        return self._steps_left == 1 and self._background.busy

    @no_grad
    def after_step(self, parameters: Flat) -> None:
        """Take over what was sent ``delay`` steps ago, if it has arrived in all processes of this member."""
        self._steps_left -= 1
        if self._steps_left or not self._background.busy:
            return
        assert self._group is not None
        if self._group.agree(self._background.succeeded()):
            self.settle(parameters)

    @no_grad
    def settle(self, parameters: Flat) -> None:
        """Take over what is still under way."""
        if self._background.busy:
            self._background.finish()
            self._land(parameters)
