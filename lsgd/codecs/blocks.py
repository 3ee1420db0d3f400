"""The base of the codecs in blocks: parts, pieces and kernels; sums in a fixed order, and bits packed in bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lsgd.codecs.base import Codec, check_vector
from lsgd.errors import ConfigError
from lsgd.kernels import Kernels, Sum, kernels_for
from lsgd.kernels.arithmetic import dither
from lsgd.lazy import Tensor, torch
from lsgd.payload import FLAGS_OFFSET, HEADER_NBYTES

PIECE: Final = 1 << 15
"""Elements that torch processes at a time on a CPU: its temporaries fit into a core's cache."""

KERNELS_PIECE: Final = 1 << 18
"""Elements on which one kernel after the other works, on all cores: the next one finds them in the cache."""

DEVICE_PIECE: Final = 1 << 24
"""Elements that are processed at a time on other devices, where torch's temporaries take about 25 bytes for each."""

_GATHER: Final = 0x0102040810204080  # times eight bytes of 0 or 1 puts their bits, in order, in the highest byte
_SPREAD: Final = 0x8040201008040201 - (1 << 64)  # bit i of byte i


@dataclass(frozen=True)
class Blockwise(Codec):
    """Base of the codecs whose payload has several parts, in each of which every block has bytes of its own.

    Kernels (:mod:`lsgd.kernels`) process what they can, with the same bytes as the methods here.
    """

    family: ClassVar[str]
    """Which kernels process it."""

    alignment: ClassVar[int] = 1
    """Each part is followed by zeros up to a multiple of this many bytes."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the header and all parts."""
        return HEADER_NBYTES + sum(size + -size % self.alignment for size in self.sizes(numel))

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Write the parts of each block."""
        check_vector(x)
        header, *parts = self._begin_parts(payload, x.numel(), x.dtype)
        self._encode(x.detach(), header, parts, self._key(seed))

    def encode_and_subtract(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Write the parts of each block, and leave what rounding lost."""
        if self._key(seed) is not None:
            super().encode_and_subtract(x, payload, seed)
            return
        check_vector(x)
        x = x.detach()
        header, *parts = self._begin_parts(payload, x.numel(), x.dtype)
        for here, *pieces in self._pieces(0, x.numel(), x.device, parts, KERNELS_PIECE):
            self._encode(x[here], header, pieces, None)
            self._decode(pieces, x[here], -1.0)

    def _encode(self, x: Tensor, header: Tensor, parts: Sequence[Tensor], seed: int | None) -> None:
        """Write the parts of a vector, and set the header's flag if it has NaN or Inf."""
        numel = x.numel()
        kernels, taken = self._kernels(x.device, numel)
        if kernels is not None:
            values = x[:taken] if taken < numel else x
            values = values if kernels.narrow else values.to(torch.float32)
            kernels.encode(values, header, parts, seed)
        for here, *pieces in self._pieces(taken, numel, x.device, parts) if taken < numel else ():
            header[FLAGS_OFFSET] |= ~x[here].isfinite().all()
            values = x[here].to(torch.float32)
            if seed is None:
                self.encode_blocks(values, *pieces)
            else:
                self.encode_at_random(values, dither(here.start, here.stop, seed, x.device), *pieces)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the vector to ``out``."""
        check_vector(out)
        parts = self._parts(payload, out.numel())
        if self._fits_kernels(out):
            self._decode(parts, out.detach(), None)
        else:
            part = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
            self._decode(parts, part, None)
            out.copy_(part)

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the vector to ``out`` in one pass."""
        if self._fits_kernels(out):
            check_vector(out)
            self._decode(self._parts(payload, out.numel()), out.detach(), alpha)
        else:
            super().decode_add(payload, out, alpha)

    def _decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None) -> None:
        """Write the vector that has these parts to ``out``, or add ``alpha`` times it."""
        numel = out.numel()
        kernels, taken = self._kernels(out.device, numel)
        if kernels is not None:
            kernels.decode(parts, out[:taken] if taken < numel else out, alpha)
        for here, *pieces in self._pieces(taken, numel, out.device, parts) if taken < numel else ():
            piece = out[here]
            value = self.decode_blocks(piece.numel(), *pieces).view(-1)[: piece.numel()]
            if alpha is not None:
                value = piece.to(torch.promote_types(out.dtype, torch.float32)) + value * alpha
            piece.copy_(value)

    def reduce(self, payloads: Sequence[Tensor], out: Tensor, *, mean: bool) -> None:
        """Write the sum or mean of vectors, in one pass if the kernels can."""
        kernels, taken = self._kernels(out.device, out.numel())
        check_vector(out)
        if out.dtype != torch.float32:
            super().reduce(payloads, out, mean=mean)
        elif kernels is not None and kernels.reduces:
            kernels.reduce(self._sum(payloads, taken, mean=mean), out)
        else:
            for here, vectors in self._side_by_side(payloads, out.numel()):
                self._add_up(vectors, out[here], mean=mean)

    def means(self, payloads: Sequence[Tensor], numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mean of vectors in pieces, which share their memory where possible."""
        device = payloads[0].device
        kernels, _ = self._kernels(device, numel)
        if not numel or not self._is_cut(numel) or (kernels is not None and kernels.reduces):
            yield from super().means(payloads, numel)
            return
        room = None
        for here, vectors in self._side_by_side(payloads, numel):
            if room is None:  # the first piece is the longest
                room = torch.empty(here.stop, dtype=torch.float32, device=device)
            out = room[: here.stop - here.start]
            self._add_up(vectors, out, mean=True)
            yield here, out

    def _side_by_side(
        self, payloads: Sequence[Tensor], numel: int
    ) -> Iterator[tuple[slice, Sequence[Sequence[Tensor]]]]:
        """Yield the elements to work on at a time, and their parts in each payload."""
        device = payloads[0].device
        cut = (self._pieces(0, numel, device, self._parts(each, numel), KERNELS_PIECE) for each in payloads)
        for vectors in zip(*cut, strict=True):
            yield vectors[0][0], [parts for _, *parts in vectors]

    def _add_up(self, vectors: Sequence[Sequence[Tensor]], out: Tensor, *, mean: bool) -> None:
        """Write the sum or mean of vectors that have these parts."""
        for parts in vectors:
            self._decode(parts, out, None if parts is vectors[0] else 1.0)
        if mean and len(vectors) > 1:
            out.mul_(1.0 / len(vectors))

    def reduce_encode(
        self, payloads: Sequence[Tensor], payload: Tensor, *, numel: int, mean: bool, seed: int | None = None
    ) -> None:
        """Write the payload of the sum or mean of vectors, in one pass if the kernels can."""
        kernels, _ = self._kernels(payload.device, numel)
        if kernels is None or not kernels.reduces:
            super().reduce_encode(payloads, payload, numel=numel, mean=mean, seed=seed)
        else:
            total = self._sum(payloads, numel, mean=mean)
            header, *parts = self._begin_parts(payload, numel, torch.float32)
            kernels.reduce_encode(total, header, parts, self._key(seed))

    def _key(self, seed: int | None) -> int | None:
        """Return the key of stochastic rounding; None: nearest."""
        if seed is not None and not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed must be in 0 … 2**64 - 1, but is {seed}")
        return seed if self.stochastic else None

    def kernels_on(self, device: torch.device) -> Kernels | None:
        """Return the kernels for a device, if there are any."""
        return kernels_for(device, self.family, *self.form)

    def _kernels(self, device: torch.device, numel: int) -> tuple[Kernels | None, int]:
        """Return the kernels for a device, if any, and how many of ``numel`` elements they process."""
        kernels = self.kernels_on(device) if numel else None
        return kernels, 0 if kernels is None else kernels.takes(numel)

    def _fits_kernels(self, out: Tensor) -> bool:
        """Return whether the kernels, if there are any, write vectors of this dtype."""
        if out.dtype == torch.float32:
            return True
        kernels = self.kernels_on(out.device)
        return kernels is None or (kernels.narrow and out.dtype != torch.float64)

    def _begin_parts(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Write the header, with a clear flag, and the zeros after the parts; return the header and the parts."""
        header = self.header_for(payload, numel, dtype)
        pieces, gaps = self._split(payload, numel)
        pieces[0].copy_(header)
        for gap in gaps:
            gap.zero_()
        return pieces

    def _parts(self, payload: Tensor, numel: int) -> Sequence[Tensor]:
        """Check a payload of ``numel`` elements and return its parts."""
        self.check(payload, numel)
        return self._split(payload, numel)[0][1:]

    def _sum(self, payloads: Sequence[Tensor], numel: int, *, mean: bool) -> Sum:
        """Check payloads of ``numel`` elements, and return what the kernels need to add them up."""
        for payload in payloads:
            self.check(payload, numel)
        sizes = (size + -size % self.alignment for size in self.sizes(numel)[:-1])
        places = list(itertools.accumulate(sizes, initial=HEADER_NBYTES))
        return Sum(payloads, places, numel, 1.0 / len(payloads) if mean else 1.0)

    def _split(self, payload: Tensor, numel: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the header and the parts of a payload, and what is between them."""
        sizes = [HEADER_NBYTES, *self.sizes(numel)]
        if self.alignment == 1 or not any(size % self.alignment for size in sizes):
            return payload.split_with_sizes(sizes), ()
        with_gaps = [nbytes for size in sizes for nbytes in (size, -size % self.alignment)]
        pieces = payload.split_with_sizes(with_gaps)
        return pieces[::2], pieces[1::2]

    def _pieces(
        self, start: int, stop: int, device: torch.device, parts: Sequence[Tensor], most: int = PIECE
    ) -> Iterator[tuple[slice, *tuple[Tensor, ...]]]:
        """Yield the elements, about as many as fit, and the bytes of the parts, to work on at a time."""
        most = most if device.type == "cpu" else DEVICE_PIECE
        whole = math.lcm(self.unit, 8)  # so that every part has whole bytes
        step = max(most // whole, 1) * whole if self._is_cut(stop) else max(stop - start, 1)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            sizes = zip(parts, self.sizes(first), self.sizes(last), strict=True)
            yield slice(first, last), *(part[begin:end] for part, begin, end in sizes)

    def _is_cut(self, numel: int) -> bool:
        """Whether to process a vector in pieces: its blocks do not depend on the rest."""
        return self.width(numel) == self.unit

    # ---- for each codec --------------------------------------------------------------------------------------

    def width(self, numel: int) -> int:
        """Return the elements per block in a vector of ``numel`` elements."""
        return self.unit

    def sizes(self, numel: int) -> list[int]:
        """Return the bytes of each part; needs no torch."""
        raise NotImplementedError

    @property
    def form(self) -> tuple[int, *tuple[float | None, ...]]:
        """What the kernels depend on: the elements of a block, then what the family defines."""
        return (self.unit,)

    def encode_blocks(self, x: Tensor, *parts: Tensor) -> None:
        """Write the parts of ``x``, float32, whose last block may be shorter."""
        raise NotImplementedError

    def encode_at_random(self, x: Tensor, random: Tensor, *parts: Tensor) -> None:
        """Do the same, rounding without bias by 16 random bits for each element, int32; only if ``stochastic``."""
        raise NotImplementedError

    def decode_blocks(self, numel: int, *parts: Tensor) -> Tensor:
        """Return ``numel`` elements, float32, in rows or not; more may follow."""
        raise NotImplementedError


def rows_of(x: Tensor, width: int) -> Tensor:
    """Return ``x`` in rows, shape (blocks, width), padded with zeros."""
    blocks = -(-x.numel() // width)
    return torch.nn.functional.pad(x, (0, blocks * width - x.numel())).view(blocks, width)


def filled_rows(x: Tensor, width: int) -> Tensor:
    """Return ``x`` in rows, shape (blocks, width); what the last one lacks is its last element."""
    numel, blocks = x.numel(), -(-x.numel() // width)
    rows = x.new_empty(blocks, width)
    flat = rows.view(-1)
    flat[:numel] = x
    flat[numel:] = flat[numel - 1]
    return rows


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
