"""1 or 2 bits per element: a sign and one of one or two levels, times the block's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from lsgd.codecs import blocks
from lsgd.errors import ConfigError
from lsgd.lazy import Tensor, torch

MAX_SCALE: Final = 2.0**127
"""The largest scale, so that a level of up to 1.99 times the scale is finite."""

_NAN: Final = 0x7FC0


@dataclass(frozen=True)
class ScaledBlocks(blocks.Blockwise):
    """Base of the codecs that send a bfloat16 scale per block, then one or two planes of bits.

    An element becomes plus or minus ``near`` times its block's scale or, beyond ``threshold`` times the block's root
    mean square, ``far`` times it.
    ``block``, the elements that share a scale, is a power of two in 8 … 65536.
    """

    family: ClassVar[str] = "levels"
    former_names: ClassVar[Mapping[str, str]] = {"scale_block": "block"}
    near: ClassVar[float] = 1.0
    far: ClassVar[float] = 0.0
    threshold: ClassVar[float | None] = None

    block: int = 512

    def __post_init__(self) -> None:
        if not 8 <= self.block <= 1 << 16 or self.block & (self.block - 1):
            raise ConfigError(f"{self}: block = {self.block} is not a power of two in 8 … 65536")

    @property
    def unit(self) -> int:
        """The elements of a block."""
        return self.block

    def sizes(self, numel: int) -> list[int]:
        """Two bytes a block, and one or two bits an element."""
        planes = 1 if self.threshold is None else 2
        return [2 * -(-numel // self.block)] + [-(-numel // 8)] * planes

    @property
    def form(self) -> tuple[int, *tuple[float | None, ...]]:
        """The elements of a block, and the levels."""
        return self.block, self.near, self.far, self.threshold

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Choose each element's level by the root mean square of its block, then the scale."""
        scales, signs, *fars = parts
        rows = blocks.rows_of(x, self.block)
        magnitudes = rows.abs().to(torch.float64)
        counts = blocks.counts_of(rows, x.numel())
        # The scale with the least square error for these levels; exact if all magnitudes are equal.
        products, squares = blocks.sums_of(magnitudes) * self.near, counts * self.near**2
        if self.threshold is not None:
            rms = (blocks.sums_of(magnitudes.square()) / counts).sqrt()
            far = rows.abs() > (rms * self.threshold).to(torch.float32)[:, None]
            products += blocks.sums_of(torch.where(far, magnitudes, 0.0)) * (self.far - self.near)
            squares += far.sum(1).to(torch.float64) * (self.far**2 - self.near**2)
            blocks.write_bits(far, fars[0])
        write_scales(products / squares, scales)
        blocks.write_bits(rows < 0, signs)

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return each element's level."""
        scales, signs, *fars = parts
        scale = scales.view(torch.bfloat16).to(torch.float32)[:, None]
        value = scale * self.near
        for plane in fars:
            value = torch.where(blocks.read_bits(plane, self.block), scale * self.far, value)
        return torch.where(blocks.read_bits(signs, self.block), -value, value)


@dataclass(frozen=True)
class Levels1(ScaledBlocks):
    """The sign times the block's mean magnitude (Karimireddy et al., arXiv 1901.09847).

    After the header: a bfloat16 scale per block, then the sign bits (1: negative). A block with NaN or Inf has the
    scale NaN.
    """

    name: ClassVar[str] = "levels1"


@dataclass(frozen=True)
class Levels2(ScaledBlocks):
    """±0.4528 or ±1.5104 times the block's scale.

    After the header: a bfloat16 scale per block, the sign bits (1: negative), and the level bits (1: far). A block with
    NaN or Inf has the scale NaN. docs/concepts/formulas.md has the arithmetic.
    """

    name: ClassVar[str] = "levels2"

    block: int = 64  # 512 would save a tenth of the bytes, and costs learning (benchmarks/results/convergence.md)

    # The quantizer with the least mean square error for a normal distribution (Lloyd, Max; IRE Trans. IT-6, 1960).
    near: ClassVar[float] = 0.4528
    far: ClassVar[float] = 1.5104
    threshold: ClassVar[float | None] = 0.9816


def write_scales(scales: Tensor, out: Tensor) -> None:
    """Write float64 scales as bfloat16 to ``out``, uint8; NaN for non-finite ones."""
    out.view(torch.bfloat16).copy_(scales.clamp(max=MAX_SCALE).to(torch.float32))
    out.view(torch.int16).masked_fill_(~scales.isfinite(), _NAN)  # devices write different NaNs
