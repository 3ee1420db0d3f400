"""float32 unchanged, and float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lsgd.codecs.base import Codec
from lsgd.lazy import Tensor, torch
from lsgd.payload import HEADER_NBYTES


@dataclass(frozen=True)
class Float32(Codec):
    """float32, unchanged."""

    name: ClassVar[str] = "none"
    lossless: ClassVar[bool] = True

    def nbytes(self, numel: int) -> int:
        """Four bytes per element."""
        return HEADER_NBYTES + 4 * numel

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Copy the elements."""
        self.begin(payload, x).view(torch.float32).copy_(x)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Copy the elements."""
        out.copy_(self.body(payload, out.numel()).view(torch.float32))


@dataclass(frozen=True)
class Float16(Codec):
    """float16: magnitudes above 65,504 count as infinite, those below 6e-8 become zero."""

    name: ClassVar[str] = "float16"

    def nbytes(self, numel: int) -> int:
        """Two bytes per element."""
        return HEADER_NBYTES + 2 * numel

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Round each element to the nearest float16."""
        half = x.to(torch.float16)
        self.begin(payload, half).view(torch.float16).copy_(half)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Widen each element; infinite ones become NaN."""
        half = self.body(payload, out.numel()).view(torch.float16)
        out.copy_(torch.where(half.isfinite(), half, torch.nan))
