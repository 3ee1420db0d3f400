"""What codecs of few bits share: blocks of a vector, sums in a fixed order, scales in 16 bits, and bits in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from lsgd.codecs.base import Codec, flags_of
from lsgd.errors import ConfigError
from lsgd.lazy import torch
from lsgd.payload import FLAGS_OFFSET, HEADER_NBYTES

if TYPE_CHECKING:
    from torch import Tensor

    from lsgd.kernels.cpu.levels import LevelsPath

PIECE: Final = 1 << 15

MAX_SCALE: Final = 2.0**127
"""Scales are at most this, so that a level of up to 1.99 times the scale is finite."""

_NAN: Final = 0x7FC0
_GATHER: Final = 0x0102040810204080  # times eight bytes of 0 or 1: their bits, in order, in the highest byte
_SPREAD: Final = 0x8040201008040201 - (1 << 64)  # bit i of byte i


@dataclass(frozen=True)
class ScaledBlocks(Codec):
    """Base of the codecs that send a bfloat16 scale for each block, and then one or two planes of bits.

    An element becomes plus or minus ``near`` times its block's scale or, beyond ``threshold`` times the block's root
    mean square, ``far`` times it. On a CPU, whole blocks go through kernels (:mod:`lsgd.kernels.cpu.levels`), which
    make the same bytes as the methods here.

    Args:
        scale_block: elements that share a scale; a power of two, 8 … 65536.
    """

    near: ClassVar[float] = 1.0
    far: ClassVar[float] = 0.0
    threshold: ClassVar[float | None] = None

    scale_block: int = 512

    def __post_init__(self) -> None:
        if not 8 <= self.scale_block <= 1 << 16 or self.scale_block & (self.scale_block - 1):
            raise ConfigError(f"{self}: scale_block = {self.scale_block} is not a power of two in 8 … 65536")

    @property
    def unit(self) -> int:
        """The elements of a block."""
        return self.scale_block

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the header, the scales and the planes."""
        return HEADER_NBYTES + sum(self._sizes(numel))

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Choose each block's scale, and each element's sign and level."""
        numel = x.numel()
        scales, *planes = self.begin_unflagged(payload, x).split_with_sizes(self._sizes(numel))
        path, whole = self._path(x.device, numel)
        flags_of(payload).zero_()
        if path is not None:
            path.encode(x[:whole].to(torch.float32), scales, planes[0], planes[-1], flags_of(payload))
        if whole < numel:
            payload[FLAGS_OFFSET] |= ~x[whole:].isfinite().all()
        for here, block, bits in _pieces(whole, numel, self.scale_block, x.device):
            self.encode_rows(
                rows_of(x[here], self.scale_block), len(x[here]), scales[block], *(p[bits] for p in planes)
            )

    def encode_rows(self, rows: Tensor, numel: int, scales: Tensor, *planes: Tensor) -> None:
        """Write the scales and bits of ``rows``, float32, shape (blocks, scale_block), with ``numel`` elements."""
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write each element's level."""
        self._decode(payload, out, None)

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the vector to ``out`` in one pass."""
        self._decode(payload, out, alpha)

    def _decode(self, payload: Tensor, out: Tensor, alpha: float | None) -> None:
        numel, block = out.numel(), self.scale_block
        scales, *planes = self.body(payload, numel).split_with_sizes(self._sizes(numel))
        path, whole = self._path(out.device, numel if out.dtype == torch.float32 else 0)
        if path is not None:
            path.decode(scales, planes[0], planes[-1], out[:whole], alpha)
        if whole < numel:
            value = self._read(scales[2 * (whole // block) :], *(plane[whole // 8 :] for plane in planes))
            put(value.view(-1)[: numel - whole], out[whole:], alpha)

    def _read(self, scales: Tensor, signs: Tensor, fars: Tensor | None = None) -> Tensor:
        """Return the elements of blocks, float32, shape (blocks, scale_block)."""
        scale = read_scales(scales)
        value = scale * self.near
        if fars is not None:
            value = torch.where(read_bits(fars, self.scale_block), scale * self.far, value)
        return torch.where(read_bits(signs, self.scale_block), -value, value)

    def _path(self, device: torch.device, numel: int) -> tuple[LevelsPath | None, int]:
        """Return the kernels for a device, if there are any, and how many of ``numel`` elements they take."""
        if device.type != "cpu" or numel < self.scale_block:
            return None, 0
        from lsgd.kernels.cpu.few_bits import Levels, levels_path

        path = levels_path(Levels(self.near, self.far, self.threshold), self.scale_block)
        return path, 0 if path is None else numel // self.scale_block * self.scale_block

    def _sizes(self, numel: int) -> list[int]:
        planes = 1 if self.threshold is None else 2
        return [2 * -(-numel // self.scale_block)] + [bits_nbytes(numel)] * planes


def _pieces(start: int, stop: int, scale_block: int, device: torch.device) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the elements, bytes of scales and bytes of bits to work on at a time: on a CPU, what its cache holds."""
    step = max(PIECE if device.type == "cpu" else stop, scale_block)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        scales = slice(2 * (first // scale_block), 2 * -(-last // scale_block))
        yield slice(first, last), scales, slice(first // 8, -(-last // 8))


def rows_of(x: Tensor, width: int) -> Tensor:
    """Return ``x`` in float32, shape (blocks, width), with zeros after its end."""
    blocks = -(-x.numel() // width)
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, blocks * width - x.numel()))
    return padded.view(blocks, width)


def counts_of(rows: Tensor, numel: int) -> Tensor:
    """Return how many of the ``numel`` elements each row holds, float64, shape (blocks,)."""
    blocks, width = rows.shape
    starts = torch.arange(blocks, dtype=torch.float64, device=rows.device) * width
    return (numel - starts).clamp(max=width)


def sums_of(rows: Tensor) -> Tensor:
    """Return the sum of each row, whose length is a power of two; added in halves, so equal on every device."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def put(value: Tensor, out: Tensor, alpha: float | None) -> None:
    """Write ``value``, float32, to ``out``, or add ``alpha`` times it in float32 or wider."""
    if alpha is not None:
        value = out.to(torch.promote_types(out.dtype, torch.float32)) + value * alpha
    out.copy_(value)


def write_scales(scales: Tensor, out: Tensor) -> None:
    """Write float64 scales as bfloat16 to ``out``, uint8; NaN for those that are not finite."""
    out.view(torch.bfloat16).copy_(scales.clamp(max=MAX_SCALE).to(torch.float32))
    out.view(torch.int16).masked_fill_(~scales.isfinite(), _NAN)  # devices differ in the NaN that they write


def read_scales(data: Tensor) -> Tensor:
    """Return the scales in ``data``, float32, shape (blocks, 1)."""
    return data.view(torch.bfloat16).to(torch.float32)[:, None]


def bits_nbytes(numel: int) -> int:
    """Return the bytes of one bit for each element."""
    return -(-numel // 8)


def write_bits(bits: Tensor, out: Tensor) -> None:
    """Write the first ``8 * out.numel()`` of ``bits``, bool, to ``out``: element i is bit i mod 8 of byte i // 8."""
    eights = bits.reshape(-1).view(torch.int64)[: out.numel()]
    out.copy_((eights * _GATHER) >> 56 & 0xFF)


def read_bits(data: Tensor, width: int) -> Tensor:
    """Return the bits in ``data`` as bool, shape (blocks, width), with undefined ones after the end."""
    blocks = -(-8 * data.numel() // width)
    bits = torch.empty(blocks * width, dtype=torch.bool, device=data.device)
    eights = (data.to(torch.int64) * 0x0101010101010101 & _SPREAD).view(torch.uint8)
    torch.ne(eights, 0, out=bits[: 8 * data.numel()])
    return bits.view(blocks, width)
