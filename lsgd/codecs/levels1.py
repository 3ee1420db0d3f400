"""1 bit per element: its sign, times the block's mean magnitude (Karimireddy et al., arXiv 1901.09847)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lsgd.codecs.blocks import ScaledBlocks


@dataclass(frozen=True)
class Levels1(ScaledBlocks):
    """The sign times the block's mean magnitude.

    After the header: a bfloat16 scale per block, then the sign bits (1: negative). A block with NaN or Inf has the
    scale NaN.

    Args:
        scale_block: elements that share a scale; a power of two, 8 … 65536.
    """

    name: ClassVar[str] = "levels1"
