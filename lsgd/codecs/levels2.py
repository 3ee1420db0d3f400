"""2 bits an element: a sign, and one of two levels times the scale of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lsgd.codecs import blocks
from lsgd.lazy import Tensor, torch

NEAR: Final = 0.4528
FAR: Final = 1.5104
THRESHOLD: Final = 0.9816
"""The quantizer of a normal distribution with the least mean square error (Lloyd, Max; IRE Trans. IT-6, 1960)."""


@dataclass(frozen=True)
class Levels2(blocks.ScaledBlocks):
    """±0.4528 or ±1.5104 times a block's scale.

    After the header: a bfloat16 for each block, the bits of the signs (1: below zero), those of the levels (1: far).
    A block with NaN or Inf has the scale NaN. docs/algorithms.md has the arithmetic.

    Args:
        scale_block: elements that share a scale; a power of two, 8 … 65536.
    """

    name: ClassVar[str] = "levels2"

    near: ClassVar[float] = NEAR
    far: ClassVar[float] = FAR
    threshold: ClassVar[float | None] = THRESHOLD

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Choose the level of each element by the root mean square of its block, then the scale."""
        scales, signs, fars = parts
        rows = blocks.rows_of(x, self.scale_block)
        magnitudes = rows.abs().to(torch.float64)
        counts = blocks.counts_of(rows, x.numel())
        rms = (blocks.sums_of(magnitudes.square()) / counts).sqrt()
        far = rows.abs() > (rms * THRESHOLD).to(torch.float32)[:, None]
        # The scale with the least square error for these levels: close to rms, but exact where all are alike.
        far_sums = blocks.sums_of(torch.where(far, magnitudes, 0.0))
        products = blocks.sums_of(magnitudes) * NEAR + far_sums * (FAR - NEAR)
        squares = counts * NEAR**2 + far.sum(1).to(torch.float64) * (FAR**2 - NEAR**2)
        blocks.write_scales(products / squares, scales)
        blocks.write_bits(rows < 0, signs)
        blocks.write_bits(far, fars)
