"""4 or 8 bits per element, between the least and the greatest element of a block.

This is the definition of ``minmax8``, which its kernels match bit by bit. A vector is cut into blocks. With lo and hi
the least and greatest element of a block, all in float32::

    unit = (hi - lo) / 255                    zero if that is below the least normal float32, 2**-126
    t    = (x - lo) * (1 / unit)              1 / unit is zero if unit is zero
    code = round(t)                           nearest, half to even; t is the exact product
    code = (round(t * 65536) + r) >> 16       stochastic: floor(t + r / 65536), r 16 random bits of the element
    decoded = lo + code * unit

Each operation is rounded once, to the nearest float32, except the exact product, which a fused multiply-add computes.
It keeps ``|decoded - x|`` within ``unit / 2 * (1 + 2**-15)`` plus two ulps of ``max |x|``; without it the error can be
larger. The bound needs a range of at least 255 * 2**-126; smaller ranges decode to lo. There are 256 codes and 255
units. A block with ``max(|lo|, |hi|) >= 2**126``, whose differences could overflow, is halved before and doubled after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lsgd.codecs.blocks import Blockwise, filled_rows
from lsgd.errors import ConfigError
from lsgd.kernels.arithmetic import BIG, BIG_UNIT, HALF_OF_MAX, LEVELS, SMALLEST_UNIT
from lsgd.lazy import Tensor, torch
from lsgd.payload import ALIGNMENT

UNITS: Final = 15
"""Those of minmax4."""


@dataclass(frozen=True)
class MinMaxBlocks(Blockwise):
    """Base of the codecs that send two float32 for each block, then a code for each element.

    ``block`` elements share one range of codes; 0: the whole vector.
    """

    bits: ClassVar[int]
    """Of a code."""

    block: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.block < 1 << 31:
            raise ConfigError(f"block = {self.block} is not in 0 … {(1 << 31) - 1}")

    @property
    def unit(self) -> int:
        """The elements of a block."""
        return self.block or 1

    @property
    def form(self) -> tuple[int, *tuple[float | None, ...]]:
        """The parameter."""
        return (self.block,)

    def width(self, numel: int) -> int:
        """Return ``block``; if that is 0, the whole vector."""
        return self.block or max(numel, 1)

    def sizes(self, numel: int) -> list[int]:
        """Eight bytes per block, and the codes."""
        return [8 * -(-numel // self.width(numel)), -(-numel * self.bits // 8)]


@dataclass(frozen=True)
class MinMax4(MinMaxBlocks):
    """Half a byte per element and eight bytes per block; rounds to nearest, half to even.

    After the header: for each block half of its least element and half of its unit, two float32; then the codes, the
    first of two in the low bits. Halving prevents overflow in differences. A block with NaN or Inf has NaN for both.
    """

    name: ClassVar[str] = "minmax4"
    family: ClassVar[str] = "minmax4"
    bits: ClassVar[int] = 4

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Choose the nearest code of each element."""
        scales, data = parts
        rows = filled_rows(x, self.width(x.numel())).mul_(0.5)
        lo, hi = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        # A division by a Python number is a multiplication by its inverse on some devices, so divide by a tensor.
        unit = (hi - lo) / torch.full_like(lo, UNITS)
        both = torch.where((hi - lo).isfinite(), torch.cat([lo, unit], 1) + 0.0, torch.nan)
        scales.view(torch.float32).copy_(both.view(-1))
        codes = torch.where(unit > 0, (rows - lo) / unit, 0.0).round_().nan_to_num_(0.0)
        pairs = torch.zeros(2 * data.numel(), dtype=torch.uint8, device=x.device)
        pairs[: x.numel()] = codes.clamp_(0, UNITS).view(-1)[: x.numel()]
        data.copy_(pairs[0::2] | pairs[1::2] << 4)

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return each code's value."""
        scales, data = parts
        lo, unit = scales.view(torch.float32).view(-1, 2).split(1, dim=1)  # type: ignore[no-untyped-call]
        codes = torch.zeros(lo.numel(), self.width(numel), device=data.device)
        codes.view(-1)[:numel] = torch.stack([data & 15, data >> 4], 1).view(-1)[:numel]
        value: Tensor = codes.mul_(unit).add_(lo)
        return value.clamp_(-HALF_OF_MAX, HALF_OF_MAX).mul_(2)


@dataclass(frozen=True)
class MinMax8(MinMaxBlocks):
    """One byte per element and eight per block.

    After the header: lo and unit of each block, two float32; then the codes. Zeros follow both, up to a multiple of 16
    bytes. A block with NaN or Inf has ``lo`` NaN, ``unit`` 0 and codes 0, so it decodes to NaN.
    """

    name: ClassVar[str] = "minmax8"
    family: ClassVar[str] = "minmax8"
    stochastic: ClassVar[bool] = True
    alignment: ClassVar[int] = ALIGNMENT
    bits: ClassVar[int] = 8

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Choose the nearest code of each element."""
        difference, inverse = self._begin_blocks(x, parts[0])
        exact = difference.to(torch.float64) * inverse.to(torch.float64)
        parts[1].copy_(exact.round_().clamp_(0, LEVELS).view(-1)[: x.numel()])

    def encode_at_random(self, x: Tensor, random: Tensor, *parts: Tensor) -> None:
        """Choose one of the two neighboring codes of each element."""
        difference, inverse = self._begin_blocks(x, parts[0])
        t = (difference * inverse).view(-1)[: x.numel()]
        fixed = (t * 65536.0).round_().to(torch.int32).clamp_(0, LEVELS << 16)
        parts[1].copy_((fixed + random) >> 16)

    def _begin_blocks(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Write the scales; return each element's distance from lo, and each block's 1 / unit or 0, halved if huge."""
        rows = filled_rows(x, self.width(x.numel()))
        lo, hi = rows.aminmax(dim=1, keepdim=True)  # NaN if the row has one
        lo, hi = lo + 0.0, hi + 0.0  # turns -0 into +0, so the bits do not depend on which was found first
        finite = lo.isfinite() & hi.isfinite()
        factor = torch.where(torch.maximum(lo.abs(), hi.abs()) >= BIG, 0.5, 1.0)
        # A division by a Python number is a multiplication by its inverse on some devices, so divide by a tensor.
        unit = (hi * factor - lo * factor) / torch.full_like(lo, LEVELS)
        usable = finite & (unit >= SMALLEST_UNIT)
        both = torch.cat([torch.where(finite, lo, torch.nan), torch.where(usable, unit / factor, 0.0)], 1)
        scales.view(torch.float32).copy_(both.view(-1))
        difference = torch.where(finite, rows * factor - lo * factor, 0.0)
        return difference, torch.where(usable, 1.0 / unit, 0.0)

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return each code's value."""
        lo, unit = parts[0].view(torch.float32).view(-1, 2).split(1, dim=1)  # type: ignore[no-untyped-call]
        codes = torch.zeros(lo.numel(), self.width(numel), device=lo.device)
        codes.view(-1)[:numel] = parts[1]
        factor = torch.where((lo.abs() >= BIG) | (unit >= BIG_UNIT), 0.5, 1.0)
        value = lo * factor + codes * (unit * factor)
        decoded: Tensor = torch.where(factor < 1.0, value.clamp(-HALF_OF_MAX, HALF_OF_MAX), value) / factor
        return decoded
