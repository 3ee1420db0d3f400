"""The fast CPU path: vector kernels that llvmlite compiles for this machine, on torch's own threads.

Nothing is compiled, and llvmlite is not imported, before the first vector on a CPU; that first call takes about half a
second. docs/performance/kernels.md says why this path was chosen and what else was measured.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from lsgd.kernels.cpu import openmp
from lsgd.kernels.cpu.machine import IS_X86, Machine, usable_host
from lsgd.kernels.layout import Layout, Quantized
from lsgd.kernels.reference import ReferencePath
from lsgd.payload import FLAGS_OFFSET, HEADER_NBYTES

if TYPE_CHECKING:
    from lsgd.kernels.cpu.jobs import Job

ITEM_ELEMENTS: Final = 1 << 15  # what a thread takes at a time
SERIAL_ELEMENTS: Final = 1 << 15  # below this, waking other threads does not pay off
BIG_BLOCK: Final = 1 << 18  # above this, the threads share a block
STREAM_NBYTES: Final = 8 << 20  # larger outputs bypass the caches, which they would only flush


class _Scratch(threading.local):
    """Memory for the ranges of the segments of a big block, for each calling thread."""

    def __init__(self) -> None:
        from lsgd.kernels.cpu.jobs import MAX_SEGMENTS, STATE_FLOATS

        self.partials = (ctypes.c_float * (MAX_SEGMENTS * STATE_FLOATS))()


class CpuPath(ReferencePath):
    """The operations on CPU tensors, faster.

    Args:
        cpu: Compile for this processor instead of the host's, by LLVM's name (``haswell``: AVX2 without AVX-512).
        features: LLVM's list of its features; the host's when ``cpu`` is not given.

    Raises:
        ImportError: llvmlite is not installed, or too old.
        RuntimeError: The processor is an x86 from before 2013, without AVX2, F16C or FMA.
    """

    name = "cpu"

    def __init__(self, *, cpu: str | None = None, features: str = "") -> None:
        if cpu is None:
            cpu, features = usable_host()
        from lsgd.kernels.cpu.jobs import program_text

        self._machine = Machine(program_text(mxcsr=IS_X86), cpu, features)
        self._scratch = _Scratch()

    def quantize(self, x: Tensor, layout: Layout, payload: Tensor, seed: int | None) -> None:
        """As the reference does."""
        job = _new_job(layout.numel)
        job.source = _KINDS[x.dtype]
        job.values = x.data_ptr()
        job.stride = x.element_size()
        self._encode(job, layout, payload, seed)

    def dequantize(self, q: Quantized, out: Tensor) -> None:
        """As the reference does."""
        self._decode(q, out, None)

    def dequantize_add(self, q: Quantized, out: Tensor, alpha: float) -> None:
        """As the reference does."""
        self._decode(q, out, alpha)

    def dequantize_reduce(self, qs: Sequence[Quantized], out: Tensor, weight: float) -> None:
        """As the reference does."""
        job = _new_job(out.numel())
        payloads = _read_payloads(job, qs, weight)
        job.out = out.data_ptr()
        self._launch("reduce", job, out.numel())
        del payloads  # kept alive until here: the job holds its address

    def dequantize_reduce_quantize(
        self, qs: Sequence[Quantized], weight: float, layout: Layout, payload: Tensor, seed: int | None
    ) -> None:
        """As the reference does."""
        job = _new_job(layout.numel)
        payloads = _read_payloads(job, qs, weight)
        self._encode(job, layout, payload, seed)
        del payloads  # kept alive until here: the job holds its address

    def _encode(self, job: Job, layout: Layout, payload: Tensor, seed: int | None) -> None:
        base = payload.data_ptr()
        _write_frame(base, layout)
        job.scales = base + HEADER_NBYTES
        job.codes = base + layout.codes_offset
        job.flags = base + FLAGS_OFFSET
        job.block = layout.block_numel
        job.blocks = layout.blocks
        job.stochastic = seed is not None
        job.seed = seed or 0
        if layout.block_numel > BIG_BLOCK:
            self._encode_big_blocks(job, layout)
        else:
            job.grain = max(1, ITEM_ELEMENTS // layout.block_numel)
            job.items = -(-layout.blocks // job.grain)
            self._run("blocks", job, layout.numel)

    def _encode_big_blocks(self, job: Job, layout: Layout) -> None:
        from lsgd.kernels.cpu.jobs import MAX_SEGMENTS, TILE

        job.partials = ctypes.addressof(self._scratch.partials)
        for first in range(0, layout.numel, layout.block_numel):
            job.first, job.stop = first, min(first + layout.block_numel, layout.numel)
            numel = job.stop - job.first
            grain = max(ITEM_ELEMENTS, -(-numel // MAX_SEGMENTS))
            job.grain = -(-grain // TILE) * TILE
            job.items = -(-numel // job.grain)
            for kernel in ("partial", "finish"):
                job.counter = 0
                self._run(kernel, job, numel)

    def _decode(self, q: Quantized, out: Tensor, alpha: float | None) -> None:
        job = _new_job(q.numel)
        payloads = _read_payloads(job, (q,), 1.0)
        job.out = out.data_ptr()
        job.out_kind = _KINDS[out.dtype]
        job.add = alpha is not None
        job.alpha = alpha or 0.0
        # Stores that bypass the caches need addresses at multiples of 64, in every block.
        aligned = job.out % 64 == 0 and q.layout.block_numel % 16 == 0
        large = q.numel * out.element_size() >= STREAM_NBYTES
        job.stream = aligned and large and out.dtype == torch.float32
        self._launch("decode", job, q.numel)
        del payloads  # kept alive until here: the job holds its address

    def _launch(self, kernel: str, job: Job, numel: int) -> None:
        job.grain = ITEM_ELEMENTS
        job.items = -(-numel // ITEM_ELEMENTS)
        self._run(kernel, job, numel)

    def _run(self, kernel: str, job: Job, numel: int) -> None:
        threads = 1 if numel <= SERIAL_ELEMENTS else min(torch.get_num_threads(), job.items)
        openmp.run(self._machine.address(kernel), ctypes.addressof(job), threads=threads)


_KINDS: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _new_job(numel: int) -> Job:
    from lsgd.kernels.cpu.jobs import Job

    job = Job()
    job.numel = numel
    return job


def _read_payloads(job: Job, qs: Sequence[Quantized], weight: float) -> ctypes.Array[ctypes.c_int64]:
    """Make the payloads the job's source; the returned array must outlive the launch."""
    from lsgd.kernels.cpu.jobs import PAYLOADS

    addresses = (ctypes.c_int64 * len(qs))(*(q.payload.data_ptr() for q in qs))
    job.source = PAYLOADS
    job.members = len(qs)
    job.payloads = ctypes.addressof(addresses)
    job.payload_block = qs[0].layout.block_numel
    job.payload_codes = qs[0].layout.codes_offset
    job.weight = weight
    return addresses


def _write_frame(base: int, layout: Layout) -> None:
    """Write what the kernels do not: the header, and the zeros after the scales and after the codes."""
    ctypes.memmove(base, layout.header, HEADER_NBYTES)
    behind_scales = HEADER_NBYTES + 8 * layout.blocks
    ctypes.memset(base + behind_scales, 0, layout.codes_offset - behind_scales)
    behind_codes = layout.codes_offset + layout.numel
    ctypes.memset(base + behind_codes, 0, layout.nbytes - behind_codes)
