"""The kernels of the low-bit codecs, compiled at first use, on the devices that have any."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Container, Mapping, Sequence
from typing import Final, Protocol

from torch import Tensor

LEVELS_BLOCKS: Final = tuple(1 << i for i in range(6, 12))
"""Block sizes of the levels codecs that have kernels; larger ones would need too much straight-line code."""

_KERNELS: Final[Mapping[str, tuple[str, Container[int]]]] = {
    "levels": ("LevelsPath", LEVELS_BLOCKS),
    "minmax4": ("MinMax4Path", range(64, (1 << 15) + 1, 64)),
    "topk": ("TopKPath", (4096,)),
}
"""The class of each family's kernels, and the block sizes that it supports."""

_log = logging.getLogger(__name__)


class Path(Protocol):
    """The kernels of one codec on one device.

    ``parts`` are a payload's parts after its header, uint8. ``flags`` is int32; a non-finite element sets it to 1.
    Vectors are contiguous float32.
    """

    def takes(self, numel: int) -> int:
        """Return how many of ``numel`` elements, from the first, the kernels process: whole blocks, or all."""

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write the parts of ``x``."""

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""


@functools.cache
def path(device: str, family: str, block: int, *form: float | None) -> Path | None:
    """Return a family's kernels for one block size and form; None if there are none, with a warning if they fail."""
    modules = {"cpu": f"lsgd.kernels.cpu.{family}", "cuda": "lsgd.kernels.cuda.few_bits"}
    name, blocks = _KERNELS[family]
    if device not in modules or block not in blocks:
        return None
    try:
        made: Path = getattr(importlib.import_module(modules[device]), name)(block, *form)
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "; pip install llvmlite" if isinstance(error, ImportError) and device == "cpu" else ""
        _warn(device, f"{error}{remedy}")
        return None
    return made


@functools.cache
def _warn(device: str, reason: str) -> None:
    """Log once why there are no kernels."""
    _log.warning("low-bit codecs run in plain torch on %s, ten times slower: %s", device, reason)
