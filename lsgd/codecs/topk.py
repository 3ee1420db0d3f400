"""The largest elements of each chunk, in 14 bits each (as in SparseLoCo, arXiv 2508.15706)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lsgd.codecs import blocks
from lsgd.errors import ConfigError
from lsgd.lazy import Tensor, torch

CHUNK: Final = 4096


@dataclass(frozen=True)
class TopK(blocks.Blockwise):
    """The ``k`` elements of each 4,096 with the greatest magnitudes, as one of two levels and a sign; the others zero.

    Among equal magnitudes the first win. Magnitudes above the mean of all k are far, the others near, and each level is
    the mean of its group. After the header, each for all chunks: the two levels, near and far, as float32; the low 8
    bits of the indices; their high 4 bits, the first of two in the low half of a byte; the sign bits (1: negative); the
    level bits (1: far). A chunk's elements are in the order of their indices. A chunk with NaN or Inf has the near
    level NaN.
    ``k`` is a power of two in 8 … 2048.
    """

    name: ClassVar[str] = "topk"
    family: ClassVar[str] = "topk"
    sparse: ClassVar[bool] = True

    k: int = 64

    def __post_init__(self) -> None:
        if not 8 <= self.k <= CHUNK // 2 or self.k & (self.k - 1):
            raise ConfigError(f"{self}: k = {self.k} is not a power of two in 8 … {CHUNK // 2}")

    @property
    def unit(self) -> int:
        """The elements of a chunk."""
        return CHUNK

    def sizes(self, numel: int) -> list[int]:
        """8 bytes per chunk, and 14 bits per element kept."""
        kept = -(-numel // CHUNK) * self.k
        return [8 * -(-numel // CHUNK), kept, kept // 2, kept // 8, kept // 8]

    @property
    def form(self) -> tuple[int, *tuple[float | None, ...]]:
        """The elements of a chunk, and ``k``."""
        return CHUNK, self.k

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Choose the elements of each chunk, then their levels."""
        levels, low, high, signs, fars = parts
        rows = blocks.rows_of(x, CHUNK)
        # Distinct keys: the bits of a magnitude, above its distance from the chunk's end.
        distances = torch.arange(CHUNK - 1, -1, -1, device=rows.device)
        keys = ((rows.view(torch.int32) & 0x7FFFFFFF).to(torch.int64) << 12 | distances).topk(self.k).values
        index = (CHUNK - 1 - (keys & (CHUNK - 1))).sort(1).values
        kept = rows.gather(1, index)
        magnitudes = kept.abs().to(torch.float64)
        total, numbers = blocks.sums_of(magnitudes), blocks.counts_of(rows, x.numel()).clamp(max=self.k)
        far = magnitudes > (total / numbers)[:, None]
        far_total, far_numbers = blocks.sums_of(torch.where(far, magnitudes, 0.0)), far.sum(1)
        near_total = blocks.sums_of(torch.where(far, 0.0, magnitudes))
        means = torch.stack([near_total / (numbers - far_numbers), far_total / far_numbers.clamp(min=1)], 1)
        levels.view(torch.float32).copy_(torch.where(means.isfinite(), means, torch.nan).view(-1))
        low.copy_((index & 255).view(-1))
        pairs = (index >> 8).view(-1, 2)
        high.copy_(pairs[:, 0] | pairs[:, 1] << 4)
        blocks.write_bits(kept < 0, signs)
        blocks.write_bits(far, fars)

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return the levels in their places, and zeros elsewhere."""
        levels, low, high, signs, fars = parts
        near, far = levels.view(torch.float32).view(-1, 2).split(1, dim=1)  # type: ignore[no-untyped-call]
        index = torch.stack([high & 15, high >> 4], 1).view(-1, self.k).to(torch.int64) << 8
        index |= low.view(-1, self.k)
        value = torch.where(blocks.read_bits(fars, self.k), far, near)
        value = torch.where(blocks.read_bits(signs, self.k), -value, value)
        rows: Tensor = (near * 0.0).repeat(1, CHUNK)
        return rows.scatter_(1, index, value)
