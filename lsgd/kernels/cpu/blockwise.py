"""What kernels for codecs of few bits share: launches over the blocks of a vector, sums in a fixed order, and bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from llvmlite import ir
from torch import Tensor

from lsgd.kernels.cpu import openmp
from lsgd.kernels.cpu.ir import F32, F64, I8, I64, POINTER, Kernel, Value, entry_point
from lsgd.kernels.cpu.machine import IS_X86, Machine, usable_host

ITEM_ELEMENTS: Final = 1 << 15  # what a thread takes at a time
LANES: Final = 8  # float64 in a vector
GROUP: Final = 64  # elements whose bits make one word
LINE: Final = 16  # elements in a line of the cache

Body = Callable[[Kernel, Value], None]


class Job(ctypes.Structure):
    """What one kernel launch works on; every field takes eight bytes, arrays are addresses."""

    _fields_ = tuple(
        (name, ctypes.c_double if name == "alpha" else ctypes.c_int64)
        for name in (
            *("counter", "items", "grain", "blocks", "alpha"),
            *("values", "scales", "codes", "low", "high", "signs", "fars", "flags"),
        )
    )


class BlockKernels:
    """Compiled kernels that work on one block after the other, on torch's threads: a few_bits.Path.

    Args:
        block: elements of a block, at most :data:`ITEM_ELEMENTS`.
        parts: the arrays of the job that hold a payload's parts.
        module: where the kernels are; those they call are in it already.
        bodies: the kernels ``encode``, ``decode`` and ``decode_add``, and what emits the code of each for a block whose
            number is given.
    """

    def __init__(self, block: int, parts: Sequence[str], module: ir.Module, bodies: Mapping[str, Body]) -> None:
        self._block, self._parts = block, parts
        for name, body in bodies.items():
            k = Kernel(module, f"{name}_items", [POINTER])
            with k.items(field(k, "items")) as item:
                first, grain = item * field(k, "grain"), field(k, "grain")
                with k.loop(first, (first + grain).minimum(field(k, "blocks"))) as number:
                    body(k, number)
            k.finish()
            entry_point(module, name, k, mxcsr=IS_X86)
        self._machine = Machine(str(module), *usable_host())

    def takes(self, numel: int) -> int:
        """Return the elements of the whole blocks."""
        return numel // self._block * self._block

    def encode(self, x: Tensor, parts: Sequence[Tensor], flags: Tensor) -> None:
        """Write what whole blocks become."""
        self._run("encode", x, parts, flags=flags.data_ptr())

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write whole blocks, or add ``alpha`` times them."""
        self._run("decode" if alpha is None else "decode_add", out, parts, alpha=alpha or 0.0)

    def _run(self, kernel: str, values: Tensor, parts: Sequence[Tensor], **others: float) -> None:
        blocks, grain = values.numel() // self._block, ITEM_ELEMENTS // self._block
        items = -(-blocks // grain)
        addresses = {name: part.data_ptr() for name, part in zip(self._parts, parts, strict=True)}
        addresses["values"] = values.data_ptr()
        job = Job(items=items, grain=grain, blocks=blocks, **addresses, **others)
        threads = max(1, min(torch.get_num_threads(), items))
        openmp.run(self._machine.address(kernel), ctypes.addressof(job), threads=threads)


def field(k: Kernel, name: str) -> Value:
    """Return a field of the job, the kernel's first argument; ``alpha`` as float32."""
    number = getattr(Job, name).offset // 8
    if name == "alpha":
        return k.load(k.arguments[0], F64, number).convert("fptrunc", F32)
    return k.load(k.arguments[0], I64, number)


def array(k: Kernel, name: str, byte: Value | int = 0) -> Value:
    """Return the address ``byte`` bytes after where an array of the job begins."""
    return k.offset(field(k, name).convert("inttoptr", POINTER), I8, byte)


def totals(block: int, leaf: Callable[[int], list[Value]]) -> list[Value]:
    """Add up a block's elements in halves: element i and i + block / 2, then i + block / 4, ...; scalars.

    ``leaf`` returns a vector of elements, or several that are added up beside each other.
    """

    def folded(vectors: int, v: int) -> list[Value]:
        """Vector ``v`` of those that are left when so many are."""
        if vectors == block // LANES:
            return leaf(v)
        halves = folded(2 * vectors, v), folded(2 * vectors, v + vectors)
        return [one + other for one, other in zip(*halves, strict=True)]

    return [total.reduce(lambda one, other: one + other) for total in folded(1, 0)]


def fetch(k: Kernel, values: Value, element: Value | int) -> None:
    """Prefetch a group of float32; past the end does no harm."""
    for line in range(0, GROUP, LINE):
        k.prefetch(k.offset(values, F32, element + line))


def word_of(truths: Value) -> Value:
    """Return up to 64 truth values as the bits of an int64."""
    word = truths.convert("bitcast", ir.IntType(truths.width), 1)
    return word if truths.width == GROUP else word.convert("zext", I64)


def store_bits(k: Kernel, truths: Value, base: Value, element: int) -> Value:
    """Store truth values as the bits of the elements from ``element`` on, and return them as one word."""
    nbytes = truths.width // 8
    k.store(truths.convert("bitcast", I8, nbytes), base, element // 8)
    return word_of(truths)


def load_bits(k: Kernel, base: Value, width: int = GROUP) -> Value:
    """Return ``width`` truth values from the bits at an address."""
    return k.load(base, I8, 0, width // 8).convert("bitcast", ir.IntType(1), width)
