"""The codecs of few bits on CUDA: how the kernels of few_bits.cu are launched.

They make, byte by byte, what the codecs make in torch. A shorter block at the end is theirs, too.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from lsgd.kernels.cuda.path import CupyLaunch, Launch
from lsgd.kernels.few_bits import Levels

SOURCE: Final = Path(__file__).with_name("few_bits.cu")
THREADS: Final = 256  # topk's kernels are written for so many
WARPS: Final = THREADS // 32


@functools.cache
def cupy_launch() -> Launch:
    """Return the launcher of the kernels; raises as :class:`~lsgd.kernels.cuda.path.CupyLaunch` does."""
    return CupyLaunch(SOURCE.read_text())


class _BlockPath:
    """Launches the kernels of a codec (a few_bits.Path).

    Args:
        block: elements of a block.
        together: blocks that a thread block works on.
        launch: how kernels are started.
    """

    def __init__(self, block: int, together: int, launch: Launch | None) -> None:
        self._block = block
        self._elements = block * together
        self._launch = cupy_launch() if launch is None else launch

    def takes(self, numel: int) -> int:
        """Return ``numel``."""
        return numel

    def _run(self, kernel: str, values: Tensor, arguments: Sequence[int | float]) -> None:
        self._launch(values.device, kernel, -(-values.numel() // self._elements), THREADS, arguments)


class LevelsPath(_BlockPath):
    """The kernels for blocks of one size, one of :data:`lsgd.kernels.few_bits.LEVELS_BLOCKS`."""

    def __init__(self, levels: Levels, block: int, launch: Launch | None = None) -> None:
        super().__init__(block, WARPS, launch)
        self._levels = levels
        near, far = levels.near, levels.far
        steps = (levels.threshold or 0.0, near, far - near, near**2, far**2 - near**2)
        self._constants = struct.unpack("<5q", struct.pack("<5d", *steps))
        self._encoder = f"encode_levels{1 if levels.threshold is None else 2}_{block}"

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write what ``x`` becomes."""
        arrays = (x.data_ptr(), *_three(parts), flags.data_ptr())
        self._run(self._encoder, x, (*arrays, x.numel(), *self._constants))

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        where = (*_three(parts), out.data_ptr(), out.numel(), self._block)
        self._run("decode_levels", out, (*where, self._levels.near, self._levels.far, *_added(alpha)))


class MinMax4Path(_BlockPath):
    """The kernels for blocks of one size, one of :data:`lsgd.kernels.few_bits.MINMAX_BLOCKS`."""

    def __init__(self, block: int, launch: Launch | None = None) -> None:
        super().__init__(block, WARPS, launch)

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write what ``x`` becomes."""
        arrays = (x.data_ptr(), *_addresses(parts), flags.data_ptr())
        self._run("encode_minmax4", x, (*arrays, x.numel(), self._block))

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        where = (*_addresses(parts), out.data_ptr(), out.numel(), self._block)
        self._run("decode_minmax4", out, (*where, *_added(alpha)))


class TopKPath(_BlockPath):
    """The kernels for one ``k``, a power of two from 8 to half a chunk, and chunks of 4,096."""

    def __init__(self, chunk: int, k: int, launch: Launch | None = None) -> None:
        super().__init__(chunk, 1, launch)
        self._k = k

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write what ``x`` becomes."""
        self._run("encode_topk", x, (x.data_ptr(), *_addresses(parts), flags.data_ptr(), x.numel(), self._k))

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        where = (*_addresses(parts), out.data_ptr(), out.numel(), self._k)
        self._run("decode_topk", out, (*where, *_added(alpha)))


def _addresses(parts: Sequence[Tensor]) -> list[int]:
    return [part.data_ptr() for part in parts]


def _three(parts: Sequence[Tensor]) -> list[int]:
    """Return the addresses of scales, signs and fars; 0 for what is missing."""
    return [*_addresses(parts), 0][:3]


def _added(alpha: float | None) -> tuple[float, int]:
    """Return the factor, and whether to add."""
    return (0.0, 0) if alpha is None else (float(alpha), 1)
