"""Vector kernels for codecs that send the signs, and the levels, of blocks that share a scale.

They make, byte by byte, what :mod:`lsgd.codecs.levels1` and :mod:`lsgd.codecs.levels2` make in torch, whose arithmetic
docs/algorithms.md has. The code for a block is straight, without loops: one program for each size of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir

from lsgd.kernels.cpu.blockwise import GROUP, LANES, BlockKernels, array, fetch, field, load_bits, store_bits, totals
from lsgd.kernels.cpu.ir import F32, F64, I16, I32, I64, POINTER, Kernel, Value
from lsgd.kernels.few_bits import Levels

AHEAD: Final = 2048  # elements: how far ahead a pass that leaves the memory idle fetches


class LevelsPath(BlockKernels):
    """The kernels for blocks of one size.

    Args:
        levels: of the codec.
        block: elements of a block, one of :data:`lsgd.kernels.few_bits.LEVELS_BLOCKS`.
    """

    def __init__(self, levels: Levels, block: int) -> None:
        module = ir.Module(name="levels")
        parts = ("scales", "signs") if levels.threshold is None else ("scales", "signs", "fars")
        bodies = {
            "encode": _encoder(module, levels, block),
            "decode": lambda k, number: _decode(k, number, levels, block, add=False),
            "decode_add": lambda k, number: _decode(k, number, levels, block, add=True),
        }
        super().__init__(block, parts, module, bodies)


def _encoder(module: ir.Module, levels: Levels, block: int) -> Callable[[Kernel, Value], None]:
    """Return what emits the code for one block."""
    times = levels.threshold  # the root mean square
    sums = _sums(module, block, squares=times is not None)
    fars = None if times is None else _fars(module, block)

    def emit(k: Kernel, number: Value) -> None:
        values, room = array(k, "values", number * (4 * block)), k.stack(F64, 2)
        k.call(sums, values, array(k, "signs", number * (block // 8)), room)
        total = k.load(room, F64, 0)
        scale = total / float(block)
        if times is not None and fars is not None:
            rms = (k.load(room, F64, 1) / float(block)).square_root()
            threshold = (rms * times).convert("fptrunc", F32)
            k.call(fars, values, array(k, "fars", number * (block // 8)), threshold, room)
            products = total * levels.near + k.load(room, F64, 0) * (levels.far - levels.near)
            weight = k.load(room, F64, 1) * (levels.far**2 - levels.near**2)
            scale = products / (k.constant(block * levels.near**2, F64) + weight)
        finite = (scale - scale).compare("==", 0.0)
        rounded = scale.minimum(2.0**127).convert("fptrunc", F32).convert("bitcast", I32)
        rounded = (rounded + ((rounded >> 16) & 1) + 0x7FFF) >> 16
        bits = finite.where(rounded, k.constant(0x7FC0, I32)).convert("trunc", I16)
        k.store(bits, array(k, "scales", number * 2))
        with k.either(finite) as (then, otherwise):
            with then:
                pass
            with otherwise:
                k.store(k.constant(1, I32), array(k, "flags"))

    return emit


def _sums(module: ir.Module, block: int, *, squares: bool) -> Kernel:
    """(values, signs, room): store a block's sum of magnitudes and that of squares, and the bits of its signs."""
    k = Kernel(module, "sums", [POINTER] * 3)
    values, signs, room = k.arguments

    def magnitudes(v: int) -> list[Value]:
        x = k.load(values, F32, v * LANES, LANES).magnitude().convert("fpext", F64)
        return [x, x * x] if squares else [x]

    for i, total in enumerate(totals(block, magnitudes)):
        k.store(total, room, i)
    for group in range(0, block, GROUP):
        if not squares:  # else the pass over what is far does
            fetch(k, values, group + AHEAD)
        store_bits(k, k.load(values, F32, group, GROUP).compare("<", 0.0), signs, group)
    k.finish()
    return k


def _fars(module: ir.Module, block: int) -> Kernel:
    """(values, fars, threshold, room): store the sum and number of magnitudes beyond the threshold, and their bits."""
    k = Kernel(module, "fars", [POINTER, POINTER, F32, POINTER])
    values, fars, threshold, room = k.arguments

    def beyond(v: int) -> list[Value]:
        x = k.load(values, F32, v * LANES, LANES).magnitude()
        return [x.compare(">", threshold).where(x.convert("fpext", F64), k.constant(0.0, F64, LANES))]

    (total,) = totals(block, beyond)
    k.store(total, room, 0)
    count = k.constant(0, I64)
    for group in range(0, block, GROUP):
        fetch(k, values, group + AHEAD)
        bits = k.load(values, F32, group, GROUP).magnitude().compare(">", threshold)
        count = count + store_bits(k, bits, fars, group).ones()
    k.store(count.convert("sitofp", F64), room, 1)
    k.finish()
    return k


def _decode(k: Kernel, number: Value, levels: Levels, block: int, *, add: bool) -> None:
    """Emit the code for block ``number``."""
    out = array(k, "values", number * (4 * block))
    bits = k.load(array(k, "scales", number * 2), I16).convert("zext", I32) << 16
    scale = bits.convert("bitcast", F32)
    near, far = ((scale * level).splat(GROUP) for level in (levels.near, levels.far))
    for group in range(0, block, GROUP):
        byte = number * (block // 8) + group // 8
        value = near if levels.threshold is None else load_bits(k, array(k, "fars", byte)).where(far, near)
        value = load_bits(k, array(k, "signs", byte)).where(value * -1.0, value)
        if add:
            fetch(k, out, group + AHEAD)
            value = k.load(out, F32, group, GROUP) + value * field(k, "alpha")
        k.store(value, out, group)
