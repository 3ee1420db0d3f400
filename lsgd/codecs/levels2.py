"""2 bits an element: a sign, and one of two levels times the scale of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lsgd.codecs.blocks import ScaledBlocks


@dataclass(frozen=True)
class Levels2(ScaledBlocks):
    """±0.4528 or ±1.5104 times a block's scale.

    After the header: a bfloat16 for each block, the bits of the signs (1: below zero), those of the levels (1: far).
    A block with NaN or Inf has the scale NaN. docs/algorithms.md has the arithmetic.

    Args:
        scale_block: elements that share a scale; a power of two, 8 … 65536.
    """

    name: ClassVar[str] = "levels2"

    # The quantizer of a normal distribution with the least mean square error (Lloyd, Max; IRE Trans. IT-6, 1960).
    near: ClassVar[float] = 0.4528
    far: ClassVar[float] = 1.5104
    threshold: ClassVar[float | None] = 0.9816
