"""The kernels for codecs of few bits, compiled at first use; none where the device or its compiler does not do."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from torch import Tensor

LEVELS_BLOCKS: Final = tuple(1 << i for i in range(6, 12))
"""Sizes of blocks of levels for which there are kernels; larger ones would be too much straight code."""

MINMAX_BLOCKS: Final = range(64, (1 << 15) + 1, 64)
"""The same for ``minmax4``."""

_log = logging.getLogger(__name__)


class Path(Protocol):
    """The kernels of one codec on one device.

    ``parts`` are those of a payload after its header, uint8, as the codec cuts them. ``flags`` is int32; it becomes 1
    if a number is not finite, and else stays. Whole vectors of float32 are read and written.
    """

    def takes(self, numel: int) -> int:
        """Return how many of ``numel`` elements, the first, the kernels work on: a number of whole blocks, or all."""

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write what ``x`` becomes."""

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""


@dataclass(frozen=True)
class Levels:
    """What a block's elements become: plus or minus ``near`` times its scale, or, beyond a threshold, ``far`` times it.

    Args:
        threshold: times the block's root mean square; None: all are near.
    """

    near: float = 1.0
    far: float = 0.0
    threshold: float | None = None


@functools.cache
def levels_path(device: str, levels: Levels, block: int) -> Path | None:
    """Return the kernels for blocks of this size; None if there are none for it, or none work on this device."""

    def on_cpu() -> Path:
        from lsgd.kernels.cpu.levels import LevelsPath

        return LevelsPath(levels, block)

    def on_cuda() -> Path:
        from lsgd.kernels.cuda.few_bits import LevelsPath

        return LevelsPath(levels, block)

    return _usable(device, on_cpu, on_cuda) if block in LEVELS_BLOCKS else None


@functools.cache
def minmax4_path(device: str, block: int) -> Path | None:
    """The same for ``minmax4``."""

    def on_cpu() -> Path:
        from lsgd.kernels.cpu.minmax4 import MinMax4Path

        return MinMax4Path(block)

    def on_cuda() -> Path:
        from lsgd.kernels.cuda.few_bits import MinMax4Path

        return MinMax4Path(block)

    return _usable(device, on_cpu, on_cuda) if block in MINMAX_BLOCKS else None


@functools.cache
def topk_path(device: str, chunk: int, k: int) -> Path | None:
    """The same for those that keep ``k`` elements of each chunk."""

    def on_cpu() -> Path:
        from lsgd.kernels.cpu.topk import TopKPath

        return TopKPath(chunk, k)

    def on_cuda() -> Path:
        from lsgd.kernels.cuda.few_bits import TopKPath

        return TopKPath(chunk, k)

    return _usable(device, on_cpu, on_cuda)


def _usable(device: str, on_cpu: Callable[[], Path], on_cuda: Callable[[], Path]) -> Path | None:
    make = {"cpu": on_cpu, "cuda": on_cuda}.get(device)
    try:
        return make() if make else None
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "; pip install llvmlite" if isinstance(error, ImportError) and device == "cpu" else ""
        warn(device, f"{error}{remedy}")
        return None


@functools.cache
def warn(device: str, reason: str) -> None:
    """Log why there are no kernels, once."""
    _log.warning("codecs of few bits run in plain torch on %s, ten times slower: %s", device, reason)
