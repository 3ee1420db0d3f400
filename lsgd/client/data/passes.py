"""One pass after another over a worker's part of data, counted by what was trained on."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, ClassVar, Generic, TypeVar

from torch.utils.data import Sampler

from lsgd.client.data.ending import never
from lsgd.errors import ConfigError

T = TypeVar("T")

Place = Callable[[], tuple[int, int]]
"""Returns the current (rank, world size); in islands, of this process among all processes."""


def tell_nobody(epoch: int, order: str) -> None:
    """Do nothing: there are no servers."""


class Passes(Sampler[Any]):
    """A worker's part of each pass over the data: samples, or whole batches of them.

    A pass is dealt by the members at its beginning. Workers in different passes, because of their speeds or a late
    join, may draw the same sample. The processes of an island get equally much, so that they run the same steps.

    Args:
        length: length of the dataset.
        place: see :data:`Place`.
        seed: of the passes, the same on all workers.
        processes: number of processes of this worker's island.

    Attributes:
        unit: what is counted: a sample or a batch.
    """

    unit: ClassVar[str] = "sample"

    over: Callable[[], bool] = staticmethod(never)
    """Whether the run has ended, and so all passes, also those of a loader that another library has made anew."""

    tell: Callable[[int, str], object] = staticmethod(tell_nobody)
    """Tells the servers a pass and a digest of its order, if a sampler of the script's draws it."""

    def __init__(self, length: int, place: Place, seed: int, processes: int = 1) -> None:
        self.length = length
        self.place = place
        self.seed = seed
        self._processes = processes
        self.epoch = 0
        self.consumed = 0  # units of this epoch trained on
        self.dealt_for = place()  # rank and world size of this epoch's part
        self._skip = 0
        self._through = -1  # the last epoch of which everything was drawn

    @property
    def name(self) -> str:
        """What draws, in a word."""
        raise NotImplementedError

    def draw(self) -> list[Any]:
        """Return this worker's part of the current epoch."""
        raise NotImplementedError

    def none(self) -> str:
        """Return why this worker has no part of a pass."""
        raise NotImplementedError

    def order(self) -> str:
        """Return a digest of the order of the current epoch, for all workers; empty: it follows from the seed."""
        return ""

    def deal(self) -> list[Any]:
        """Return this worker's part of the current epoch, and tell the servers its order."""
        units = self.draw()
        if self.epoch and (order := self.order()):  # that of the first pass is among the facts
            self.tell(self.epoch, order)
        return units

    def __iter__(self) -> Iterator[Any]:
        self.epoch = self.next_epoch
        skip, self._skip = self._skip, 0
        self.consumed = skip
        self.dealt_for = self.place()
        return self._rest(self.deal()[skip:], self.epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass: one left early is over, and so is one that nobody counts."""
        return self.epoch + (self.consumed > self._skip or self._through == self.epoch)

    def follow(self, earlier: Iterable["Passes"]) -> None:
        """Begin after the epochs of earlier ones of the same data: a script may make a loader for each epoch."""
        mine = (type(self), self.length, self.seed)
        same = (each for each in earlier if (type(each), each.length, each.seed) == mine)
        self.epoch = max((each.next_epoch for each in same), default=0)

    def _rest(self, units: list[Any], epoch: int) -> Iterator[Any]:
        for unit in units:
            if self.over():
                return
            yield unit
        self._through = epoch

    @property
    def left(self) -> int:
        """Units of the next pass: after a resume, of the rest of one."""
        return max(0, len(self) - self._skip)

    def __len__(self) -> int:
        """Units of a whole pass."""
        raise NotImplementedError

    def share(self, total: int) -> slice:
        """Return this worker's part of ``total`` things in a row: in an island as many as its last process has."""
        rank, size = self.place()
        workers = size // self._processes
        last = rank % workers + workers * (self._processes - 1)
        return slice(rank, rank + size * len(range(last, total, size)), size)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and its consumed (not prefetched) units."""
        return {"epoch": self.epoch, "consumed": self.consumed, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state_dict`: the next pass is the rest of that epoch."""
        self.epoch, self.seed, self._through = state["epoch"], state["seed"], -1
        self.consumed = self._skip = state["consumed"]


def rows_of(length: int, place: tuple[int, int], epoch: int) -> range:
    """Return a worker's rows of a dataset, which are others in each of ``world size`` epochs.

    Raises:
        ConfigError: there are fewer rows than workers.
    """
    rank, size = place
    if length < size:
        raise ConfigError(f"the dataset has {length} samples for {size} workers; some workers would have none")
    return range((rank + epoch) % size, length, size)


def peek(batches: Iterator[T]) -> tuple[list[T], Iterator[T]]:
    """Return a list with the first batch, if there is one, and an iterator over all batches."""
    first = list(islice(batches, 1))
    return first, chain(first, batches)


class Pass(Generic[T]):
    """One pass over a loader, as an iterable with the loader's length."""

    def __init__(self, loader: object, begin: Callable[[], Iterator[T]]) -> None:
        self._loader, self._begin = loader, begin

    def __iter__(self) -> Iterator[T]:
        return self._begin()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]
