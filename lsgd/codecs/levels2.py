"""2 bits per element: a sign, and one of two levels times the block's scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lsgd.codecs.blocks import ScaledBlocks


@dataclass(frozen=True)
class Levels2(ScaledBlocks):
    """±0.4528 or ±1.5104 times the block's scale.

    After the header: a bfloat16 scale per block, the sign bits (1: negative), and the level bits (1: far). A block with
    NaN or Inf has the scale NaN. docs/concepts/formulas.md has the arithmetic.

    Args:
        scale_block: elements that share a scale; a power of two, 8 … 65536.
    """

    name: ClassVar[str] = "levels2"

    # The quantizer with the least mean square error for a normal distribution (Lloyd, Max; IRE Trans. IT-6, 1960).
    near: ClassVar[float] = 0.4528
    far: ClassVar[float] = 1.5104
    threshold: ClassVar[float | None] = 0.9816
