"""A worker's data: a shard that no other worker has, dealt again in each epoch."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lsgd.errors import ConfigError, LsgdError

logger = logging.getLogger("lsgd")

T = TypeVar("T")

MAX_EMPTY = 1000
"""How many passes over a worker's data a script may begin after the run's end: one for each epoch that is left."""

DIGEST_NBYTES = 1 << 16
"""How many bytes of each tensor go into a batch's digest."""


class ShardSampler(Sampler[int]):
    """Indices of this worker's shard.

    Each epoch deals out the dataset by a permutation that all workers know. So the shards of an epoch are disjoint and
    cover the dataset, and in time each worker sees all of it. A change of membership counts from the next epoch on.
    Workers in different epochs, because of their speeds or a late join, may draw the same sample. The processes of an
    island get equally many samples, so that they run the same steps; each epoch leaves out at most as many samples as
    the island has other processes.

    Args:
        place: function that returns the current (rank, world size); in islands, of this process among all processes.
        seed: permutations' seed, the same on all workers.
        shuffle: whether to shuffle; if not, a shard is in the dataset's order.
        processes: number of processes of this worker's island.
    """

    over: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the run has ended, and so all passes, also those of a loader that another library has made anew."""

    def __init__(
        self, length: int, place: Callable[[], tuple[int, int]], seed: int, shuffle: bool, processes: int = 1
    ) -> None:
        self.length = length
        self.place = place
        self.seed = seed
        self.shuffle = shuffle
        self._processes = processes
        self.epoch = 0
        self.consumed = 0  # samples of this epoch trained on
        self.dealt_for = place()  # rank and world size of this epoch's shard
        self._skip = 0
        self._through = -1  # the last epoch of which all indices were drawn

    def shard(self) -> Tensor:
        """Return the indices of this worker's shard in the order of the current epoch."""
        rank, size = self.place()
        # Tuples of small integers hash to the same value in every process.
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)) % (1 << 63))
        shard = torch.randperm(self.length, generator=generator, device="cpu")[rank::size][: self._samples()]
        return shard if self.shuffle else shard.sort().values

    def __iter__(self) -> Iterator[int]:
        self.epoch = self.next_epoch
        skip, self._skip = self._skip, 0
        self.consumed = skip
        self.dealt_for = self.place()
        return self._draw(self.shard()[skip:].tolist(), self.epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass: one left early is over, and so is one that nobody counts."""
        return self.epoch + (self.consumed > self._skip or self._through == self.epoch)

    def follow(self, earlier: Iterable["ShardSampler"]) -> None:
        """Begin after the epochs of earlier samplers of the same data: a script may make a loader for each epoch."""
        same = (each for each in earlier if (each.length, each.seed) == (self.length, self.seed))
        self.epoch = max((each.next_epoch for each in same), default=0)

    def _draw(self, indices: list[int], epoch: int) -> Iterator[int]:
        for index in indices:
            if self.over():
                return
            yield index
        self._through = epoch

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, for scripts that call it on torch's DistributedSampler: epochs are counted here."""

    def __len__(self) -> int:
        """Samples of a whole pass."""
        return self._samples()

    @property
    def left(self) -> int:
        """Samples of the next pass: after a resume, of the rest of one."""
        return max(0, self._samples() - self._skip)

    def _samples(self) -> int:
        """Return the size of this shard: that of the island's last process, which has the fewest samples."""
        rank, size = self.place()
        workers = size // self._processes
        last = rank % workers + workers * (self._processes - 1)
        return len(range(last, self.length, size))

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and its consumed (not prefetched) samples."""
        return {"epoch": self.epoch, "consumed": self.consumed, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state_dict`: the next pass is the rest of that epoch."""
        self.epoch, self.seed, self._through = state["epoch"], state["seed"], -1
        self.consumed = self._skip = state["consumed"]


class EndingLoader(DataLoader[Any]):
    """A DataLoader whose passes end with the run: that under way at once, and later ones are empty.

    Attributes:
        over: whether the run has ended.
    """

    over: Callable[[], bool] = staticmethod(lambda: False)
    _empty = 0  # passes after the end

    def __iter__(self) -> Any:
        return self._until_over(super().__iter__())

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


class ShardLoader(EndingLoader):
    """A DataLoader of this worker's shard, made by ``Worker.loader``; every yielded batch counts as consumed."""

    is_sharded = True
    """Whether lsgd has divided the data, so that nobody need compare what workers draw."""

    sampler: ShardSampler

    def __iter__(self) -> Any:
        return self._until_over(self._counted(DataLoader.__iter__(self)))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        sampler, size = self.sampler, self.batch_size or 1
        for batch in batches:
            sampler.consumed += size
            yield batch
        sampler.epoch += 1
        sampler.consumed = 0

    @property
    def left(self) -> int:
        """Batches of the next pass: after a resume, of the rest of one."""
        size = self.batch_size or 1
        return self.sampler.left // size if self.drop_last else -(-self.sampler.left // size)

    def state_dict(self) -> dict[str, int]:
        """Return :meth:`ShardSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a :meth:`state_dict`: with the rest of its epoch, or with the next one if there is none."""
        self.sampler.load_state_dict(state)
        if not self.left:
            self.sampler.load_state_dict({**state, "epoch": state["epoch"] + 1, "consumed": 0})

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds: :meth:`state_dict`, and of which data and shard."""
        sampler = self.sampler
        return {"place": list(sampler.dealt_for), "length": sampler.length, "state": self.state_dict()}

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether a saved position is one in data of this length, dealt with this seed."""
        return bool(saved["length"] == self.sampler.length and saved["state"]["seed"] == self.sampler.seed)

    def take_position(self, saved: dict[str, Any]) -> None:
        """Continue at a saved position; in a new epoch, if the shards have changed."""
        sampler, state = self.sampler, saved["state"]
        if tuple(saved["place"]) == sampler.place():
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
    loader = ShardLoader(dataset, sampler=ShardSampler(length(), place, seed, shuffle, processes), **options)
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


class EveryNth(Sampler[Any]):
    """Every n-th of what a sampler yields, from this worker's rank on: an index, or a batch of indices.

    Raises:
        ConfigError: the sampler has no length.
    """

    over: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, sampler: Any, place: Callable[[], tuple[int, int]]) -> None:
        if length(sampler) == math.inf:
            raise ConfigError(
                f"shard() divides what a sampler yields by its length, and a {type(sampler).__name__} has none: give "
                f"it a __len__; or let each worker's sampler yield its own part (worker.part), and leave out shard()"
            )
        self._sampler: Any = sampler._sampler if isinstance(sampler, EveryNth) else sampler
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        rank, size = self._place()
        for drawn in islice(iter(self._sampler), rank, len(self) * size + rank, size):
            if self.over():
                return
            yield drawn

    def __len__(self) -> int:
        return len(self._sampler) // self._place()[1]  # the same on all workers

    def set_epoch(self, epoch: int) -> None:
        """Choose the next pass's order, if the sampler has one for each epoch."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


KEPT_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)
"""What a sharded DataLoader takes over from the one that it replaces, beside its batches."""


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


def shard_of(loader: DataLoader[T], place: Callable[[], tuple[int, int]], processes: int = 1) -> EndingLoader:
    """Return a DataLoader of a worker's shard of another one's dataset.

    Raises:
        ConfigError: the dataset is too small, or a sampler has no length.
    """
    options, sampler, batches = options_of(loader), index_sampler(loader), loader.batch_sampler
    if type(batches) is BatchSampler:  # if it was passed in, the loader's own batch size is unused
        options |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    if sampler is None:
        options = {name: value for name, value in options.items() if name not in ("batch_size", "drop_last")}
        return EndingLoader(loader.dataset, batch_sampler=EveryNth(batches, place), **options)
    if is_plain(sampler, length(loader.dataset)):
        shuffle = shuffles(sampler)
        seed = getattr(sampler, "seed", 0)
        return shard_loader(loader.dataset, place, seed, shuffle, options, processes)
    return EndingLoader(loader.dataset, sampler=EveryNth(sampler, place), **options)


def is_plain(sampler: Any, size: float) -> bool:
    """Whether a sampler draws each of so many samples once, and in no order of its own; accelerate has one, too."""
    if isinstance(sampler, RandomSampler) and type(sampler).__name__ in ("RandomSampler", "SeedableRandomSampler"):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source) == size
    if isinstance(sampler, ShardSampler):  # of a loader that shard() has returned: it is dealt again
        return sampler.length == size
    source = {SequentialSampler: "data_source", DistributedSampler: "dataset"}.get(type(sampler))
    return source is not None and length(getattr(sampler, source)) == size


def shuffles(sampler: Any) -> bool:
    """Whether a sampler draws in another order than that of the dataset."""
    return bool(getattr(sampler, "shuffle", not isinstance(sampler, SequentialSampler)))


class FirstData:
    """Lets the servers compare first batches, or first inputs, where lsgd does not shard the data; looks if any come.

    Raises:
        LsgdError: two passes in a row had no batch, so that the script would begin passes forever.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell: Callable[[str], object] | None = tell
        self._empty = 0  # passes in a row

    def of(self, loader: Iterable[T], world_size: int) -> Iterator[T]:
        """Return an iterator over a loader; at the first call, send the digest if lsgd does not shard the data."""
        source = iter(loader)
        if self._tell is not None and not getattr(loader, "is_sharded", False):
            warn_if_unsharded(loader, world_size)
            first, source = peek(source)
            self.tell(first)
        return self._not_empty(source)

    def _not_empty(self, source: Iterator[T]) -> Iterator[T]:
        first, source = peek(source)
        self._empty = 0 if first else self._empty + 1
        if self._empty > 1:
            raise LsgdError(
                "two passes over the data had no batch: it has ended for good, as a generator does after one pass; "
                "pass an object whose __iter__ begins again, or call worker.leave() after the last pass"
            )
        yield from source

    def tell(self, batch: object) -> None:
        """At the first call, send the digest of a batch, unless lsgd shards the data."""
        tell, self._tell = self._tell, None
        if tell is not None and (found := digest(batch)):
            tell(found)

    def tell_nothing(self) -> None:
        """Compare nothing: lsgd shards the data."""
        self._tell = None


def warn_if_unsharded(loader: object, world_size: int) -> None:
    """Warn if every worker draws from the whole dataset."""
    if not isinstance(loader, DataLoader) or isinstance(loader, ShardLoader) or world_size == 1:
        return
    if isinstance(index_sampler(loader), RandomSampler | SequentialSampler):
        logger.warning(
            "this DataLoader is not sharded: each of the %d workers draws from the whole dataset; "
            "worker.loader(dataset, ...) gives each its own shard",
            world_size,
        )


def digest(batch: object) -> str:
    """Return a digest of a batch's tensors; empty if it has none."""
    hashed = hashlib.blake2b(digest_size=16)
    leaves = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_nested and leaf.numel()]
    for tensor in tensors:
        head = tensor.detach().reshape(-1)[: DIGEST_NBYTES // tensor.element_size()].cpu().contiguous()
        hashed.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        hashed.update(head.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest() if tensors else ""
