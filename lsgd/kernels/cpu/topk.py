"""Vector kernels for the codec that keeps the largest elements of each chunk.

They produce the same bytes as :mod:`lsgd.codecs.topk` in torch. A chunk stays in the L1 cache for all passes over it.
The code for the kept elements has no loops, so each ``k`` has a program of its own.
"""

from __future__ import annotations

from typing import Final

from lsgd.kernels.cpu.blockwise import (
    GROUP,
    INFINITY,
    LANES,
    BlockKernels,
    JobView,
    fetch,
    load_bits,
    store_bits,
    totals,
    word_of,
)
from lsgd.kernels.cpu.ir import F32, F64, I8, I16, I32, I64, POINTER, Kernel, Value, Variable, kernel

_NAN: Final = 0x7FC00000


class TopKKernels(BlockKernels):
    """The kernels for chunks of a power of two, at most 4096, and a power of two ``k`` from 8 to half a chunk."""

    def __init__(self, chunk: int, k: int) -> None:
        self._kept = k
        self._width = min(GROUP, k)
        self._starts = range(0, k, self._width)  # of the groups of kept elements
        super().__init__(chunk, "scales", "low", "high", "signs", "fars")

    def emit_encode(self, k: Kernel, job: JobView, number: Value) -> None:
        """Find the least magnitude to keep, then the kept elements, then their levels."""
        values, arrays = job.address("values", number * (4 * self.block)), self._arrays(job, number)
        found, indices, kept = k.stack(I32, 3), k.stack(I16, self._kept + 1), k.stack(F32, self._kept + 1)
        k.call(self.find(), values, found)
        with k.branch(k.load(found, I32, 2).compare(">=", INFINITY)):
            k.store(k.constant(1, I32), job.address("flags"))
        k.call(self.gather(), values, found, indices, kept)
        k.call(self.describe(), indices, kept, *arrays)

    def emit_decode(self, k: Kernel, job: JobView, number: Value, *, add: bool) -> None:
        """Write zeros, and the levels in their places; to add, first do that in the cache."""
        out, arrays = job.address("values", number * (4 * self.block)), self._arrays(job, number)
        indices, kept = k.stack(I16, self._kept), k.stack(F32, self._kept)
        room = k.stack(F32, self.block) if add else out
        k.call(self.spread(), indices, kept, *arrays)
        k.call(self.scatter(), room, k.load(arrays[0], F32) * 0.0, indices, kept)
        if add:
            alpha = job.real("alpha")
            with k.loop(0, self.block, GROUP) as start:
                fetch(k, out, start + self.block)
                sums = k.load(out, F32, start, GROUP) + k.load(room, F32, start, GROUP) * alpha
                k.store(sums, out, start)

    def _arrays(self, job: JobView, number: Value) -> list[Value]:
        """Return the addresses of a chunk's levels, low and high index bits, sign bits and level bits."""
        nbytes = (8, self._kept, self._kept // 2, self._kept // 8, self._kept // 8)
        return [job.address(name, number * size) for name, size in zip(self.parts, nbytes, strict=True)]

    @kernel(POINTER, POINTER)
    def find(self, k: Kernel, values: Value, found: Value) -> None:
        """Store the bits of a magnitude, the number of greater ones, and the bits of the greatest one.

        Either k magnitudes are greater, or fewer are but at least k are greater or equal.
        """
        # Cut into k parts, the chunk has k magnitudes that are not below the least of the parts' maxima.
        parts = max(1, self._kept // GROUP)
        least = Variable(k.constant(0x7FFFFFFF, I32, GROUP))
        most = Variable(k.constant(0, I32, GROUP))
        with k.loop(0, self.block, self.block // parts) as first:
            greatest = Variable(k.constant(0, I32, GROUP))
            with k.loop(first, first + self.block // parts, GROUP) as start:
                greatest.set(greatest.get().maximum(_magnitudes(k, values, start)))
            least.set(least.get().minimum(greatest.get()))
            most.set(most.get().maximum(greatest.get()))
        top = most.get().reduce(Value.maximum)
        # At least k magnitudes are above ``low``; ``above`` are above ``high``, at most k.
        low, high = Variable(least.get().reduce(Value.minimum) - 1), Variable(top)
        above = Variable(k.constant(0, I32))
        with k.repeat() as leave_unless:
            distance = high.get() - low.get()  # below 2**32, so without its sign
            leave_unless(distance.compare("!=", 1) & above.get().compare("<", self._kept))
            middle = low.get() + (distance >> 1)
            counts = Variable(k.constant(0, I32, GROUP))
            with k.loop(0, self.block, GROUP) as start:
                greater = _magnitudes(k, values, start).compare(">", middle)
                counts.set(counts.get() + greater.convert("zext", I32))
            count = counts.get().reduce(Value.__add__)
            many = count.compare(">", self._kept)
            low.set(many.where(middle, low.get()))
            high.set(many.where(high.get(), middle))
            above.set(many.where(above.get(), count))
        for i, number in enumerate((high.get(), above.get(), top)):
            k.store(number, found, i)

    @kernel(POINTER, POINTER, POINTER, POINTER)
    def gather(self, k: Kernel, values: Value, found: Value, indices: Value, kept: Value) -> None:
        """Store k elements and their indices; of those equal to the least, the first ones.

        Both arrays have room for one more.
        """
        least = k.load(found, I32, 0)
        left = Variable(k.constant(self._kept, I32) - k.load(found, I32, 1))  # number of equal ones to take
        number = Variable(k.constant(0, I64))
        with k.loop(0, self.block, GROUP) as start:
            fetch(k, values, start + self.block)
            magnitudes = _magnitudes(k, values, start)
            greater = word_of(magnitudes.compare(">", least))
            equal = word_of(magnitudes.compare("==", least))
            word = Variable(left.get().compare(">", 0).where(greater | equal, greater))
            with k.repeat() as leave_unless:
                leave_unless(word.get().compare("!=", 0))
                lane = word.get().trailing_zeros()
                k.store((start + lane).convert("trunc", I16), indices, number.get())
                k.store(k.load(values, F32, start + lane), kept, number.get())
                # The next element overwrites an equal one once no more of those are wanted.
                tie = ((equal >> lane) & 1).convert("trunc", I32)
                taken = tie.compare("<=", left.get().maximum(0))
                number.set(number.get() + taken.convert("zext", I64))
                left.set(left.get() - tie)
                word.set(word.get() & (word.get() - 1))

    @kernel(*[POINTER] * 7)
    def describe(self, k: Kernel, *arguments: Value) -> None:
        """(indices, kept, levels, low, high, signs, fars): encode k elements."""
        indices, kept, levels, low, high, signs, fars = arguments

        def magnitudes(start: int, width: int) -> Value:
            return k.load(kept, F32, start, width).magnitude().convert("fpext", F64)

        (total,) = totals(self._kept, lambda v: [magnitudes(v * LANES, LANES)])
        mean = total / float(self._kept)
        zero = k.constant(0.0, F64, LANES)

        def split(v: int) -> list[Value]:
            x = magnitudes(v * LANES, LANES)
            far = x.compare(">", mean)
            return [far.where(zero, x), far.where(x, zero)]

        near_total, far_total = totals(self._kept, split)
        count = k.constant(0, I64)
        for start in self._starts:
            far = magnitudes(start, self._width).compare(">", mean)
            count = count + store_bits(k, far, fars, start).ones()
            store_bits(k, k.load(kept, F32, start, self._width).compare("<", 0.0), signs, start)
            index = k.load(indices, I16, start, self._width)
            k.store(index.convert("trunc", I8), low, start)
            pairs = index.convert("bitcast", I32, self._width // 2)
            k.store(((pairs >> 8) | ((pairs >> 20) & 240)).convert("trunc", I8), high, start // 2)
        rest = (k.constant(self._kept, I64) - count).convert("sitofp", F64)
        for i, level in enumerate((near_total / rest, far_total / count.maximum(1).convert("sitofp", F64))):
            finite = (level - level).compare("==", 0.0)
            bits = level.convert("fptrunc", F32).convert("bitcast", I32)
            k.store(finite.where(bits, k.constant(_NAN, I32)), levels, i)

    @kernel(*[POINTER] * 7)
    def spread(self, k: Kernel, *arguments: Value) -> None:
        """(indices, kept, levels, low, high, signs, fars): decode k elements and their indices."""
        indices, kept, levels, low, high, signs, fars = arguments
        near, far = (k.load(levels, I32, i).splat(self._width) for i in (0, 1))
        for start in self._starts:
            value = load_bits(k, k.offset(fars, I8, start // 8), self._width).where(far, near)
            sign = load_bits(k, k.offset(signs, I8, start // 8), self._width)
            k.store(sign.where(value ^ -(1 << 31), value), kept, start)
            pairs = k.load(high, I8, start // 2, self._width // 2).convert("zext", I32)
            above = ((pairs & 15) << 8) | ((pairs & 240) << 20)
            below = k.load(low, I8, start, self._width).convert("zext", I16)
            k.store(above.convert("bitcast", I16, self._width) | below, indices, start)

    @kernel(POINTER, F32, POINTER, POINTER)
    def scatter(self, k: Kernel, out: Value, filler: Value, indices: Value, kept: Value) -> None:
        """Fill a chunk, then write the k elements."""
        with k.loop(0, self.block, GROUP) as start:
            k.store(filler.splat(GROUP), out, start)
        with k.loop(0, self._kept) as i:
            k.store(k.load(kept, F32, i), out, k.load(indices, I16, i).convert("zext", I64))


def _magnitudes(k: Kernel, values: Value, start: Value) -> Value:
    """Return the bits of a group of magnitudes; they compare as the magnitudes do."""
    return k.load(values, I32, start, GROUP) & 0x7FFFFFFF
