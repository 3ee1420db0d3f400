"""Passes over data end with the run."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from lsgd.errors import LsgdError

T = TypeVar("T")

MAX_EMPTY = 1000
"""How many passes over a worker's data a script may begin after the run's end: one for each epoch that is left."""


def never() -> bool:
    """Return False: data that belongs to no run does not end with one."""
    return False


class EndingLoader(DataLoader[Any]):
    """A DataLoader whose passes can end with the run: that under way at once, and later ones are empty.

    Attributes:
        over: whether the run has ended.
    """

    over: Callable[[], bool] = staticmethod(never)
    _empty = 0  # passes after the end

    def _until_over(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches until the run is over; raise a LsgdError if a loop would begin passes after that forever."""
        self._empty += self.over()
        if self._empty > MAX_EMPTY:
            raise LsgdError(
                f"the run has ended, and this loop has begun {MAX_EMPTY} passes over its data since, which are empty: "
                f"end it by `if worker.stopped: break`"
            )
        while not self.over():
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
