"""What the servers compare of the workers' data, where lsgd does not divide it."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lsgd.client.data.passes import peek
from lsgd.client.data.samplers import index_sampler
from lsgd.client.data.shards import ShardLoader
from lsgd.errors import LsgdError

logger = logging.getLogger("lsgd")

T = TypeVar("T")

DIGEST_NBYTES = 1 << 16
"""How many bytes of each tensor go into a batch's digest."""


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
