"""Tensors as chunks of bytes with digests: by them, members know what they have in common without sending it.

A chunk is up to 1 MiB of one tensor, in the order of its elements. The digest of a chunk is 16 bytes of BLAKE2b, of the
name of the tensor's dtype, the machine's byte order, and the bytes. The order of chunks is that of the tensors.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

CHUNK_NBYTES = 1 << 20
"""Size of a chunk; the last one of a tensor may be smaller."""

DIGEST_NBYTES = 16
"""Size of a digest."""

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
        return digest_of((self.data if data is None else data).cpu(), self.dtype)


def digest_of(data: Tensor, dtype: torch.dtype) -> bytes:
    """Return the digest of bytes (uint8, in host memory) that belong to a tensor of this dtype."""
    array: Any = data.numpy()
    head = f"{str(dtype).removeprefix('torch.')} {sys.byteorder}\n".encode()
    found = hashlib.blake2b(head, digest_size=DIGEST_NBYTES)
    found.update(memoryview(array))
    return found.digest()


def chunks_of(tensors: Iterable[Tensor]) -> list[Chunk]:
    """Return the chunks of contiguous tensors, in order; empty tensors have none."""
    parts = ((x.detach().view(-1).view(torch.uint8), x.dtype) for x in tensors if x.numel())
    return [Chunk(piece, dtype) for data, dtype in parts for piece in torch.split(data, CHUNK_NBYTES)]


def digests_of(chunks: Sequence[Chunk]) -> list[bytes]:
    """Return the digest of each chunk."""
    return in_threads(Chunk.digest, chunks)


def root_of(digests: Iterable[bytes]) -> bytes:
    """Return the digest of a list of digests."""
    return hashlib.blake2b(b"".join(digests), digest_size=DIGEST_NBYTES).digest()


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return what ``work`` returns for each item; hashing does not hold the interpreter's lock."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1, len(items)), "lsgd-digest") as pool:
        return list(pool.map(work, items))
