"""Vector kernels for the codec with 4 bits between the least and the greatest element of a block.

They produce the same bytes as :mod:`lsgd.codecs.minmax` in torch. The second pass over a block finds it in the L1
cache, and prefetches later blocks.
"""

from __future__ import annotations

from typing import Final

from lsgd.kernels.arithmetic import HALF_OF_MAX
from lsgd.kernels.cpu.blockwise import GROUP, INFINITY, BlockKernels, JobView, fetch
from lsgd.kernels.cpu.ir import F32, I8, I16, I32, Kernel, Value, Variable

AHEAD: Final = 4096  # elements: the prefetch distance
_UNITS: Final = 15


class MinMax4Kernels(BlockKernels):
    """The kernels for one block size."""

    def __init__(self, block: int) -> None:
        super().__init__(block, "scales", "codes")

    def emit_encode(self, k: Kernel, job: JobView, number: Value) -> None:
        """Find the block's least and greatest element, then the codes."""
        block = self.block
        values = job.address("values", number * (4 * block))
        least, greatest = (Variable(k.constant(limit, F32, GROUP)) for limit in (float("inf"), float("-inf")))
        most = Variable(k.constant(0, I32, GROUP))
        with k.loop(0, block, GROUP) as start:
            x = k.load(values, F32, start, GROUP)
            least.set(x.minimum(least.get()))
            greatest.set(x.maximum(greatest.get()))
            most.set(most.get().maximum(x.magnitude().convert("bitcast", I32)))
        finite = most.get().reduce(Value.maximum).compare("<", INFINITY)
        lo = least.get().reduce(Value.minimum) * 0.5 + 0.0
        unit = (greatest.get().reduce(Value.maximum) * 0.5 - lo) / float(_UNITS)
        scales, nan = job.address("scales", number * 8), k.constant(float("nan"), F32)
        for i, scale in enumerate((lo, unit + 0.0)):
            k.store(finite.where(scale, nan), scales, i)
        with k.branch(~finite):
            k.store(k.constant(1, I32), job.address("flags"))
        # Dividing by infinity gives code 0, also for NaN.
        infinite = k.constant(float("inf"), F32)
        divisor = finite.where(unit.compare(">", 0.0).where(unit, infinite), infinite)
        codes = job.address("codes", number * (block // 2))
        with k.loop(0, block, GROUP) as start:
            fetch(k, values, start + AHEAD)
            x = k.load(values, F32, start, GROUP)
            code = ((x * 0.5 - lo) / divisor).clamp(0.0, float(_UNITS)).rounded().convert("trunc", I8)
            pairs = code.convert("bitcast", I16, GROUP // 2)
            k.store((pairs | (pairs >> 4)).convert("trunc", I8), codes, start >> 1)

    def emit_decode(self, k: Kernel, job: JobView, number: Value, *, add: bool) -> None:
        """Write the values of the codes."""
        block = self.block
        out, codes = job.address("values", number * (4 * block)), job.address("codes", number * (block // 2))
        lo, unit = (k.load(job.address("scales", number * 8), F32, i) for i in (0, 1))
        with k.loop(0, block, GROUP) as start:
            pairs = k.load(codes, I8, start >> 1, GROUP // 2).convert("zext", I16)
            code = ((pairs | (pairs << 4)) & 0x0F0F).convert("bitcast", I8, GROUP).convert("zext", I32)
            value = code.convert("sitofp", F32) * unit + lo
            for limit, beyond in ((-HALF_OF_MAX, "<"), (HALF_OF_MAX, ">")):  # keeps NaN
                value = value.compare(beyond, limit).where(limit, value)
            value = value * 2.0
            if add:
                fetch(k, out, start + AHEAD)
                value = k.load(out, F32, start, GROUP) + value * job.real("alpha")
            k.store(value, out, start)
