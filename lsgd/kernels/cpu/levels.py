"""Vector kernels for the codecs that send each element's sign and level, and each block's scale.

They produce the same bytes as :mod:`lsgd.codecs.levels` in torch; docs/concepts/formulas.md has the arithmetic.
The code for a block has no loops, so each block size has a program of its own.
"""

from __future__ import annotations

from typing import Final

from lsgd.kernels.cpu.blockwise import GROUP, LANES, BlockKernels, JobView, fetch, load_bits, store_bits, totals
from lsgd.kernels.cpu.ir import F32, F64, I16, I32, I64, POINTER, Kernel, Value, bfloat16_bits, kernel

AHEAD: Final = 2048  # elements: prefetch distance of the pass that leaves the memory idle


class LevelsKernels(BlockKernels):
    """The kernels for one block size and these levels; see :class:`lsgd.codecs.levels.ScaledBlocks`."""

    def __init__(self, block: int, near: float, far: float, threshold: float | None) -> None:
        self._near, self._far, self._threshold = near, far, threshold
        super().__init__(block, *("scales", "signs", "fars")[: 2 if threshold is None else 3])

    def emit_encode(self, k: Kernel, job: JobView, number: Value) -> None:
        """Compute the block's sums, then the far elements, then the scale."""
        block, near, far = self.block, self._near, self._far
        values, room = job.address("values", number * (4 * block)), k.stack(F64, 2)
        k.call(self.sums(), values, job.address("signs", number * (block // 8)), room)
        total = k.load(room, F64, 0)
        scale = total / float(block)
        if self._threshold is not None:
            rms = (k.load(room, F64, 1) / float(block)).square_root()
            threshold = (rms * self._threshold).convert("fptrunc", F32)
            k.call(self.fars(), values, job.address("fars", number * (block // 8)), threshold, room)
            products = total * near + k.load(room, F64, 0) * (far - near)
            weight = k.load(room, F64, 1) * (far**2 - near**2)
            scale = products / (k.constant(block * near**2, F64) + weight)
        finite = (scale - scale).compare("==", 0.0)
        bits = bfloat16_bits(scale.minimum(2.0**127).convert("fptrunc", F32), finite)
        k.store(bits, job.address("scales", number * 2))
        with k.branch(~finite):
            k.store(k.constant(1, I32), job.address("flags"))

    @kernel(POINTER, POINTER, POINTER)
    def sums(self, k: Kernel, values: Value, signs: Value, room: Value) -> None:
        """Store a block's sums of magnitudes and of squares, and its sign bits."""
        squares = self._threshold is not None

        def magnitudes(v: int) -> list[Value]:
            x = k.load(values, F32, v * LANES, LANES).magnitude().convert("fpext", F64)
            return [x, x * x] if squares else [x]

        for i, total in enumerate(totals(self.block, magnitudes)):
            k.store(total, room, i)
        for group in range(0, self.block, GROUP):
            if not squares:  # otherwise the pass over the far elements prefetches
                fetch(k, values, group + AHEAD)
            store_bits(k, k.load(values, F32, group, GROUP).compare("<", 0.0), signs, group)

    @kernel(POINTER, POINTER, F32, POINTER)
    def fars(self, k: Kernel, values: Value, fars: Value, threshold: Value, room: Value) -> None:
        """Store the sum and the number of the magnitudes beyond the threshold, and their bits."""

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
        block = self.block
        out = job.address("values", number * (4 * block))
        bits = k.load(job.address("scales", number * 2), I16).convert("zext", I32) << 16
        scale = bits.convert("bitcast", F32)
        near, far = ((scale * level).splat(GROUP) for level in (self._near, self._far))
        for group in range(0, block, GROUP):
            byte = number * (block // 8) + group // 8
            value = near if self._threshold is None else load_bits(k, job.address("fars", byte)).where(far, near)
            value = load_bits(k, job.address("signs", byte)).where(value * -1.0, value)
            if add:
                fetch(k, out, group + AHEAD)
                value = k.load(out, F32, group, GROUP) + value * job.real("alpha")
            k.store(value, out, group)
