"""The data of a worker: a shard that no other worker has, dealt anew each epoch."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from lsgd.errors import ConfigError

logger = logging.getLogger("lsgd")

T = TypeVar("T")

DIGEST_NBYTES = 1 << 16
"""How much of each tensor of a batch its digest looks at."""


class ShardSampler(Sampler[int]):
    """Indices of this worker's shard.

    Each epoch deals the dataset out to the workers anew, by a permutation that all know. So the shards of an epoch are
    disjoint and cover the dataset, and each worker sees all of it in time. They follow the membership from the next
    epoch on. Workers at different epochs, because of their speeds or a late join, may draw the same sample. The
    processes of an island get equally many samples, so that they make the same steps: of each epoch up to as many
    as the island has other processes are left out.

    Args:
        length: of the dataset.
        place: returns (rank, world size) of this worker now; in islands, of this process among those of all workers.
        seed: of the permutations; the same on all workers.
        shuffle: whether to shuffle; without, a shard is in the dataset's order.
        processes: of this worker's island.
    """

    def __init__(
        self, length: int, place: Callable[[], tuple[int, int]], seed: int, shuffle: bool, processes: int = 1
    ) -> None:
        self.length = length
        self.place = place
        self.seed = seed
        self.shuffle = shuffle
        self._processes = processes
        self.epoch = 0
        self.consumed = 0  # samples of this epoch that were trained on
        self.dealt_for = place()  # the rank and world size whose shard this epoch's is
        self._skip = 0

    def shard(self) -> Tensor:
        """Return the indices of this worker's shard in the order of the current epoch."""
        rank, size = self.place()
        # Tuples of small integers hash to the same value in every process.
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) % (1 << 63))
        shard = torch.randperm(self.length, generator=generator)[rank::size][: self._samples()]
        return shard if self.shuffle else shard.sort().values

    def __iter__(self) -> Iterator[int]:
        skip, self._skip = self._skip, 0
        if self.consumed > skip:  # an epoch that was left early is over: the next one has another order
            self.epoch += 1
        self.consumed = skip
        self.dealt_for = self.place()
        return iter(self.shard()[skip:].tolist())

    def __len__(self) -> int:
        """Samples of the next pass."""
        return max(0, self._samples() - self._skip)

    def _samples(self) -> int:
        """Return the samples in this shard: as many as in that of the island's last process, which has the fewest."""
        rank, size = self.place()
        last = rank - rank % self._processes + self._processes - 1
        return len(range(last, self.length, size))

    def state_dict(self) -> dict[str, int]:
        """Return how far training is: the epoch, and the samples of it that were consumed (not prefetched)."""
        return {"epoch": self.epoch, "consumed": self.consumed, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken: the next epoch iterated is the rest of that one."""
        self.epoch, self.seed = state["epoch"], state["seed"]
        self.consumed = self._skip = state["consumed"]


class ShardLoader(DataLoader[Any]):
    """A DataLoader of this worker's shard, made by ``Worker.loader``; a batch handed out counts as consumed."""

    sampler: ShardSampler

    def __iter__(self) -> Any:
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        sampler, size = self.sampler, self.batch_size or 1
        for batch in batches:
            sampler.consumed += size
            yield batch
        sampler.epoch += 1
        sampler.consumed = 0

    def state_dict(self) -> dict[str, int]:
        """Return how far training is; see :meth:`ShardSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.sampler.load_state_dict(state)


def shard_loader(
    dataset: Dataset[Any],
    place: Callable[[], tuple[int, int]],
    seed: int,
    shuffle: bool,
    options: dict[str, Any],
    processes: int = 1,
) -> ShardLoader:
    """Return a loader of a worker's shard; ``options`` are DataLoader's.

    Raises:
        ConfigError: the dataset has no length, is too small, or an option is one that sharding decides.
    """
    taken = {"sampler", "batch_sampler"} & options.keys()
    if taken:
        raise ConfigError(
            f"loader() makes the {taken.pop()} itself; with one of your own, make a DataLoader and pass it to batches()"
        )
    length = getattr(dataset, "__len__", None)
    if length is None:
        raise ConfigError(
            "loader() needs a dataset with a length; iterate a stream of your own and pass it to batches()"
        )
    _, size = place()
    if length() < size:
        raise ConfigError(f"the dataset has {length()} samples for {size} workers; some would have none")
    loader = ShardLoader(dataset, sampler=ShardSampler(length(), place, seed, shuffle, processes), **options)
    if len(loader) == 0:
        raise ConfigError(
            f"the dataset has {length()} samples for {size} workers: with drop_last, that is not one whole batch each"
        )
    return loader


def length(loader: object) -> float:
    """Return how many batches a pass over a loader has, infinity if it does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf


def peek(batches: Iterator[T]) -> tuple[list[T], Iterator[T]]:
    """Return the first of the batches in a list, empty if there is none, and an iterator over all of them."""
    first = list(islice(batches, 1))
    return first, chain(first, batches)


class FirstData:
    """Lets the servers compare what the workers begin with, where it is not sharded here.

    Args:
        tell: takes the digest of the first batch.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell: Callable[[str], object] | None = tell

    def of(self, loader: Iterable[T], world_size: int) -> Iterator[T]:
        """Iterate a loader; before the first iteration, tell the digest of data that we do not shard."""
        source = iter(loader)
        if self._tell is not None and not isinstance(loader, ShardLoader):
            tell, self._tell = self._tell, None
            warn_if_unsharded(loader, world_size)
            first, source = peek(source)
            if found := digest(first):
                tell(found)
        return source


def warn_if_unsharded(loader: object, world_size: int) -> None:
    """Log a warning if every worker draws from the whole dataset."""
    if not isinstance(loader, DataLoader) or isinstance(loader, ShardLoader) or world_size == 1:
        return
    if isinstance(loader.sampler, RandomSampler | SequentialSampler):
        logger.warning(
            "this DataLoader is not sharded: each of the %d workers draws from the whole dataset; "
            "worker.loader(dataset, ...) gives each a shard of its own",
            world_size,
        )


def digest(batch: object) -> str:
    """Return a digest of a batch's tensors, or an empty text if it has none."""
    hashed = hashlib.blake2b(digest_size=16)
    leaves = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_nested and leaf.numel()]
    for tensor in tensors:
        head = tensor.detach().reshape(-1)[: DIGEST_NBYTES // tensor.element_size()].cpu().contiguous()
        hashed.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        hashed.update(head.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest() if tensors else ""
