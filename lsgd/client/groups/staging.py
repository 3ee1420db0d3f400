"""Splits tensors into pieces, which pass through host memory if they are on a GPU: copies and transfers overlap.

The pieces depend only on a tensor's size, so a member with a GPU and one without can exchange.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from lsgd.collectives.composed import pieces_of


class Copying(Protocol):
    """A copy under way; a CUDA event is one."""

    def query(self) -> bool:
        """Whether it has ended; does not wait."""

    def synchronize(self) -> None:
        """Wait for its end."""


class Copier:
    """Copies between a GPU and pinned host memory in its own stream, after the work in the caller's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned memory, which torch caches."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def begin(self, target: Tensor, source: Tensor) -> Copying:
        """Begin a copy, after earlier ones."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copying: Copying = self._stream.record_event()
        on_device = target if target.is_cuda else source
        on_device.record_stream(self._stream)  # keeps its memory until the copy has ended
        return copying


@functools.lru_cache
def copier_of(device: torch.device) -> Copier | None:
    """Return what copies between a device and host memory; None if the device is the host."""
    return None if device.type == "cpu" else Copier(device)


class Staged:
    """A contiguous tensor in ``pieces`` in host memory.

    Args:
        copier: None: it is in host memory already.
        numels: the pieces' numbers of elements; empty: equal ones, by the tensor's size.
    """

    def __init__(self, tensor: Tensor, copier: Copier | None, numels: Sequence[int] = ()) -> None:
        flat = tensor.view(-1)
        self._parts = _split(flat, numels)
        self._copier = copier
        self._copies: dict[int, Copying] = {}
        self.pieces = self._parts if copier is None else _split(copier.host_like(flat), numels)

    def fill(self) -> None:
        """Begin to copy the tensor to host memory."""
        for index, (piece, part) in enumerate(zip(self.pieces, self._parts, strict=True)):
            self._begin(index, piece, part)

    def piece(self, index: int) -> Tensor:
        """Return a piece in host memory, after its copy if there was one."""
        self._wait(index)
        return self.pieces[index]

    def drain(self, index: int) -> None:
        """Begin to copy a piece that has arrived to the tensor, if the tensor has a piece with this index."""
        if index < len(self.pieces):
            self._begin(index, self._parts[index], self.pieces[index])

    def finish(self) -> None:
        """Wait for the end of all copies."""
        for index in tuple(self._copies):
            self._wait(index)

    def _begin(self, index: int, target: Tensor, source: Tensor) -> None:
        if self._copier is not None:
            self._copies[index] = self._copier.begin(target, source)

    def _wait(self, index: int) -> None:
        if (copying := self._copies.pop(index, None)) is not None:
            copying.synchronize()


def _split(flat: Tensor, numels: Sequence[int]) -> Sequence[Tensor]:
    if numels:
        return flat.tensor_split(list(accumulate(numels))[:-1])
    return pieces_of(flat)
