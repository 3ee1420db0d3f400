"""4 bits per element, between the least and the greatest element of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lsgd.codecs.blocks import Blockwise
from lsgd.errors import ConfigError
from lsgd.lazy import Tensor, torch

UNITS: Final = 15


@dataclass(frozen=True)
class MinMax4(Blockwise):
    """Half a byte per element and eight bytes per block; rounds to nearest, half to even.

    After the header: for each block half of its least element and half of its unit, two float32; then the codes, the
    first of two in the low bits. Halving prevents overflow in differences. A block with NaN or Inf has NaN for both.

    Args:
        block: elements that share one range of codes; 0: the whole vector.
    """

    name: ClassVar[str] = "minmax4"
    family: ClassVar[str] = "minmax4"

    block: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.block < 1 << 31:
            raise ConfigError(f"{self}: block = {self.block} is not in 0 … {(1 << 31) - 1}")

    @property
    def unit(self) -> int:
        """The elements of a block."""
        return self.block or 1

    def width(self, numel: int) -> int:
        """Return ``block``; if that is 0, the whole vector."""
        return self.block or max(numel, 1)

    def sizes(self, numel: int) -> list[int]:
        """Eight bytes per block, half a byte per element."""
        return [8 * -(-numel // self.width(numel)), -(-numel // 2)]

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Choose the nearest code of each element."""
        scales, data = parts
        numel, width = x.numel(), self.width(x.numel())
        rows = x.new_empty(scales.numel() // 8, width)
        flat = rows.view(-1)
        torch.mul(x, 0.5, out=flat[:numel])
        flat[numel:] = flat[numel - 1]
        lo, hi = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        # A division by a Python number is a multiplication by its inverse on some devices, so divide by a tensor.
        unit = (hi - lo) / torch.full_like(lo, UNITS)
        both = torch.where((hi - lo).isfinite(), torch.cat([lo, unit], 1) + 0.0, torch.nan)
        scales.view(torch.float32).copy_(both.view(-1))
        codes = torch.where(unit > 0, (rows - lo) / unit, 0.0).round_().nan_to_num_(0.0)
        pairs = torch.zeros(2 * data.numel(), dtype=torch.uint8, device=x.device)
        pairs[:numel] = codes.clamp_(0, UNITS).view(-1)[:numel]
        data.copy_(pairs[0::2] | pairs[1::2] << 4)

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return each code's value."""
        scales, data = parts
        lo, unit = scales.view(torch.float32).view(-1, 2).split(1, dim=1)  # type: ignore[no-untyped-call]
        codes = torch.zeros(lo.numel(), self.width(numel), device=data.device)
        codes.view(-1)[:numel] = torch.stack([data & 15, data >> 4], 1).view(-1)[:numel]
        value: Tensor = codes.mul_(unit).add_(lo)
        most = torch.finfo(torch.float32).max / 2
        return value.clamp_(-most, most).mul_(2)
