"""Shards: each epoch deals a dataset with a length to the workers, so that no two draw the same sample."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lsgd.client.data.ending import EndingLoader
from lsgd.client.data.passes import Passes
from lsgd.client.data.randomness import number_of
from lsgd.errors import ConfigError

logger = logging.getLogger("lsgd")


class ShardSampler(Passes):
    """Indices of this worker's shard.

    Each epoch deals out the dataset by a permutation that all workers know. So the shards of an epoch are disjoint and
    cover the dataset, and in time each worker sees all of it. A change of membership counts from the next epoch on.
    The processes of an island get equally many samples; each epoch leaves out at most as many samples as the island has
    other processes.

    Args:
        shuffle: whether to shuffle; if not, a shard is in the dataset's order.
        others: as of :class:`Passes`.
    """

    def __init__(
        self, length: int, place: Callable[[], tuple[int, int]], seed: int, shuffle: bool, processes: int = 1
    ) -> None:
        super().__init__(length, place, seed, processes)
        self.shuffle = shuffle

    @property
    def name(self) -> str:
        """How the shards are drawn."""
        return "at random" if self.shuffle else "in order"

    def shard(self) -> Tensor:
        """Return the indices of this worker's shard in the order of the current epoch."""
        generator = torch.Generator().manual_seed(number_of(self.seed, self.epoch))
        shard = torch.randperm(self.length, generator=generator, device="cpu")[self.share(self.length)]
        return shard if self.shuffle else shard.sort().values

    def draw(self) -> list[int]:
        """Return :meth:`shard`."""
        found: list[int] = self.shard().tolist()
        return found

    def none(self) -> str:
        """Return why this worker has no part of a pass."""
        return f"the dataset has {self.length} samples for {self.place()[1]} workers; some have none"

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, for scripts that call it on torch's DistributedSampler: epochs are counted here."""

    def __len__(self) -> int:
        """Samples of a whole pass."""
        part = self.share(self.length)
        return len(range(part.start, part.stop, part.step))


class ShardLoader(EndingLoader):
    """A DataLoader of this worker's part of a dataset; every yielded batch counts as consumed.

    Attributes:
        passes: what deals the samples, or the batches.

    A generator of the script draws no order here, and would give the loader's processes the same seeds on all workers,
    so it is not used.
    """

    is_sharded = True
    """Whether lsgd has divided the data, so that nobody need compare what workers draw."""

    def __init__(self, dataset: Any, passes: Passes, options: dict[str, Any]) -> None:
        options = {**options, "generator": None}
        if passes.unit == "sample" or options.get("batch_size", 1) is None:
            super().__init__(dataset, sampler=passes, **options)
        else:
            rest = {name: value for name, value in options.items() if name not in ("batch_size", "drop_last")}
            super().__init__(dataset, batch_sampler=passes, **rest)
            self.__dict__ |= {**options, "sampler": passes}  # as of the loader that it replaces
        self.passes = passes

    @property
    def _units(self) -> int:
        """How many units a batch has."""
        return 1 if self.passes.unit == "batch" else self.batch_size or 1

    def __iter__(self) -> Any:
        return self._until_over(self._counted(DataLoader.__iter__(self)))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.passes.consumed += self._units
            yield batch
        self.passes.epoch += 1
        self.passes.consumed = 0

    @property
    def left(self) -> int:
        """Batches of the next pass: after a resume, of the rest of one."""
        return self.passes.left // self._units if self.drop_last else -(-self.passes.left // self._units)

    def state_dict(self) -> dict[str, int]:
        """Return :meth:`Passes.state_dict`."""
        return self.passes.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state_dict`: with the rest of its epoch, or with the next one if there is none."""
        self.passes.load_state_dict(state)
        if not self.left:
            self.passes.load_state_dict({**state, "epoch": state["epoch"] + 1, "consumed": 0})

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds: :meth:`state_dict`, and of which data and part."""
        passes = self.passes
        about = {"place": list(passes.dealt_for), "length": passes.length, "unit": passes.unit}
        return {**about, "state": self.state_dict()}

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether a saved position is one in data of this length, dealt alike with this seed."""
        mine = (self.passes.length, self.passes.unit, self.passes.seed)
        return (saved["length"], saved.get("unit", "sample"), saved["state"].get("seed")) == mine

    def take_position(self, saved: dict[str, Any]) -> None:
        """Continue at a saved position; in a new epoch, if the parts have changed."""
        state = saved["state"]
        if tuple(saved["place"]) == self.passes.place():
            self.load_state_dict(state)
        else:
            self.load_state_dict({**state, "epoch": state["epoch"] + 1, "consumed": 0})
            logger.warning(
                "the number of workers is not that of the checkpoint: the data is dealt again, beginning with epoch %d",
                state["epoch"] + 1,
            )


def shard_loader(
    dataset: Any,
    place: Callable[[], tuple[int, int]],
    seed: int,
    shuffle: bool,
    options: dict[str, Any],
    processes: int = 1,
) -> ShardLoader:
    """Return a loader of a worker's shard; ``options`` are DataLoader's.

    Raises:
        ConfigError: the dataset has no length or is too small, or an option is up to the sharding.
    """
    taken = {"sampler", "batch_sampler"} & options.keys()
    if taken:
        raise ConfigError(
            f"loader() makes the {taken.pop()} itself; to use your own, make a DataLoader and pass it to batches()"
        )
    length = getattr(dataset, "__len__", None)
    if length is None:
        raise ConfigError(
            f"loader() needs a dataset with a length or a stream, and a {type(dataset).__name__} is neither: it has "
            f"no __len__, and no __iter__ either"
        )
    _, size = place()
    if length() < size:
        raise ConfigError(f"the dataset has {length()} samples for {size} workers; some workers would have none")
    loader = ShardLoader(dataset, ShardSampler(length(), place, seed, shuffle, processes), options)
    if len(loader) == 0:
        raise ConfigError(
            f"the dataset has {length()} samples for {size} workers: with drop_last, no worker has a whole batch"
        )
    return loader


def length(loader: object) -> float:
    """Return the number of batches in the next pass over a loader; infinity if it has no length."""
    if isinstance(loader, ShardLoader):
        return loader.left
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf
