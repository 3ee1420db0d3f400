"""Tensors as chunks of bytes with digests: by them, members know what they have in common without sending it.

A chunk is up to 1 MiB of one tensor, in the order of its elements. Its digest (:mod:`lsgd.digests`) is that of the name
of the tensor's dtype, the machine's byte order, and the bytes. The order of chunks is that of the tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lsgd import processors
from lsgd.digests import CHUNK_NBYTES, digest_of

THREADS = 8
"""Most threads that compute digests."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor.

    Args:
        data: its bytes, uint8, on the tensor's device; memory of the tensor itself.
        dtype: the tensor's.
    """

    data: Tensor
    dtype: torch.dtype

    def digest(self, data: Tensor | None = None) -> bytes:
        """Return the digest of the chunk, or of other bytes in its place."""
        array: Any = (self.data if data is None else data).cpu().numpy()
        return digest_of(memoryview(array), f"{str(self.dtype).removeprefix('torch.')} {sys.byteorder}")


def chunks_of(tensors: Iterable[Tensor]) -> list[Chunk]:
    """Return the chunks of contiguous tensors, in order; empty tensors have none."""
    parts = ((x.detach().view(-1).view(torch.uint8), x.dtype) for x in tensors if x.numel())
    return [Chunk(piece, dtype) for data, dtype in parts for piece in torch.split(data, CHUNK_NBYTES)]


def digests_of(chunks: Sequence[Chunk]) -> list[bytes]:
    """Return the digest of each chunk."""
    return in_threads(Chunk.digest, chunks)


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return what ``work`` returns for each item; hashing does not hold the interpreter's lock."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, processors.usable(), len(items)), "lsgd-digest") as pool:
        return list(pool.map(work, items))
