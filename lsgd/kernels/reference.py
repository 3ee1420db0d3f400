"""The 8-bit min-max quantizer in plain torch, on any device: the definition that the fast paths match bit by bit.

A vector is cut into blocks. With lo and hi the least and greatest element of a block, all in float32::

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

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from lsgd.kernels import philox
from lsgd.kernels.layout import Layout, Quantized
from lsgd.payload import FLAG_NONFINITE, FLAGS_OFFSET, HEADER_NBYTES

LEVELS: Final = 255
SMALLEST_UNIT: Final = 2.0**-126
BIG: Final = 2.0**126
BIG_UNIT: Final = 2.0**118
HALF_OF_MAX: Final = torch.finfo(torch.float32).max / 2


def _block_scales(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit, 1 / unit of the scaled block (or 0), and the scaling factor 1 or 0.5; all float32, lo's shape."""
    factor = torch.where(torch.maximum(lo.abs(), hi.abs()) >= BIG, 0.5, 1.0)
    # A division by a Python number is a multiplication by its inverse on some devices, so divide by a tensor.
    unit = (hi * factor - lo * factor) / torch.full_like(lo, LEVELS)
    usable = unit >= SMALLEST_UNIT
    inverse = torch.where(usable, 1.0 / unit, 0.0)
    return torch.where(usable, unit / factor, 0.0), inverse, factor


def _encode(x: Tensor, first: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Quantize rows, each of them a block.

    Args:
        x: float32, shape (rows, block).
        first: Index in the vector of the first element of the first row.
        seed: Key of stochastic rounding; None: nearest.

    Returns:
        Scales, float32 of shape (rows, 2), and codes, uint8 of x's shape.
    """
    lo, hi = torch.aminmax(x, dim=1)  # NaN if the row has one
    lo, hi = lo + 0.0, hi + 0.0  # turns -0 into +0, so the bits do not depend on which was found first
    finite = lo.isfinite() & hi.isfinite()
    unit, inverse, factor = _block_scales(lo, hi)
    difference = x * factor[:, None] - (lo * factor)[:, None]
    difference = torch.where(finite[:, None], difference, 0.0)
    if seed is None:
        codes = (difference.to(torch.float64) * inverse[:, None].to(torch.float64)).round().to(torch.int32)
    else:
        random = philox.dither(first, first + x.numel(), seed, x.device).view(x.shape)
        t = difference * inverse[:, None]
        codes = ((t * 65536.0).round().to(torch.int32).clamp(0, LEVELS << 16) + random) >> 16
    scales = torch.stack([torch.where(finite, lo, torch.nan), torch.where(finite, unit, 0.0)], dim=1)
    return scales, codes.clamp(0, LEVELS).to(torch.uint8)


def _decode(codes: Tensor, lo: Tensor, unit: Tensor) -> Tensor:
    """Return lo + codes * unit in float32; lo and unit of shape (rows, 1) or scalars, codes (rows, block)."""
    factor = torch.where((lo.abs() >= BIG) | (unit >= BIG_UNIT), 0.5, 1.0)
    value = lo * factor + codes.to(torch.float32) * (unit * factor)
    return torch.where(factor < 1.0, value.clamp(-HALF_OF_MAX, HALF_OF_MAX), value) / factor


def _rows(layout: Layout) -> Iterator[tuple[slice, slice]]:
    """Yield the places of all whole blocks and of their elements, then those of a shorter last block."""
    blocks = layout.numel // layout.block_numel
    whole = blocks * layout.block_numel
    if blocks:
        yield slice(0, blocks), slice(0, whole)
    if blocks < layout.blocks:
        yield slice(blocks, layout.blocks), slice(whole, layout.numel)


def decode(q: Quantized) -> Tensor:
    """Return the decoded vector, float32 of shape (numel,)."""
    scales, codes = q.layout.scales(q.payload), q.layout.codes(q.payload)
    out = torch.empty(q.numel, dtype=torch.float32, device=q.payload.device)
    for blocks, elements in _rows(q.layout):
        lo, unit = scales[blocks].unbind(1)
        out[elements] = _decode(codes[elements].view(len(lo), -1), lo[:, None], unit[:, None]).view(-1)
    return out


class ReferencePath:
    """Every operation in plain torch; the other paths derive from it and override what they do faster.

    :mod:`lsgd.kernels.dispatch` describes the arguments, and has checked them.
    """

    name = "reference"

    def quantize(self, x: Tensor, layout: Layout, payload: Tensor, seed: int | None) -> None:
        """Write the payload of x (contiguous, layout.numel elements); seed None: nearest, else stochastic."""
        values = x.reshape(-1).to(torch.float32)
        payload.zero_()
        header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        payload[:HEADER_NBYTES].copy_(header)
        scales, codes = layout.scales(payload), layout.codes(payload)
        for blocks, elements in _rows(layout):
            rows = values[elements].view(len(scales[blocks]), -1)
            scales[blocks], found = _encode(rows, elements.start, seed)
            codes[elements] = found.view(-1)
        payload[FLAGS_OFFSET] = scales[:, 0].isnan().any() * FLAG_NONFINITE

    def dequantize(self, q: Quantized, out: Tensor) -> None:
        """Write the decoded vector to out (contiguous, q.numel elements)."""
        out.view(-1).copy_(decode(q))

    def dequantize_add(self, q: Quantized, out: Tensor, alpha: float) -> None:
        """Add alpha times the decoded vector to out, computed in float32."""
        flat = out.view(-1)
        # Not add_(..., alpha=alpha), which fuses the two roundings into one.
        flat.copy_(flat.to(torch.float32) + decode(q) * alpha)

    def dequantize_reduce(self, qs: Sequence[Quantized], out: Tensor, weight: float) -> None:
        """Write weight times the sum of the decoded vectors, added in the given order, to float32 out."""
        total = decode(qs[0])
        for q in qs[1:]:
            total += decode(q)
        out.view(-1).copy_(total * weight)

    def dequantize_reduce_quantize(
        self, qs: Sequence[Quantized], weight: float, layout: Layout, payload: Tensor, seed: int | None
    ) -> None:
        """Write the payload of weight times the sum of the decoded vectors."""
        total = torch.empty(layout.numel, dtype=torch.float32, device=payload.device)
        self.dequantize_reduce(qs, total, weight)
        self.quantize(total, layout, payload, seed)
