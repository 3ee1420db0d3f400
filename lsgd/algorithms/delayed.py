"""The base of methods that exchange models while training continues, and apply the result later."""

from __future__ import annotations

import time
from collections.abc import Callable

from lsgd.algorithms.base import Algorithm, Commit, Flat
from lsgd.collectives.background import Background
from lsgd.collectives.group import Group
from lsgd.errors import ExchangeError
from lsgd.lazy import no_grad, torch
from lsgd.protocol.messages import Round

UNTIL_SETTLED = -1
"""The delay of a transfer that lands only in :meth:`Delayed.settle`."""


class Delayed(Algorithm):
    """A transfer begins in a round and lands later: some steps on, or in :meth:`settle`, whichever comes first."""

    def __init__(self) -> None:
        self._background = Background()
        self._land: Callable[[Flat], Commit] | None = None
        self._steps_left = 0

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Drop the pending transfer."""
        self.drop_pending()

    def drop_pending(self) -> None:
        """Drop the pending transfer."""
        self._background, self._land = Background(), None

    def _begin(
        self, transfer: Callable[[], None], land: Callable[[Flat], Commit], parameters: Flat, delay: int
    ) -> Commit | None:
        """Begin a transfer; what ``land`` returns is committed ``delay`` steps later, with 0 by the caller."""
        if not delay:
            began_at = time.perf_counter()
            transfer()
            self.transfer_s = time.perf_counter() - began_at
            return land(parameters)
        self._land, self._steps_left = land, delay
        self._background.start(transfer, parameters[0].device if parameters else torch.device("cpu"))
        return None

    @property
    def acts_after_step(self) -> bool:
        """Whether a transfer may land after the next step."""
        return self._steps_left == 1 and self._land is not None

    @no_grad
    def after_step(self, parameters: Flat) -> Commit | None:
        """Land the transfer that began ``delay`` steps ago."""
        self._steps_left -= 1
        if self._steps_left or self._land is None:
            return None
        if not self._background.succeeded():
            raise ExchangeError("the transfer of the last round has failed")
        return self.settle(parameters)

    @no_grad
    def settle(self, parameters: Flat) -> Commit | None:
        """Wait for the pending transfer and land it."""
        if self._land is None:
            return None
        self._background.succeeded()  # an interrupt of this wait loses nothing
        land, self._land = self._land, None
        self.transfer_s = self._background.finish()
        commit, self._land = land(parameters), land

        def change(*sums: float) -> None:
            self._land = None  # it may hold tensors as large as the model
            commit.change(*sums)

        return Commit(change, commit.judged)
