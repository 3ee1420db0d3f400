"""A worker's shards one after another, for a trainer whose epochs differ from the run's."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from lsgd.client.loader import ShardSampler
from lsgd.errors import ConfigError


class ShardStream(Sampler[int]):
    """Endless indices: this worker's shards, one epoch of the run after another.

    One pass yields ``per_pass`` indices, and the next one continues there. So the number of a trainer's own steps does
    not depend on the number of workers.

    Args:
        length: length of the dataset.
        per_pass: indices in one pass.
        place: returns this worker's current (rank, world size).
        seed: seed of the shards; the same on all workers.
        shuffle: whether to shuffle each shard.

    Raises:
        ConfigError: the dataset has fewer samples than there are workers (when it is iterated).
    """

    def __init__(
        self, length: int, per_pass: int, place: Callable[[], tuple[int, int]], seed: int, shuffle: bool
    ) -> None:
        self._per_pass = per_pass
        self._shards = ShardSampler(length, place, seed, shuffle)
        self._epoch = 0  # of the oldest sample not yet trained on
        self._consumed = 0  # samples of that epoch's shard trained on
        self._dealt: deque[int] = deque()  # lengths of the shards from that epoch on
        self._indices = self._deal(0)

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[int]:
        return islice(self._indices, self._per_pass)

    def consume(self, samples: int) -> None:
        """Count samples that were trained on; prefetched samples do not count."""
        self._consumed += samples
        while self._dealt and self._consumed >= self._dealt[0]:
            self._consumed -= self._dealt.popleft()
            self._epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data."""
        return {"epoch": self._epoch, "consumed": self._consumed, "seed": self._shards.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position that :meth:`state_dict` returned."""
        self._epoch, self._consumed = state["epoch"], state["consumed"]
        self._shards.epoch, self._shards.seed = state["epoch"], state["seed"]
        self._dealt.clear()
        self._indices = self._deal(self._consumed)

    def _deal(self, skip: int) -> Iterator[int]:
        while True:
            shard = self._shards.shard().tolist()
            if not shard:
                size = self._shards.place()[1]
                raise ConfigError(f"the dataset has {self._shards.length} samples for {size} workers; some have none")
            self._dealt.append(len(shard))
            yield from shard[skip:]
            skip = 0
            self._shards.epoch += 1


def shard(loader: Any, place: Callable[[], tuple[int, int]], seed: int, shuffle: bool) -> ShardStream | None:
    """Replace a DataLoader's sampler with a worker's shards; return None if it has no sampler.

    Args:
        loader: changed in place; a pass keeps its number of batches, all of them full.
        place: returns this worker's current (rank, world size).
        seed: seed of the shards; the same on all workers.
        shuffle: whether to shuffle each shard.
    """
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(batches, BatchSampler) or not hasattr(batches, "sampler"):
        return None
    stream = ShardStream(len(loader.dataset), len(batches) * batches.batch_size, place, seed, shuffle)
    batches.sampler = stream
    return stream
