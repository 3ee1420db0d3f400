"""The jobs of the CPU path's threads: rows of 64-bit words that say what to read and what to write.

A job's threads, however many, take items from ``counter`` until none is left.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch
from llvmlite import ir

from lsgd.kernels.cpu import openmp
from lsgd.kernels.cpu.ir import F32, F64, I8, I32, I64, POINTER, Kernel, Value
from lsgd.kernels.cpu.machine import IS_X86

ITEM_ELEMENTS: Final = 1 << 15  # what a thread takes at a time
SERIAL_ELEMENTS: Final = 1 << 15  # up to this, waking other threads does not pay off
_DEFAULT_MXCSR: Final = 0x1F80  # round to nearest even, keep subnormal numbers


class Job(ctypes.Structure):
    """What one kernel launch works on; every field has eight bytes, and arrays are addresses."""

    _fields_ = (
        ("counter", ctypes.c_int64),  # next item, taken by atomic addition
        ("items", ctypes.c_int64),
        ("grain", ctypes.c_int64),  # blocks or elements per item
        ("values", ctypes.c_int64),  # the vector to encode; in low-bit codecs also the one to decode to
        ("block", ctypes.c_int64),  # elements per block of the output
        ("blocks", ctypes.c_int64),
        ("scales", ctypes.c_int64),  # this and the next five: parts of the payload
        ("codes", ctypes.c_int64),
        ("low", ctypes.c_int64),
        ("high", ctypes.c_int64),
        ("signs", ctypes.c_int64),
        ("fars", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("alpha", ctypes.c_double),
        # Only in minmax8:
        ("source", ctypes.c_int64),  # what to read: a kind in tiles.py, or jobs.PAYLOADS
        ("stride", ctypes.c_int64),  # bytes of an element of the vector
        ("members", ctypes.c_int64),  # number of payloads
        ("payloads", ctypes.c_int64),  # array of their addresses
        ("payload_block", ctypes.c_int64),  # elements per block of the payloads
        ("payload_codes", ctypes.c_int64),  # offset of their codes
        ("weight", ctypes.c_double),  # of the sum of the payloads
        ("numel", ctypes.c_int64),
        ("first", ctypes.c_int64),  # the elements of one big block
        ("stop", ctypes.c_int64),
        ("partials", ctypes.c_int64),  # jobs.STATE_FLOATS for each segment of the big block
        ("stochastic", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("out", ctypes.c_int64),  # decoding: where to, the kind of its elements, and whether to add
        ("out_kind", ctypes.c_int64),
        ("add", ctypes.c_int64),
        ("stream", ctypes.c_int64),  # bypass the caches
    )

    def run(self, kernel: int, numel: int) -> None:
        """Run the kernel at an address on torch's threads, for ``numel`` elements, and wait for them."""
        threads = 1 if numel <= SERIAL_ELEMENTS else min(torch.get_num_threads(), self.items)
        openmp.run(kernel, ctypes.addressof(self), threads=threads)


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

    def _load(self, name: str, element: ir.Type) -> Value:
        return self._kernel.load(self._kernel.arguments[0], element, getattr(Job, name).offset // 8)


def add_entry(module: ir.Module, name: str, emit: Callable[[Kernel, JobView, Value], None]) -> None:
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
    if not IS_X86:
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
