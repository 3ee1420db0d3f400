"""The innermost loops of minmax8 on CPUs: each processes one tile, a run of elements that fits into the L1 cache.

The arithmetic is that of :mod:`lsgd.codecs.minmax`, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from llvmlite import ir

from lsgd.kernels.arithmetic import BIG, BIG_UNIT, HALF_OF_MAX, KEY_STEPS, LANES, LEVELS, MULTIPLIERS, ROUNDS
from lsgd.kernels.cpu.ir import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    Kernel,
    Value,
    Variable,
    bfloat16_bits,
    kernel,
    vector,
)

WIDTH: Final = 64
NEAR_ELEMENTS: Final = 1024  # prefetch distance in a pass that only reads,
FAR_ELEMENTS: Final = 4096  # and in the pass that writes codes, which leaves the memory idle
COMBINE: Final = (Value.minimum, Value.maximum, Value.__add__)  # combine lo, hi and bad of two states

_ROUND: Final = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits of a float32
_ROUND_BITS: Final = 0x4B400000


def _spans(kernel: Kernel, n: Value, width: int, body: Callable[[Value, int], None]) -> None:
    """Emit body(index, width) for the whole vectors of 0..n, then body(index, 1) for the rest."""
    whole = n & -width
    with kernel.loop(0, whole, width) as index:
        body(index, width)
    with kernel.loop(whole, n) as index:
        body(index, 1)


class Tiles:
    """The tile kernels of one LLVM module, each emitted on first use."""

    def __init__(self, module: ir.Module) -> None:
        self.module = module

    @kernel(POINTER, I64, POINTER)
    def minmax(self, k: Kernel, values: Value, n: Value, state: Value) -> None:
        """Update state's lo and hi with n float32; any NaN or Inf makes state[2] NaN."""
        carried = [Variable(k.load(state, F32, i)) for i in range(3)]

        def take(seen: list[Variable], x: Value) -> None:
            lo, hi, bad = seen
            lo.set(x.minimum(lo.get()))
            hi.set(x.maximum(hi.get()))
            bad.set(bad.get() + (x - x))

        width = 32
        with k.branch(n.compare(">=", width)):
            wide = [Variable(v.get().splat(width)) for v in carried]
            with k.loop(0, n & -width, width) as index:
                self._prefetch(k, values, index, width)
                take(wide, k.load(values, F32, index, width))
            for total, lanes, combine in zip(carried, wide, COMBINE, strict=True):
                total.set(lanes.get().reduce(combine))
        with k.loop(n & -width, n) as index:
            take(carried, k.load(values, F32, index))
        for i, variable in enumerate(carried):
            k.store(variable.get(), state, i)

    def _prefetch(self, k: Kernel, values: Value, index: Value, width: int) -> None:
        """Prefetch float32 ahead of the current vector; addresses past the end do no harm."""
        for line in range(0, width - 1, 16):
            k.prefetch(k.offset(values, F32, index + (NEAR_ELEMENTS + line)))

    @kernel(POINTER, I64)
    def zero(self, k: Kernel, codes: Value, n: Value) -> None:
        """Write n zeros."""
        _spans(k, n, WIDTH, lambda i, w: k.store(k.constant(0, I8, w), codes, i))

    @kernel(POINTER, I64, I64, I64)
    def dither(self, k: Kernel, out: Value, call: Value, count: Value, seed: Value) -> None:
        """Write count * 64 random uint16, the lanes of Philox calls from ``call`` on."""
        mask, calls = 0xFFFFFFFF, WIDTH // LANES
        keys = [(seed & mask), (seed >> 32)]
        schedule = [[(keys[j] + r * KEY_STEPS[j]) & mask for j in (0, 1)] for r in range(ROUNDS)]
        lanes = Value(k, ir.Constant(vector(I64, calls), list(range(calls))))
        with k.loop(0, count) as index:
            counter = (call + index * calls).splat(calls) + lanes
            zero = k.constant(0, I64, calls)
            # Each 64-bit lane carries a 32-bit word; its upper bits do not matter.
            words = [counter, counter >> 32, zero, zero]
            for key in schedule:
                product0 = (words[0] & mask) * MULTIPLIERS[0]
                product1 = (words[2] & mask) * MULTIPLIERS[1]
                words = [
                    (product1 >> 32) ^ words[1] ^ key[0],
                    product1,
                    (product0 >> 32) ^ words[3] ^ key[1],
                    product0,
                ]
            # Not shifts: LLVM would fold them into the multiplications, as full 64-bit ones, which are slow.
            halves = [word.convert("bitcast", I32, 2 * calls) for word in words]
            pairs = [lane for even in range(0, 2 * calls, 2) for lane in (even, even + 2 * calls)]
            low, high = (halves[j].shuffle(pairs, halves[j + 1]).convert("bitcast", I64, calls) for j in (0, 2))
            order = [lane + calls * part for lane in range(calls) for part in (0, 1)]
            k.store(low.shuffle(order, high), out, index * (WIDTH // 4))

    @kernel(POINTER, I64, POINTER, POINTER, POINTER, POINTER)
    def encode(self, k: Kernel, *arguments: Value, stochastic: bool, stride: int) -> None:
        """(values, n, constants, codes, dither, origin): write n codes.

        The constants are lo * factor, 1 / unit and factor. This pass leaves the memory idle, so it prefetches later
        elements of the source; they have ``stride`` bytes, and the tile's first one is at ``origin``.
        """
        values, n, constants, codes, dither, origin = arguments
        lo, inverse, factor = (k.load(constants, F32, i) for i in range(3))

        def body(index: Value, width: int) -> None:
            for line in range(0, width - 1 if stride else 0, 16):
                k.prefetch(k.offset(origin, I8, (index + (FAR_ELEMENTS + line)) * stride))
            x = k.load(values, F32, index, width)
            difference = x * factor - lo
            if stochastic:
                random = k.load(dither, I16, index, width).convert("zext", I32)
                code = ((difference * inverse * 65536.0).rounded().clamp(0, LEVELS << 16) + random) >> 16
            else:
                code = (difference.fused_multiply_add(inverse, _ROUND).convert("bitcast", I32) - _ROUND_BITS).clamp(
                    0, LEVELS
                )
            k.store(code.convert("trunc", I8), codes, index)

        _spans(k, n, WIDTH, body)

    @kernel(POINTER, I64, F32, F32, POINTER, F32)
    def decode(self, k: Kernel, *arguments: Value, add: bool, stream: bool = False) -> None:
        """(codes, n, lo, unit, out, alpha): set n float32 to the decoded values, or add alpha times them."""
        codes, n, lo, unit, out, alpha = arguments

        def emit(index: Value, width: int, factor: float) -> None:
            code = k.load(codes, I8, index, width).convert("zext", I32).convert("sitofp", F32)
            value = (lo * factor).splat(width) + code * (unit * factor)
            if factor < 1.0:
                value = value.clamp(-HALF_OF_MAX, HALF_OF_MAX) * (1.0 / factor)
            if add:
                self._prefetch(k, out, index, width)
                value = k.load(out, F32, index, width) + value * alpha
            k.store(value, out, index, stream=stream and factor == 1.0 and width > 1)

        big = lo.magnitude().compare(">=", BIG) | unit.compare(">=", BIG_UNIT)
        with k.either(big) as (then, otherwise):
            with then:
                _spans(k, n, WIDTH, partial(emit, factor=0.5))
            with otherwise:
                _spans(k, n, WIDTH, partial(emit, factor=1.0))

    @kernel(POINTER, I64, F32)
    def scale(self, k: Kernel, values: Value, n: Value, weight: Value) -> None:
        """Multiply n float32 in place."""
        _spans(k, n, WIDTH, lambda i, w: k.store(k.load(values, F32, i, w) * weight, values, i))

    @kernel(POINTER, I64, POINTER)
    def widen(self, k: Kernel, halves: Value, n: Value, out: Value, *, half: bool) -> None:
        """Convert n float16 (``half``) or bfloat16 to float32."""

        def body(index: Value, width: int) -> None:
            if half:
                k.store(k.load(halves, F16, index, width).convert("fpext", F32), out, index)
            else:
                bits = k.load(halves, I16, index, width).convert("zext", I32) << 16
                k.store(bits.convert("bitcast", F32), out, index)

        _spans(k, n, WIDTH, body)

    @kernel(POINTER, I64, POINTER)
    def narrow(self, k: Kernel, values: Value, n: Value, out: Value, *, half: bool) -> None:
        """Round n float32 to float16 (``half``) or bfloat16, half to even."""

        def body(index: Value, width: int) -> None:
            x = k.load(values, F32, index, width)
            if half:
                k.store(x.convert("fptrunc", F16), out, index)
            else:
                k.store(bfloat16_bits(x, x.compare("==", x)), out, index)

        _spans(k, n, WIDTH, body)
