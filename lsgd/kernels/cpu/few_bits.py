"""The kernels for codecs of few bits, compiled at first use; none where llvmlite or the processor does not do."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from lsgd.kernels.cpu.levels import LevelsPath
    from lsgd.kernels.cpu.topk import TopKPath

BLOCKS: Final = range(64, 2049)
"""Sizes of blocks of levels for which there is a kernel; larger ones would be too much straight code."""

_log = logging.getLogger(__name__)
_Path = TypeVar("_Path")


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
def levels_path(levels: Levels, block: int) -> LevelsPath | None:
    """Return the kernels for blocks of this size, a power of two; None if there are none for it, or none work here."""

    def make() -> LevelsPath:
        from lsgd.kernels.cpu.levels import LevelsPath

        return LevelsPath(levels, block)

    return _if_usable(make) if block in BLOCKS else None


@functools.cache
def topk_path(chunk: int, k: int) -> TopKPath | None:
    """Return the kernels that keep ``k`` elements of each chunk; None if none work here."""

    def make() -> TopKPath:
        from lsgd.kernels.cpu.topk import TopKPath

        return TopKPath(chunk, k)

    return _if_usable(make)


def _if_usable(make: Callable[[], _Path]) -> _Path | None:
    try:
        return make()
    except (ImportError, OSError, RuntimeError) as error:
        warn(f"{error}; pip install llvmlite" if isinstance(error, ImportError) else str(error))
        return None


@functools.cache
def warn(reason: str) -> None:
    """Log why there are no kernels, once."""
    _log.warning("codecs of few bits run in plain torch on the CPU, ten times slower: %s", reason)
