"""The low-bit codecs on CUDA: launches the kernels of few_bits.cu.

They produce the same bytes as the codecs do in torch, including those of a shorter last block.
"""

from __future__ import annotations

import functools
import pathlib
import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

from torch import Tensor

from lsgd.kernels.cuda.path import CupyLaunch, Launch
from lsgd.kernels.few_bits import Path

SOURCE: Final = pathlib.Path(__file__).with_name("few_bits.cu")
THREADS: Final = 256  # topk's kernels are written for this number
WARPS: Final = THREADS // 32

_Kernel: TypeAlias = tuple[str, tuple[int | float, ...]]


@functools.cache
def cupy_launch() -> Launch:
    """Return the launcher of the kernels; raises like :class:`~lsgd.kernels.cuda.path.CupyLaunch`."""
    return CupyLaunch(SOURCE.read_text())


class _BlockPath(Path):
    """Launches the kernels of a codec.

    Args:
        encoder: the kernel, and its arguments besides arrays and their length.
        decoder: the same for decoding.
        elements: elements per thread block.
        launch: how to launch kernels; by default with CuPy.
    """

    def __init__(self, encoder: _Kernel, decoder: _Kernel, elements: int, launch: Launch | None) -> None:
        self._encoder, self._decoder = encoder, decoder
        self._elements = elements
        self._launch = cupy_launch() if launch is None else launch

    def takes(self, numel: int) -> int:
        """Return ``numel``."""
        return numel

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write the parts of ``x``."""
        kernel, form = self._encoder
        self._run(kernel, x, (x.data_ptr(), *self._arrays(parts), flags.data_ptr(), x.numel(), *form))

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        kernel, form = self._decoder
        added = (0.0, 0) if alpha is None else (float(alpha), 1)
        self._run(kernel, out, (*self._arrays(parts), out.data_ptr(), out.numel(), *form, *added))

    def _arrays(self, parts: Sequence[Tensor]) -> list[int]:
        return [part.data_ptr() for part in parts]

    def _run(self, kernel: str, values: Tensor, arguments: Sequence[int | float]) -> None:
        self._launch(values.device, kernel, -(-values.numel() // self._elements), THREADS, arguments)


class LevelsPath(_BlockPath):
    """The kernels for one block size and these levels; see :class:`lsgd.codecs.blocks.ScaledBlocks`."""

    def __init__(
        self, block: int, near: float, far: float, threshold: float | None, launch: Launch | None = None
    ) -> None:
        steps = (threshold or 0.0, near, far - near, near**2, far**2 - near**2)
        constants = struct.unpack("<5q", struct.pack("<5d", *steps))
        encoder = f"encode_levels{1 if threshold is None else 2}_{block}"
        super().__init__((encoder, constants), ("decode_levels", (block, near, far)), WARPS * block, launch)

    def _arrays(self, parts: Sequence[Tensor]) -> list[int]:
        """Return the addresses of scales, signs and fars; 0 for a missing part."""
        return [*super()._arrays(parts), 0][:3]


class MinMax4Path(_BlockPath):
    """The kernels for one block size."""

    def __init__(self, block: int, launch: Launch | None = None) -> None:
        super().__init__(("encode_minmax4", (block,)), ("decode_minmax4", (block,)), WARPS * block, launch)


class TopKPath(_BlockPath):
    """The kernels for chunks of 4,096 and one ``k``, a power of two from 8 to half a chunk."""

    def __init__(self, chunk: int, k: int, launch: Launch | None = None) -> None:
        super().__init__(("encode_topk", (k,)), ("decode_topk", (k,)), chunk, launch)
