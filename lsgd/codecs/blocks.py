"""The base of the low-bit codecs: blocks, sums in a fixed order, 16-bit scales, and bits packed in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lsgd.codecs.base import Codec, flags_of, kernels
from lsgd.errors import ConfigError
from lsgd.lazy import Tensor, torch
from lsgd.payload import FLAGS_OFFSET, HEADER_NBYTES

PIECE: Final = 1 << 15

MAX_SCALE: Final = 2.0**127
"""The largest scale, so that a level of up to 1.99 times the scale is finite."""

_NAN: Final = 0x7FC0
_GATHER: Final = 0x0102040810204080  # times eight bytes of 0 or 1 puts their bits, in order, in the highest byte
_SPREAD: Final = 0x8040201008040201 - (1 << 64)  # bit i of byte i


@dataclass(frozen=True)
class Blockwise(Codec):
    """Base of the codecs whose payload has several parts, in each of which every block has bytes of its own.

    Kernels (:mod:`lsgd.kernels.few_bits`) process what they can, with the same bytes as the methods here.
    """

    family: ClassVar[str]
    """Which kernels of :mod:`lsgd.kernels.few_bits` process it."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the header and all parts."""
        return HEADER_NBYTES + sum(self.sizes(numel))

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Write the parts of each block."""
        numel = x.numel()
        parts = self.begin_unflagged(payload, x).split_with_sizes(self.sizes(numel))
        path, taken = self._path(x.device, numel)
        if path is not None:
            path.encode(x[:taken].to(torch.float32), parts, flags_of(payload))
        if taken < numel:
            payload[FLAGS_OFFSET] |= ~x[taken:].isfinite().all()
        for here, *pieces in self._pieces(taken, numel, x.device, parts):
            self.encode_blocks(x[here].to(torch.float32), *pieces)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the vector to ``out``."""
        self._decode(payload, out, None)

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the vector to ``out`` in one pass."""
        self._decode(payload, out, alpha)

    def _decode(self, payload: Tensor, out: Tensor, alpha: float | None) -> None:
        numel = out.numel()
        parts = self.body(payload, numel).split_with_sizes(self.sizes(numel))
        path, taken = self._path(out.device, numel if out.dtype == torch.float32 else 0)
        if path is not None:
            path.decode(parts, out[:taken], alpha)
        for here, *pieces in self._pieces(taken, numel, out.device, parts):
            piece = out[here]
            value = self.decode_blocks(piece.numel(), *pieces).view(-1)[: piece.numel()]
            if alpha is not None:
                value = piece.to(torch.promote_types(out.dtype, torch.float32)) + value * alpha
            piece.copy_(value)

    def _path(self, device: torch.device, numel: int) -> tuple[kernels.few_bits.Path | None, int]:
        """Return the kernels for a device, if any, and how many of ``numel`` elements they process."""
        path = kernels.few_bits.path(device.type, self.family, self.unit, *self.form) if numel else None
        return path, 0 if path is None else path.takes(numel)

    def _pieces(
        self, start: int, stop: int, device: torch.device, parts: Sequence[Tensor]
    ) -> Iterator[tuple[slice, *tuple[Tensor, ...]]]:
        """Yield the elements, and the bytes of the parts, to work on at a time: on a CPU, what fits into its cache."""
        whole = math.lcm(self.unit, 8)  # so that every part has whole bytes
        cut = device.type == "cpu" and self.width(stop) == self.unit
        step = max(PIECE // whole, 1) * whole if cut else max(stop - start, 1)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            sizes = zip(parts, self.sizes(first), self.sizes(last), strict=True)
            yield slice(first, last), *(part[begin:end] for part, begin, end in sizes)

    # ---- for each codec --------------------------------------------------------------------------------------

    def width(self, numel: int) -> int:
        """Return the elements per block in a vector of ``numel`` elements."""
        return self.unit

    def sizes(self, numel: int) -> list[int]:
        """Return the bytes of each part; needs no torch."""
        raise NotImplementedError

    @property
    def form(self) -> tuple[float | None, ...]:
        """What the kernels depend on besides :attr:`unit`."""
        return ()

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Write the parts of ``x``, float32, whose last block may be shorter."""
        raise NotImplementedError

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return ``numel`` elements, float32, in rows or not; more may follow."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScaledBlocks(Blockwise):
    """Base of the codecs that send a bfloat16 scale per block, then one or two planes of bits.

    An element becomes plus or minus ``near`` times its block's scale or, beyond ``threshold`` times the block's root
    mean square, ``far`` times it.

    Args:
        scale_block: elements that share a scale; a power of two, 8 … 65536.
    """

    family: ClassVar[str] = "levels"
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

    def sizes(self, numel: int) -> list[int]:
        """Two bytes a block, and one or two bits an element."""
        planes = 1 if self.threshold is None else 2
        return [2 * -(-numel // self.scale_block)] + [-(-numel // 8)] * planes

    @property
    def form(self) -> tuple[float | None, ...]:
        """The levels."""
        return self.near, self.far, self.threshold

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Choose each element's level by the root mean square of its block, then the scale."""
        scales, signs, *fars = parts
        rows = rows_of(x, self.scale_block)
        magnitudes = rows.abs().to(torch.float64)
        counts = counts_of(rows, x.numel())
        # The scale with the least square error for these levels; exact if all magnitudes are equal.
        products, squares = sums_of(magnitudes) * self.near, counts * self.near**2
        if self.threshold is not None:
            rms = (sums_of(magnitudes.square()) / counts).sqrt()
            far = rows.abs() > (rms * self.threshold).to(torch.float32)[:, None]
            products += sums_of(torch.where(far, magnitudes, 0.0)) * (self.far - self.near)
            squares += far.sum(1).to(torch.float64) * (self.far**2 - self.near**2)
            write_bits(far, fars[0])
        write_scales(products / squares, scales)
        write_bits(rows < 0, signs)

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return each element's level."""
        scales, signs, *fars = parts
        scale = scales.view(torch.bfloat16).to(torch.float32)[:, None]
        value = scale * self.near
        for plane in fars:
            value = torch.where(read_bits(plane, self.scale_block), scale * self.far, value)
        return torch.where(read_bits(signs, self.scale_block), -value, value)


def rows_of(x: Tensor, width: int) -> Tensor:
    """Return ``x`` in rows, shape (blocks, width), padded with zeros."""
    blocks = -(-x.numel() // width)
    return torch.nn.functional.pad(x, (0, blocks * width - x.numel())).view(blocks, width)


def counts_of(rows: Tensor, numel: int) -> Tensor:
    """Return how many of ``numel`` elements each row holds, float64, shape (blocks,)."""
    blocks, width = rows.shape
    starts = torch.arange(blocks, dtype=torch.float64, device=rows.device) * width
    return (numel - starts).clamp(max=width)


def sums_of(rows: Tensor) -> Tensor:
    """Return the sum of each row, whose length is a power of two; added in halves, so bit-identical on all devices."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def write_scales(scales: Tensor, out: Tensor) -> None:
    """Write float64 scales as bfloat16 to ``out``, uint8; NaN for non-finite ones."""
    out.view(torch.bfloat16).copy_(scales.clamp(max=MAX_SCALE).to(torch.float32))
    out.view(torch.int16).masked_fill_(~scales.isfinite(), _NAN)  # devices write different NaNs


def write_bits(bits: Tensor, out: Tensor) -> None:
    """Write the first ``8 * out.numel()`` of ``bits``, bool, to ``out``: element i is bit i mod 8 of byte i // 8."""
    eights = bits.reshape(-1).view(torch.int64)[: out.numel()]
    out.copy_((eights * _GATHER) >> 56 & 0xFF)


def read_bits(data: Tensor, width: int) -> Tensor:
    """Return the bits in ``data`` as bool, shape (blocks, width); those after the end are undefined."""
    blocks = -(-8 * data.numel() // width)
    bits = torch.empty(blocks * width, dtype=torch.bool, device=data.device)
    eights = (data.to(torch.int64) * 0x0101010101010101 & _SPREAD).view(torch.uint8)
    torch.ne(eights, 0, out=bits[: 8 * data.numel()])
    return bits.view(blocks, width)
