"""4 bits an element, between the least and the greatest of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from lsgd.codecs.base import Codec
from lsgd.errors import ConfigError
from lsgd.lazy import torch
from lsgd.payload import HEADER_NBYTES

if TYPE_CHECKING:
    from torch import Tensor

UNITS: Final = 15


@dataclass(frozen=True)
class MinMax4(Codec):
    """Half a byte an element and eight bytes a block; rounds to nearest, half to even.

    After the header: for each block half of its least element and half of its unit, two float32; then the codes, the
    first of two in the low bits. Halves, so that no difference overflows. A block with NaN or Inf has NaN for both.

    Args:
        block: elements that share one range of codes; 0: the whole vector.
    """

    name: ClassVar[str] = "minmax4"

    block: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.block < 1 << 31:
            raise ConfigError(f"{self}: block = {self.block} is not in 0 … {(1 << 31) - 1}")

    @property
    def unit(self) -> int:
        """The elements of a block."""
        return self.block or 1

    def nbytes(self, numel: int) -> int:
        """Half a byte an element, eight a block."""
        return HEADER_NBYTES + 8 * self._blocks(numel) + -(-numel // 2)

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Choose the nearest code of each element."""
        body, numel, count = self.begin(payload, x), x.numel(), self._blocks(x.numel())
        if not numel:
            return
        rows = x.new_empty(count, self.block or numel, dtype=torch.float32)
        flat = rows.view(-1)
        flat[:numel] = x
        flat[:numel] *= 0.5
        flat[numel:] = flat[numel - 1]
        lo, hi = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        # A division by a Python number is a multiplication by its inverse on some devices, so divide by a tensor.
        unit = (hi - lo) / torch.full_like(lo, UNITS)
        scales = torch.where((hi - lo).isfinite(), torch.cat([lo, unit], 1) + 0.0, torch.nan)
        body[: 8 * count].view(torch.float32).copy_(scales.view(-1))
        codes = torch.where(unit > 0, (rows - lo) / unit, 0.0).round_().nan_to_num_(0.0)
        pairs = torch.zeros(-(-numel // 2) * 2, dtype=torch.uint8, device=x.device)
        pairs[:numel] = codes.clamp_(0, UNITS).view(-1)[:numel]
        body[8 * count :] = pairs[0::2] | pairs[1::2] << 4

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the value of each code."""
        body, numel, count = self.body(payload, out.numel()), out.numel(), self._blocks(out.numel())
        scales = body[: 8 * count].view(torch.float32).view(count, 2)
        data = body[8 * count :]
        codes = torch.zeros(count, self.block or numel, device=out.device)
        pairs = torch.stack([data & 15, data >> 4], 1).view(-1)
        codes.view(-1)[:numel] = pairs[:numel]
        value = codes.mul_(scales[:, 1:]).add_(scales[:, :1])
        most = torch.finfo(torch.float32).max / 2
        out.copy_(value.clamp_(-most, most).mul_(2).view(-1)[:numel])

    def _blocks(self, numel: int) -> int:
        return -(-numel // (self.block or max(numel, 1)))
