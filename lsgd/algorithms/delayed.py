"""The base of methods that exchange models while training continues, and apply the result later."""

from __future__ import annotations

from collections.abc import Callable

from lsgd.algorithms.base import Algorithm, Flat
from lsgd.collectives.background import Background
from lsgd.collectives.group import Group
from lsgd.lazy import no_grad
from lsgd.protocol.messages import Round

UNTIL_SETTLED = -1
"""The delay of a transfer that lands only in :meth:`Delayed.settle`."""


class Delayed(Algorithm):
    """A transfer begins in a round and lands later: some steps on, or in :meth:`settle`, whichever comes first."""

    _group: Group

    def __init__(self) -> None:
        self._background = Background()
        self._land: Callable[[Flat], None] | None = None
        self._steps_left = 0

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Drop the pending transfer."""
        self._background, self._land = Background(), None

    def _begin(
        self, transfer: Callable[[], None], land: Callable[[Flat], None], parameters: Flat, group: Group, delay: int
    ) -> None:
        """Begin a transfer; ``land`` applies it to the parameters ``delay`` steps later, with 0 before this returns."""
        if not delay or not parameters:
            transfer()
            land(parameters)
            return
        self._group, self._land, self._steps_left = group, land, delay
        self._background.start(transfer, parameters[0].device)

    @property
    def acts_after_step(self) -> bool:
        """Whether a transfer may land after the next step."""
        return self._steps_left == 1 and self._land is not None

    @no_grad
    def after_step(self, parameters: Flat) -> None:
        """Land the transfer that began ``delay`` steps ago, if it succeeded in all processes of this member."""
        self._steps_left -= 1
        if not self._steps_left and self._land is not None and self._group.agree(self._background.succeeded()):
            self.settle(parameters)

    @no_grad
    def settle(self, parameters: Flat) -> None:
        """Wait for the pending transfer and land it."""
        land, self._land = self._land, None  # it may hold tensors as large as the model
        if land is not None:
            self._background.finish()
            land(parameters)
