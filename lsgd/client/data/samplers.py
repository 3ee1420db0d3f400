"""Deals what a script's own samplers draw.

Which of three ways depends on the sampler:

1. Torch's own draw each row by itself: all workers draw the same order, and each takes every n-th index.
2. Another one that draws the same order for the same random numbers: all workers draw it, and each takes every n-th
   batch. Batches that repeat the rows of the one before stay together.
3. One whose order is another each time, or that comes back to rows later: if it holds the dataset, and can be made
   again over a part of it, each worker's draws within its part, whatever it does there.

What is left is refused.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lsgd.client.data.parts import again_over, part_of
from lsgd.client.data.passes import Passes, Place
from lsgd.client.data.randomness import common
from lsgd.client.data.shards import ShardLoader, ShardSampler, length, shard_loader
from lsgd.errors import ConfigError

T = TypeVar("T")

LOOKED_AT = 64
"""How many batches are drawn twice, to see whether a sampler draws the same for the same random numbers."""

ROW_BY_ROW = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Torch's samplers, which draw each row by itself; what a subclass does is its own business."""

ROWS_BY_HAND = (
    "let it draw from this worker's rows alone: Subset(dataset, worker.rows(len(dataset))), or "
    "before the join range(int(os.environ['LSGD_RANK']), len(dataset), int(os.environ['LSGD_WORKERS'])), without "
    "shard(), and in a Trainer with LsgdCallback(shard=False)"
)
"""The lines that divide data where lsgd cannot."""

BY_HAND = f"give it a __len__; or {ROWS_BY_HAND}"

KEPT_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)
"""What a sharded DataLoader takes over from the one that it replaces, beside its batches."""


class _Epochs(Passes):
    """Passes of a sampler that the script may give epochs of its own."""

    def set_epoch(self, epoch: int) -> None:
        """Go on to a later pass; those that are behind the worker's own count, after a restart, do not count."""
        if epoch > self.epoch:
            self.epoch, self.consumed, self._skip, self._through = epoch, 0, 0, -1


class EveryNth(_Epochs):
    """Every n-th index of what a sampler draws, which draws alike on all workers."""

    def __init__(self, sampler: Any, length: int, place: Place, seed: int, processes: int = 1) -> None:
        super().__init__(length, place, seed, processes)
        self._sampler = sampler
        self._order: tuple[int, str] | None = None  # an epoch, and the digest of its order

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self._sampler).__name__

    def _drawn(self) -> list[int]:
        drawn = drawn_by(self._sampler, self.seed, self.epoch)
        self._order = (self.epoch, digest_of(drawn))
        return drawn

    def order(self) -> str:
        """Return a digest of the order of the current epoch."""
        if self._order is None or self._order[0] != self.epoch:
            self._drawn()
        assert self._order is not None
        return self._order[1]

    def draw(self) -> list[int]:
        """Return this worker's part of the current epoch."""
        return self._drawn()[self.share(len(self._sampler))]

    def none(self) -> str:
        """Return why this worker has no part of a pass."""
        return "the training data's sampler draws fewer samples than there are workers, so some have none"

    def __len__(self) -> int:
        """Samples of a whole pass."""
        return len(range(len(self._sampler))[self.share(len(self._sampler))])


class WholeBatches(_Epochs):
    """Every n-th batch of what a batch sampler draws, which draws alike on all workers.

    Batches that repeat the rows of the one before, or begin with its last row, stay with it: one worker gets them all.
    """

    unit = "batch"

    def __init__(self, batches: Any, length: int, place: Place, seed: int, processes: int = 1) -> None:
        super().__init__(length, place, seed, processes)
        self._batches = batches
        self._kept: tuple[int, list[list[Any]]] | None = None  # an epoch and its runs: it is drawn once

    def runs(self) -> list[list[Any]]:
        """Return the current epoch's batches of all workers, in those that stay together."""
        if self._kept is None or self._kept[0] != self.epoch:
            self._kept = (self.epoch, runs_of(drawn_by(self._batches, self.seed, self.epoch)))
        return self._kept[1]

    @property
    def name(self) -> str:
        """The class of what draws batches."""
        return type(self._batches).__name__

    def order(self) -> str:
        """Return a digest of the order of the current epoch."""
        return digest_of([batch for run in self.runs() for batch in run])

    def draw(self) -> list[Any]:
        """Return this worker's part of the current epoch."""
        runs = self.runs()
        return [batch for run in runs[self.share(len(runs))] for batch in run]

    def none(self) -> str:
        """Return why this worker has no part of a pass."""
        name = type(self._batches).__name__
        return f"a {name} draws fewer batches than there are workers, or groups of them, so some have none"

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return len(self.draw())

    def is_alike(self) -> bool:
        """Whether the sampler draws the same again, and rows in one place alone: else one n-th is no part of it."""
        again = drawn_by(self._batches, self.seed, self.epoch, LOOKED_AT)
        return again == [batch for run in self.runs() for batch in run][: len(again)]

    def comes_back(self) -> bool:
        """Whether some rows are drawn in several places, so that several workers would have them."""
        drawn = [set(_flat(run)) for run in self.runs()]
        return len(set().union(*drawn)) < sum(map(len, drawn))


class WithinPart(_Epochs):
    """What a sampler draws from this worker's part of the dataset, which each epoch deals anew.

    Args:
        make: returns the sampler's batches over a dataset of fewer rows.
        others: as of :class:`Passes`.
    """

    unit = "batch"

    def __init__(self, dataset: Any, make: Callable[[Any], Any], place: Place, seed: int, processes: int = 1) -> None:
        super().__init__(len(dataset), place, seed, processes)
        self._dataset, self._make = dataset, make
        self._rows = ShardSampler(len(dataset), place, seed, False, processes)
        self._kept: tuple[tuple[Any, ...], list[int], Any] | None = None

    @property
    def name(self) -> str:
        """What draws within a part of what, in a word."""
        return "within a part"

    def _part(self) -> tuple[list[int], Any]:
        """Return this worker's rows in the current epoch, and the batches over them."""
        now = (self.epoch, *self.place())
        if self._kept is None or self._kept[0] != now:
            self._rows.epoch = self.epoch
            rows = self._rows.draw()
            self._kept = (now, rows, self._make(part_of(self._dataset, rows)))
        return self._kept[1:]

    def draw(self) -> list[Any]:
        """Return this worker's part of the current epoch."""
        rows, batches = self._part()
        return [_rows_in(unit, rows, batches) for unit in drawn_by(batches, self.seed, self.epoch)]

    def none(self) -> str:
        """Return why this worker has no part of a pass."""
        return f"{self._rows.none()}, or too few for one batch of its sampler"

    def __len__(self) -> int:
        """Batches of a whole pass."""
        return len(self._part()[1])


def drawn_by(sampler: Any, seed: int, epoch: int, first: int | None = None) -> list[Any]:
    """Return what a sampler yields in a pass, in an order that depends on nothing but the seed and the epoch.

    A copy draws, so that no pass depends on those before it: a worker that joins late has not made them.

    Args:
        sampler: has a length, and stays as it is.
        seed: the same on all workers.
        epoch: number of the pass.
        first: how many to return; None: all.

    Raises:
        ConfigError: it goes on for much longer than it says.
    """
    most = 2 * len(sampler) + 1000
    drawing = _copied(sampler)
    _set_epoch(drawing, epoch)
    with common(seed, epoch, drawing):
        drawn = list(islice(iter(drawing), most if first is None else first))
    if len(drawn) == most:
        raise ConfigError(f"a {type(sampler).__name__} of length {len(sampler)} has no end: {ROWS_BY_HAND}")
    return drawn


def digest_of(drawn: Sequence[Any]) -> str:
    """Return a digest of what a sampler has drawn, in its order."""
    numbers = drawn and all(type(unit) is int for unit in drawn)
    data = np.asarray(drawn, dtype=np.int64).tobytes() if numbers else repr(drawn).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _copied(sampler: Any) -> Any:
    """Return a copy of a sampler, and of what in it a pass may change: samplers, and flat lists."""
    made = copy.copy(sampler)
    for name, value in getattr(made, "__dict__", {}).items():
        if isinstance(value, Sampler):
            made.__dict__[name] = _copied(value)
        elif isinstance(value, list | dict | set) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 1):
            made.__dict__[name] = copy.copy(value) if not isinstance(value, Tensor) else value.clone()
    return made


def _set_epoch(sampler: Any, epoch: int) -> None:
    """Choose a pass's order, if the sampler, or one inside it, has one for each epoch."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif isinstance(getattr(sampler, "epoch", None), int):
        sampler.epoch = epoch
    elif isinstance(inner := getattr(sampler, "sampler", None), Sampler):
        _set_epoch(inner, epoch)


def _flat(unit: Any) -> Iterator[Any]:
    """Yield the rows of batches, and of batches of batches."""
    if isinstance(unit, list | tuple):
        for each in unit:
            yield from _flat(each)
    else:
        yield unit


def runs_of(batches: Sequence[Any]) -> list[list[Any]]:
    """Return batches in runs of those that repeat the rows of the one before, or begin with its last row."""
    runs: list[list[Any]] = []
    for batch in batches:
        if runs and _continues(runs[-1][-1], batch):
            runs[-1].append(batch)
        else:
            runs.append([batch])
    return runs


def _continues(before: Any, batch: Any) -> bool:
    if not isinstance(batch, list | tuple):
        return bool(before == batch)
    return bool(batch) and bool(before) and (before[-1] == batch[0] or {*_flat(before)} == {*_flat(batch)})


def _rows_in(unit: Any, rows: list[int], batches: Any) -> Any:
    """Return the rows of the whole dataset that a sampler over a part of it has drawn."""
    if isinstance(unit, list | tuple):
        return [_rows_in(each, rows, batches) for each in unit]
    try:
        place = int(unit)
        assert 0 <= place
        return rows[place]
    except (TypeError, ValueError, AssertionError, IndexError):
        raise ConfigError(
            f"a {type(batches).__name__} over {len(rows)} samples draws {unit!r}, so lsgd cannot divide it: "
            f"{ROWS_BY_HAND}"
        ) from None


# -- loaders ---------------------------------------------------------------------------------------------------


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a DataLoader, but for its data and samplers."""
    kept = {name: getattr(loader, name) for name in KEPT_OPTIONS if hasattr(loader, name)}
    return kept | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return what draws a DataLoader's indices; None: a batch sampler of the script's own draws whole batches."""
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:  # if it was passed in, the loader's own sampler is unused
        return batches.sampler
    return loader.sampler if batches is None else None


def passes_of(loader: DataLoader[Any], place: Place, seed: int, processes: int = 1) -> Passes:
    """Return what deals a DataLoader's samples, or its batches, to this worker.

    Raises:
        ConfigError: lsgd cannot divide what the sampler draws.
    """
    dataset, sampler, batches = loader.dataset, index_sampler(loader), loader.batch_sampler
    for each in (batches, sampler):
        if isinstance(each, Passes):  # of a loader that shard() has returned: it is dealt again
            found = copy.copy(each)
            found.place = place
            found.load_state_dict({"epoch": 0, "consumed": 0, "seed": each.seed})
            return found
    size = length(dataset)
    if sampler is not None and is_plain(sampler, size):
        return ShardSampler(int(size), place, getattr(sampler, "seed", seed), shuffles(sampler), processes)
    if type(sampler) in ROW_BY_ROW or type(sampler).__name__ == "SeedableRandomSampler":
        return EveryNth(sampler, int(size), place, seed, processes)
    source, own = sampler if batches is None else batches, batches if sampler is None else sampler
    if length(own) == math.inf:
        raise ConfigError(
            f"lsgd divides what a sampler yields by its length, and a {type(own).__name__} has none: {BY_HAND}"
        )
    whole = WholeBatches(source, 0 if size == math.inf else int(size), place, seed, processes)
    if (alike := whole.is_alike()) and not whole.comes_back():
        return whole
    if size < math.inf and (make := _batches_over(sampler, batches, dataset)) is not None:
        return WithinPart(dataset, make, place, seed, processes)
    if not alike:
        raise ConfigError(
            f"a {type(own).__name__} draws another order each time, whatever torch, numpy and Python have for a seed, "
            f"so the workers' would overlap: let it draw from their generators, or have one as an attribute; or "
            f"{ROWS_BY_HAND}"
        )
    return whole


def _batches_over(sampler: Any, batches: Any, dataset: Any) -> Callable[[Any], Any] | None:
    """Return what makes a loader's batches over a part of its dataset; None: lsgd cannot."""
    make = again_over(batches if sampler is None else sampler, dataset)
    if make is None:
        return None
    of_part: Callable[[Any], Any] = make
    if sampler is not None and batches is not None:
        made = make

        def of_part(part: Any) -> Any:
            return BatchSampler(made(part), batches.batch_size, batches.drop_last)

    try:
        tried = length(of_part(part_of(dataset, list(range(len(dataset)))))) < math.inf
    except Exception:  # the sampler asks for what a part has not
        return None
    return of_part if tried else None


def shard_of(
    loader: DataLoader[T], place: Place, processes: int = 1, options: dict[str, Any] | None = None
) -> ShardLoader:
    """Return a DataLoader of a worker's part of another one's dataset; ``options``: instead of :func:`options_of` it.

    Raises:
        ConfigError: the dataset is too small, or lsgd cannot divide what its sampler draws.
    """
    options, sampler, batches = options or options_of(loader), index_sampler(loader), loader.batch_sampler
    if type(batches) is BatchSampler:  # if it was passed in, the loader's own batch size is unused
        options |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    elif batches is not None:
        options = {name: value for name, value in options.items() if name not in ("batch_size", "drop_last")}
    if is_plain(sampler, length(loader.dataset)):
        seed = getattr(sampler, "seed", 0)
        return shard_loader(loader.dataset, place, seed, shuffles(sampler), options, processes)
    shard = ShardLoader(loader.dataset, passes_of(loader, place, 0, processes), options)
    if len(shard) == 0:
        raise ConfigError(shard.passes.none())
    return shard


def is_plain(sampler: Any, size: float) -> bool:
    """Whether a sampler draws each of so many samples once, and in no order of its own; accelerate has one, too."""
    if isinstance(sampler, ShardSampler):  # of a loader that shard() has returned: it is dealt again
        return sampler.length == size
    if isinstance(sampler, RandomSampler) and type(sampler).__name__ in ("RandomSampler", "SeedableRandomSampler"):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source) == size
    source = {SequentialSampler: "data_source", DistributedSampler: "dataset"}.get(type(sampler))
    return source is not None and length(getattr(sampler, source)) == size


def shuffles(sampler: Any) -> bool:
    """Whether a sampler draws in another order than that of the dataset."""
    return bool(getattr(sampler, "shuffle", not isinstance(sampler, SequentialSampler)))
