"""The shards of a worker one after another, for a trainer whose epochs are not those of the run."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from lsgd.client.loader import ShardSampler
from lsgd.errors import ConfigError


class ShardStream(Sampler[int]):
    """Indices of this worker's shards, of one epoch of the run after another, without an end.

    One pass gives as many as it was told, and the next one continues there. So a trainer's count of its own steps does
    not depend on how many workers there are.

    Args:
        length: of the dataset.
        per_pass: indices in one pass.
        place: returns (rank, world size) of this worker now.
        seed: of the shards; the same on all workers.
        shuffle: whether to shuffle each shard.

    Raises:
        ConfigError: the dataset has fewer samples than there are workers (when it is iterated).
    """

    def __init__(
        self, length: int, per_pass: int, place: Callable[[], tuple[int, int]], seed: int, shuffle: bool
    ) -> None:
        self._per_pass = per_pass
        self._shards = ShardSampler(length, place, seed, shuffle)
        self._epoch = 0  # of the oldest sample that is not trained on
        self._consumed = 0  # samples of that epoch's shard that were trained on
        self._dealt: deque[int] = deque()  # lengths of the shards from that epoch on
        self._indices = self._deal(0)

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[int]:
        return islice(self._indices, self._per_pass)

    def consume(self, samples: int) -> None:
        """Count samples that were trained on; those drawn ahead are not."""
        self._consumed += samples
        while self._dealt and self._consumed >= self._dealt[0]:
            self._consumed -= self._dealt.popleft()
            self._epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Return how far training is."""
        return {"epoch": self._epoch, "consumed": self._consumed, "seed": self._shards.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken."""
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
    """Put a worker's shards in the place of a DataLoader's sampler; return None if it has none.

    Args:
        loader: changed here; a pass over it keeps its number of batches, each of them a whole one.
        place: returns (rank, world size) of this worker now.
        seed: of the shards; the same on all workers.
        shuffle: whether to shuffle each shard.
    """
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(batches, BatchSampler) or not hasattr(batches, "sampler"):
        return None
    stream = ShardStream(len(loader.dataset), len(batches) * batches.batch_size, place, seed, shuffle)
    batches.sampler = stream
    return stream
