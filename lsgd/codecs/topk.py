"""The largest elements of each chunk, with 14 bits each (as in SparseLoCo, arXiv 2508.15706)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from lsgd.codecs import blocks
from lsgd.codecs.base import Codec, flags_of
from lsgd.errors import ConfigError
from lsgd.lazy import torch
from lsgd.payload import FLAGS_OFFSET, HEADER_NBYTES

if TYPE_CHECKING:
    from torch import Tensor

    from lsgd.kernels.cpu.topk import TopKPath

CHUNK: Final = 4096


@dataclass(frozen=True)
class TopK(Codec):
    """The ``k`` elements of each 4,096 with the greatest magnitudes, as one of two levels and a sign; the others zero.

    Of equal magnitudes the first are taken. Those above the mean of the k magnitudes are far, and each level is the
    mean of its own. After the header, each for all chunks: the two levels, near and far, as float32; the low 8 bits of
    the indices; their high 4 bits, the first of two in the low half of a byte; the bits of the signs (1: below zero);
    those of the levels (1: far). The elements of a chunk are in the order of their indices. A chunk with NaN or Inf has
    a near level of NaN. On a CPU, whole chunks go through kernels (:mod:`lsgd.kernels.cpu.topk`), which make the same
    bytes as the methods here.

    Args:
        k: elements kept of a chunk; a power of two, 8 … 2048.
    """

    name: ClassVar[str] = "topk"

    sparse: ClassVar[bool] = True

    k: int = 64

    def __post_init__(self) -> None:
        if not 8 <= self.k <= CHUNK // 2 or self.k & (self.k - 1):
            raise ConfigError(f"{self}: k = {self.k} is not a power of two in 8 … {CHUNK // 2}")

    @property
    def unit(self) -> int:
        """The elements of a chunk."""
        return CHUNK

    def nbytes(self, numel: int) -> int:
        """8 bytes a chunk, and 14 bits for each element that is kept."""
        return HEADER_NBYTES + sum(self._sizes(numel))

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Choose the elements of each chunk, then their levels."""
        numel = x.numel()
        parts = self.begin_unflagged(payload, x).split_with_sizes(self._sizes(numel))
        path, whole = self._path(x.device, numel)
        flags_of(payload).zero_()
        if path is not None:
            path.encode(x[:whole].to(torch.float32), parts, flags_of(payload))
        if whole < numel:
            payload[FLAGS_OFFSET] |= ~x[whole:].isfinite().all()
            self._encode_rows(blocks.rows_of(x[whole:], CHUNK), numel - whole, *self._after(whole, parts))

    def _encode_rows(
        self, rows: Tensor, numel: int, levels: Tensor, low: Tensor, high: Tensor, signs: Tensor, fars: Tensor
    ) -> None:
        # Keys that differ: the bits of a magnitude, above its distance from the end.
        distances = torch.arange(CHUNK - 1, -1, -1, device=rows.device)
        keys = ((rows.view(torch.int32) & 0x7FFFFFFF).to(torch.int64) << 12 | distances).topk(self.k).values
        index = (CHUNK - 1 - (keys & (CHUNK - 1))).sort(1).values
        kept = rows.gather(1, index)
        magnitudes = kept.abs().to(torch.float64)
        total, numbers = blocks.sums_of(magnitudes), blocks.counts_of(rows, numel).clamp(max=self.k)
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

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the levels where they belong, and zeros elsewhere."""
        self._decode(payload, out, None)

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the vector to ``out`` in one pass."""
        self._decode(payload, out, alpha)

    def _decode(self, payload: Tensor, out: Tensor, alpha: float | None) -> None:
        numel = out.numel()
        parts = self.body(payload, numel).split_with_sizes(self._sizes(numel))
        path, whole = self._path(out.device, numel if out.dtype == torch.float32 else 0)
        if path is not None:
            path.decode(parts, out[:whole], alpha)
        if whole < numel:
            rows = self._decode_rows(*self._after(whole, parts))
            blocks.put(rows.view(-1)[: numel - whole], out[whole:], alpha)

    def _decode_rows(self, levels: Tensor, low: Tensor, high: Tensor, signs: Tensor, fars: Tensor) -> Tensor:
        near, far = levels.view(torch.float32).view(-1, 2).split(1, dim=1)  # type: ignore[no-untyped-call]
        index = torch.stack([high & 15, high >> 4], 1).view(-1, self.k).to(torch.int64) << 8
        index |= low.view(-1, self.k)
        value = torch.where(blocks.read_bits(fars, self.k), far, near)
        value = torch.where(blocks.read_bits(signs, self.k), -value, value)
        rows: Tensor = (near * 0.0).repeat(1, CHUNK)
        return rows.scatter_(1, index, value)

    def _path(self, device: torch.device, numel: int) -> tuple[TopKPath | None, int]:
        """Return the kernels for a device, if there are any, and how many of ``numel`` elements they take."""
        if device.type != "cpu" or numel < CHUNK:
            return None, 0
        from lsgd.kernels.cpu.few_bits import topk_path

        path = topk_path(CHUNK, self.k)
        return path, 0 if path is None else numel // CHUNK * CHUNK

    def _after(self, numel: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return what is in the parts of a payload for the elements after ``numel``, whole chunks."""
        return [part[size:] for part, size in zip(parts, self._sizes(numel), strict=True)]

    def _sizes(self, numel: int) -> list[int]:
        kept = -(-numel // CHUNK) * self.k
        return [8 * -(-numel // CHUNK), kept, kept // 2, kept // 8, kept // 8]
