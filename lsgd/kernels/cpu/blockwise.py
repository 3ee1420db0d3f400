"""The base of the CPU kernels: jobs for torch's threads, launches over blocks, sums in a fixed order, and bits.

A job is a row of 64-bit words that say what to read and what to write. Its threads, however many, take items from
``counter`` until none is left.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from llvmlite import ir
from torch import Tensor

from lsgd.kernels import Kernels
from lsgd.kernels.cpu import machine
from lsgd.kernels.cpu.ir import F32, F64, I8, I32, I64, POINTER, Kernel, Value
from lsgd.payload import FLAGS_OFFSET

ITEM_ELEMENTS: Final = 1 << 15  # what a thread takes at a time
SERIAL_ELEMENTS: Final = 1 << 15  # up to this, waking other threads does not pay off
LANES: Final = 8  # float64 in a vector
GROUP: Final = 64  # elements whose bits form one word
LINE: Final = 16  # elements in a cache line
INFINITY: Final = 0x7F800000  # the bits of float32; those of NaN are greater
_DEFAULT_MXCSR: Final = 0x1F80  # round to nearest even, keep subnormal numbers


class Job(ctypes.Structure):
    """What one kernel launch works on; every field has eight bytes, and arrays are addresses."""

    _fields_ = (
        ("counter", ctypes.c_int64),  # next item, taken by atomic addition
        ("items", ctypes.c_int64),
        ("grain", ctypes.c_int64),  # blocks or elements per item
        ("blocks", ctypes.c_int64),
        ("values", ctypes.c_int64),  # the vector to encode, or to decode to
        ("alpha", ctypes.c_double),  # factor of what is decoded
        ("flags", ctypes.c_int64),
        ("scales", ctypes.c_int64),  # this and the next five: parts of the payload
        ("codes", ctypes.c_int64),
        ("low", ctypes.c_int64),
        ("high", ctypes.c_int64),
        ("signs", ctypes.c_int64),
        ("fars", ctypes.c_int64),
        # Only in minmax8:
        ("payloads", ctypes.c_int64),  # to read: array of the addresses of scales and codes, in turn
        ("members", ctypes.c_int64),  # number of these payloads
        ("block", ctypes.c_int64),  # elements per block
        ("first", ctypes.c_int64),  # the elements of one big block begin here,
        ("stop", ctypes.c_int64),  # and end here; otherwise the elements of the vector
        ("partials", ctypes.c_int64),  # ranges of the big block's segments
        ("seed", ctypes.c_uint64),
    )

    def run(self, kernel: int, numel: int) -> None:
        """Run the kernel at an address on torch's threads, for ``numel`` elements, and wait for them."""
        threads = 1 if numel <= SERIAL_ELEMENTS else min(torch.get_num_threads(), self.items)
        machine.run(kernel, ctypes.addressof(self), threads=threads)


class JobView:
    """Reads the fields of the job, a kernel's first argument."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Value:
        return self._load(name, I64)

    def real(self, name: str) -> Value:
        """Return a floating-point field as float32."""
        return self._load(name, F64).convert("fptrunc", F32)

    def address(self, name: str, byte: Value | int = 0) -> Value:
        """Return the address ``byte`` bytes into an array."""
        return self._kernel.offset(self._load(name, I64).convert("inttoptr", POINTER), I8, byte)

    def span(self, item: Value) -> tuple[Value, Value]:
        """Return where the elements of an item begin and end."""
        start = self.first + item * self.grain
        return start, (start + self.grain).minimum(self.stop)

    def _load(self, name: str, element: ir.Type) -> Value:
        return self._kernel.load(self._kernel.arguments[0], element, getattr(Job, name).offset // 8)


Emit = Callable[[Kernel, JobView, Value], None]


def add_entry(module: ir.Module, name: str, emit: Emit) -> None:
    """Add the public function ``name(job)``, which takes items until none is left; ``emit`` emits the work on one.

    It computes in the default rounding mode and restores the thread's own.
    """
    inner = Kernel(module, f"{name}_items", [POINTER])
    job = JobView(inner)
    items, one = job.items, ir.Constant(I64, 1)
    with inner.repeat() as leave_unless:
        item = Value(inner, inner.builder.atomic_rmw("add", inner.arguments[0].raw, one, "monotonic"))
        leave_unless(item.compare("<", items))
        emit(inner, job, item)
    inner.finish()

    k = Kernel(module, name, [POINTER], public=True)
    if not machine.IS_X86:
        k.call(inner.function, k.arguments[0])
        k.finish()
        return
    kind = ir.FunctionType(ir.VoidType(), [POINTER])
    read, write = (k.declare(f"llvm.x86.sse.{verb}mxcsr", kind) for verb in ("st", "ld"))
    before, ours = k.stack(I32, 1), k.stack(I32, 1)
    k.store(k.constant(_DEFAULT_MXCSR, I32), ours)
    k.builder.call(read, [before.raw])
    k.builder.call(write, [ours.raw])
    k.call(inner.function, k.arguments[0])
    k.builder.call(write, [before.raw])
    k.finish()


def each_block(body: Emit) -> Emit:
    """Return what emits ``body`` for each of the ``grain`` blocks of an item."""

    def on_item(k: Kernel, job: JobView, item: Value) -> None:
        first = item * job.grain
        with k.loop(first, (first + job.grain).minimum(job.blocks)) as number:
            body(k, job, number)

    return on_item


class BlockKernels(Kernels):
    """Compiled kernels that process one block after the other, on torch's threads; each codec emits its own.

    A block has at most ``ITEM_ELEMENTS``; ``parts`` are the job's arrays that hold a payload's parts.
    """

    def __init__(self, block: int, *parts: str) -> None:
        self.block, self.parts = block, parts
        self.module = ir.Module(name="lsgd")
        add_entry(self.module, "encode", each_block(self.emit_encode))
        add_entry(self.module, "decode", each_block(partial(self.emit_decode, add=False)))
        add_entry(self.module, "decode_add", each_block(partial(self.emit_decode, add=True)))
        self._address = machine.compiled(str(self.module), *machine.usable_host())
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

    def encode(self, x: Tensor, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of whole blocks."""
        self._run("encode", x, parts, flags=header.data_ptr() + FLAGS_OFFSET)

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
