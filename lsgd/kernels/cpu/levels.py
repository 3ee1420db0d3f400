"""Vector kernels for codecs that send the signs, and the levels, of blocks that share a scale.

They make, byte by byte, what :mod:`lsgd.codecs.levels1` and :mod:`lsgd.codecs.levels2` make in torch, whose arithmetic
docs/algorithms.md has. The code for a block is straight, without loops: one program for each size of blocks.
"""

from __future__ import annotations

from typing import Final

from lsgd.kernels.cpu.blockwise import GROUP, LANES, BlockKernels, fetch, load_bits, store_bits, totals
from lsgd.kernels.cpu.ir import F32, F64, I16, I32, I64, POINTER, Kernel, Value, kernel
from lsgd.kernels.cpu.job import JobView
from lsgd.kernels.few_bits import Levels

AHEAD: Final = 2048  # elements: how far ahead a pass that leaves the memory idle fetches


class LevelsPath(BlockKernels):
    """The kernels for blocks of one size.

    Args:
        levels: of the codec.
        block: elements of a block, one of :data:`lsgd.kernels.few_bits.LEVELS_BLOCKS`.
    """

    def __init__(self, levels: Levels, block: int) -> None:
        self._levels = levels
        super().__init__(block, *("scales", "signs", "fars")[: 2 if levels.threshold is None else 3])

    def emit_encode(self, k: Kernel, job: JobView, number: Value) -> None:
        """Find the sums over a block, then what is far from zero, then the scale."""
        block, levels = self.block, self._levels
        values, room = job.address("values", number * (4 * block)), k.stack(F64, 2)
        k.call(self.sums(), values, job.address("signs", number * (block // 8)), room)
        total = k.load(room, F64, 0)
        scale = total / float(block)
        if levels.threshold is not None:
            rms = (k.load(room, F64, 1) / float(block)).square_root()
            threshold = (rms * levels.threshold).convert("fptrunc", F32)
            k.call(self.fars(), values, job.address("fars", number * (block // 8)), threshold, room)
            products = total * levels.near + k.load(room, F64, 0) * (levels.far - levels.near)
            weight = k.load(room, F64, 1) * (levels.far**2 - levels.near**2)
            scale = products / (k.constant(block * levels.near**2, F64) + weight)
        finite = (scale - scale).compare("==", 0.0)
        rounded = scale.minimum(2.0**127).convert("fptrunc", F32).convert("bitcast", I32)
        rounded = (rounded + ((rounded >> 16) & 1) + 0x7FFF) >> 16
        bits = finite.where(rounded, k.constant(0x7FC0, I32)).convert("trunc", I16)
        k.store(bits, job.address("scales", number * 2))
        with k.branch(~finite):
            k.store(k.constant(1, I32), job.address("flags"))

    @kernel(POINTER, POINTER, POINTER)
    def sums(self, k: Kernel, values: Value, signs: Value, room: Value) -> None:
        """Store a block's sum of magnitudes and that of squares, and the bits of its signs."""
        squares = self._levels.threshold is not None

        def magnitudes(v: int) -> list[Value]:
            x = k.load(values, F32, v * LANES, LANES).magnitude().convert("fpext", F64)
            return [x, x * x] if squares else [x]

        for i, total in enumerate(totals(self.block, magnitudes)):
            k.store(total, room, i)
        for group in range(0, self.block, GROUP):
            if not squares:  # else the pass over what is far does
                fetch(k, values, group + AHEAD)
            store_bits(k, k.load(values, F32, group, GROUP).compare("<", 0.0), signs, group)

    @kernel(POINTER, POINTER, F32, POINTER)
    def fars(self, k: Kernel, values: Value, fars: Value, threshold: Value, room: Value) -> None:
        """Store the sum and number of magnitudes beyond the threshold, and their bits."""

        def beyond(v: int) -> list[Value]:
            x = k.load(values, F32, v * LANES, LANES).magnitude()
            return [x.compare(">", threshold).where(x.convert("fpext", F64), k.constant(0.0, F64, LANES))]

        (total,) = totals(self.block, beyond)
        k.store(total, room, 0)
        count = k.constant(0, I64)
        for group in range(0, self.block, GROUP):
            fetch(k, values, group + AHEAD)
            bits = k.load(values, F32, group, GROUP).magnitude().compare(">", threshold)
            count = count + store_bits(k, bits, fars, group).ones()
        k.store(count.convert("sitofp", F64), room, 1)

    def emit_decode(self, k: Kernel, job: JobView, number: Value, *, add: bool) -> None:
        """Write the levels times the scale."""
        levels, block = self._levels, self.block
        out = job.address("values", number * (4 * block))
        bits = k.load(job.address("scales", number * 2), I16).convert("zext", I32) << 16
        scale = bits.convert("bitcast", F32)
        near, far = ((scale * level).splat(GROUP) for level in (levels.near, levels.far))
        for group in range(0, block, GROUP):
            byte = number * (block // 8) + group // 8
            value = near if levels.threshold is None else load_bits(k, job.address("fars", byte)).where(far, near)
            value = load_bits(k, job.address("signs", byte)).where(value * -1.0, value)
            if add:
                fetch(k, out, group + AHEAD)
                value = k.load(out, F32, group, GROUP) + value * job.real("alpha")
            k.store(value, out, group)
