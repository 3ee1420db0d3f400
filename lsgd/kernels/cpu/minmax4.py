"""Vector kernels for the codec with 4 bits between the least and the greatest of a block.

They make, byte by byte, what :mod:`lsgd.codecs.minmax4` makes in torch. The second pass over a block finds it in the L1
cache, and fetches what comes later.
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir

from lsgd.kernels.cpu.blockwise import GROUP, BlockKernels, array, fetch, field
from lsgd.kernels.cpu.ir import F32, I8, I16, I32, I64, Kernel, Value, Variable

AHEAD: Final = 4096  # elements: how far ahead to fetch
_HALF_OF_MAX: Final = float.fromhex("0x1.fffffep126")
_UNITS: Final = 15
_INFINITY: Final = 0x7F800000  # the bits of float32; those of NaN are greater


class MinMax4Path(BlockKernels):
    """The kernels for blocks of one size.

    Args:
        block: elements of a block, one of :data:`lsgd.kernels.few_bits.MINMAX_BLOCKS`.
    """

    def __init__(self, block: int) -> None:
        bodies = {
            "encode": lambda k, number: _encode(k, number, block),
            "decode": lambda k, number: _decode(k, number, block, add=False),
            "decode_add": lambda k, number: _decode(k, number, block, add=True),
        }
        super().__init__(block, ("scales", "codes"), ir.Module(name="minmax4"), bodies)


def _encode(k: Kernel, number: Value, block: int) -> None:
    """Emit the code for block ``number``."""
    values, end = array(k, "values", number * (4 * block)), k.constant(block, I64)
    least, greatest = (Variable(k.constant(limit, F32, GROUP)) for limit in (float("inf"), float("-inf")))
    most = Variable(k.constant(0, I32, GROUP))
    with k.loop(0, end, GROUP) as start:
        x = k.load(values, F32, start, GROUP)
        least.set(x.minimum(least.get()))
        greatest.set(x.maximum(greatest.get()))
        most.set(most.get().maximum(x.magnitude().convert("bitcast", I32)))
    finite = most.get().reduce(Value.maximum).compare("<", _INFINITY)
    lo = least.get().reduce(Value.minimum) * 0.5 + 0.0
    unit = (greatest.get().reduce(Value.maximum) * 0.5 - lo) / float(_UNITS)
    scales, nan = array(k, "scales", number * 8), k.constant(float("nan"), F32)
    for i, scale in enumerate((lo, unit + 0.0)):
        k.store(finite.where(scale, nan), scales, i)
    with k.either(finite) as (then, otherwise):
        with then:
            pass
        with otherwise:
            k.store(k.constant(1, I32), array(k, "flags"))
    # What is divided by infinity has code 0, and so has NaN.
    infinite = k.constant(float("inf"), F32)
    divisor = finite.where(unit.compare(">", 0.0).where(unit, infinite), infinite)
    codes = array(k, "codes", number * (block // 2))
    with k.loop(0, end, GROUP) as start:
        fetch(k, values, start + AHEAD)
        x = k.load(values, F32, start, GROUP)
        code = ((x * 0.5 - lo) / divisor).clamp(0.0, float(_UNITS)).rounded().convert("trunc", I8)
        pairs = code.convert("bitcast", I16, GROUP // 2)
        k.store((pairs | (pairs >> 4)).convert("trunc", I8), codes, start >> 1)


def _decode(k: Kernel, number: Value, block: int, *, add: bool) -> None:
    """Emit the code for block ``number``."""
    out, codes = array(k, "values", number * (4 * block)), array(k, "codes", number * (block // 2))
    lo, unit = (k.load(array(k, "scales", number * 8), F32, i) for i in (0, 1))
    with k.loop(0, k.constant(block, I64), GROUP) as start:
        pairs = k.load(codes, I8, start >> 1, GROUP // 2).convert("zext", I16)
        code = ((pairs | (pairs << 4)) & 0x0F0F).convert("bitcast", I8, GROUP).convert("zext", I32)
        value = code.convert("sitofp", F32) * unit + lo
        for limit, beyond in ((-_HALF_OF_MAX, "<"), (_HALF_OF_MAX, ">")):  # NaN stays
            value = value.compare(beyond, limit).where(limit, value)
        value = value * 2.0
        if add:
            fetch(k, out, start + AHEAD)
            value = k.load(out, F32, start, GROUP) + value * field(k, "alpha")
        k.store(value, out, start)
