"""The base of the kernels for low-bit codecs: launches over blocks, sums in a fixed order, and bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from llvmlite import ir
from torch import Tensor

from lsgd.kernels.cpu.ir import F32, I8, I64, Kernel, Value
from lsgd.kernels.cpu.job import ITEM_ELEMENTS, Job, JobView, add_entry
from lsgd.kernels.cpu.machine import compiled, usable_host
from lsgd.kernels.few_bits import Path

LANES: Final = 8  # float64 in a vector
GROUP: Final = 64  # elements whose bits form one word
LINE: Final = 16  # elements in a cache line
INFINITY: Final = 0x7F800000  # the bits of float32; those of NaN are greater

Body = Callable[[Kernel, JobView, Value], None]


class BlockKernels(Path):
    """Compiled kernels that process one block after the other, on torch's threads; each codec emits its own.

    Args:
        block: elements per block, at most :data:`lsgd.kernels.cpu.job.ITEM_ELEMENTS`.
        parts: the job's arrays that hold a payload's parts.
    """

    def __init__(self, block: int, *parts: str) -> None:
        self.block, self.parts = block, parts
        self.module = ir.Module(name="lsgd")
        bodies: dict[str, Body] = {
            "encode": self.emit_encode,
            "decode": partial(self.emit_decode, add=False),
            "decode_add": partial(self.emit_decode, add=True),
        }

        def on_item(body: Body, k: Kernel, job: JobView, item: Value) -> None:
            first = item * job.grain
            with k.loop(first, (first + job.grain).minimum(job.blocks)) as number:
                body(k, job, number)

        for name, body in bodies.items():
            add_entry(self.module, name, partial(on_item, body))
        self._address = compiled(str(self.module), *usable_host())
        del self.module  # it is large and no longer needed

    def emit_encode(self, k: Kernel, job: JobView, number: Value) -> None:
        """Emit the code that encodes block ``number``."""
        raise NotImplementedError

    def emit_decode(self, k: Kernel, job: JobView, number: Value, *, add: bool) -> None:
        """Emit the code that writes block ``number``, or adds ``alpha`` times it."""
        raise NotImplementedError

    def takes(self, numel: int) -> int:
        """Return the elements of all whole blocks."""
        return numel // self.block * self.block

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write the parts of whole blocks."""
        self._run("encode", x, parts, flags=flags.data_ptr())

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write whole blocks, or add ``alpha`` times them."""
        self._run("decode" if alpha is None else "decode_add", out, parts, alpha=alpha or 0.0)

    def _run(self, kernel: str, values: Tensor, parts: Sequence[Tensor], **others: float) -> None:
        blocks, grain = values.numel() // self.block, ITEM_ELEMENTS // self.block
        arrays = {name: part.data_ptr() for name, part in zip(self.parts, parts, strict=True)}
        job = Job(grain=grain, blocks=blocks, values=values.data_ptr(), **arrays, **others)
        job.items = -(-blocks // grain)
        job.run(self._address(kernel), values.numel())


def totals(block: int, leaf: Callable[[int], list[Value]]) -> list[Value]:
    """Add up a block's elements in halves: elements i and i + block / 2, then i and i + block / 4, ...; scalars.

    ``leaf(v)`` returns the block's vector ``v``, or several vectors that are added up separately.
    """

    def folded(vectors: int, v: int) -> list[Value]:
        """Return vector ``v`` once ``vectors`` of them are left."""
        if vectors == block // LANES:
            return leaf(v)
        halves = folded(2 * vectors, v), folded(2 * vectors, v + vectors)
        return [one + other for one, other in zip(*halves, strict=True)]

    return [total.reduce(lambda one, other: one + other) for total in folded(1, 0)]


def fetch(k: Kernel, values: Value, element: Value | int) -> None:
    """Prefetch a group of float32; addresses past the end do no harm."""
    for line in range(0, GROUP, LINE):
        k.prefetch(k.offset(values, F32, element + line))


def word_of(truths: Value) -> Value:
    """Return up to 64 truth values as the bits of an int64."""
    word = truths.convert("bitcast", ir.IntType(truths.width), 1)
    return word if truths.width == GROUP else word.convert("zext", I64)


def store_bits(k: Kernel, truths: Value, base: Value, element: int) -> Value:
    """Store truth values as bits, from that of ``element`` on, and return them as one word."""
    nbytes = truths.width // 8
    k.store(truths.convert("bitcast", I8, nbytes), base, element // 8)
    return word_of(truths)


def load_bits(k: Kernel, base: Value, width: int = GROUP) -> Value:
    """Return ``width`` truth values from the bits at an address."""
    return k.load(base, I8, 0, width // 8).convert("bitcast", ir.IntType(1), width)
