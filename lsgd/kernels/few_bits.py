"""The kernels for codecs of few bits, compiled at first use; none where the device or its compiler does not do."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

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
    return _path(device, "levels", "LevelsPath", levels, block) if block in LEVELS_BLOCKS else None


@functools.cache
def minmax4_path(device: str, block: int) -> Path | None:
    """The same for ``minmax4``."""
    return _path(device, "minmax4", "MinMax4Path", block) if block in MINMAX_BLOCKS else None


@functools.cache
def topk_path(device: str, chunk: int, k: int) -> Path | None:
    """The same for those that keep ``k`` elements of each chunk."""
    return _path(device, "topk", "TopKPath", chunk, k)


def _path(device: str, codec: str, name: str, *form: Any) -> Path | None:
    """Return the kernels of this class, made for this form of blocks; None, and a warning, if they do not work."""
    modules = {"cpu": f"lsgd.kernels.cpu.{codec}", "cuda": "lsgd.kernels.cuda.few_bits"}
    if device not in modules:
        return None
    try:
        path: Path = getattr(importlib.import_module(modules[device]), name)(*form)
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "; pip install llvmlite" if isinstance(error, ImportError) and device == "cpu" else ""
        warn(device, f"{error}{remedy}")
        return None
    return path


@functools.cache
def warn(device: str, reason: str) -> None:
    """Log why there are no kernels, once."""
    _log.warning("codecs of few bits run in plain torch on %s, ten times slower: %s", device, reason)
