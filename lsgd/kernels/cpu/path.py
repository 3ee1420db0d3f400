"""The fast CPU path: vector kernels that llvmlite compiles for this machine, on torch's own threads.

The first vector on a CPU imports llvmlite and compiles, which takes about half a second.
benchmarks/results/kernels.md says why this path was chosen and what else was measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lsgd.kernels.cpu.job import ITEM_ELEMENTS, Job
from lsgd.kernels.cpu.jobs import MAX_SEGMENTS, PAYLOADS, STATE_FLOATS, TILE, Jobs
from lsgd.kernels.cpu.machine import compiled, usable_host
from lsgd.kernels.cpu.tiles import BFLOAT16, FLOAT16, FLOAT32
from lsgd.kernels.layout import Layout, Quantized
from lsgd.kernels.reference import ReferencePath
from lsgd.payload import FLAGS_OFFSET, HEADER_NBYTES

BIG_BLOCK: Final = 1 << 18  # above this, threads share a block
STREAM_NBYTES: Final = 8 << 20  # outputs from this size bypass the caches, which they would only flush
_KINDS: Final = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


class CpuPath(ReferencePath):
    """The operations on CPU tensors, faster.

    Args:
        cpu: LLVM's name of the processor to compile for (``haswell``: AVX2 without AVX-512); by default the host's.

    Raises:
        ImportError: llvmlite is not installed, or too old.
        RuntimeError: The processor is an x86 from before 2013, without AVX2, F16C or FMA.
    """

    name = "cpu"

    def __init__(self, *, cpu: str | None = None) -> None:
        self._address = compiled(str(Jobs().module), *(usable_host() if cpu is None else (cpu, "")))

    def quantize(self, x: Tensor, layout: Layout, payload: Tensor, seed: int | None) -> None:
        """As the reference does."""
        job = Job(source=_KINDS[x.dtype], values=x.data_ptr(), stride=x.element_size())
        self._encode(job, layout, payload, seed)

    def dequantize(self, q: Quantized, out: Tensor) -> None:
        """As the reference does."""
        self._decode(q, out, None)

    def dequantize_add(self, q: Quantized, out: Tensor, alpha: float) -> None:
        """As the reference does."""
        self._decode(q, out, alpha)

    def dequantize_reduce(self, qs: Sequence[Quantized], out: Tensor, weight: float) -> None:
        """As the reference does."""
        job = _reading(qs, weight)
        job.out = out.data_ptr()
        self._run("reduce", job)

    def dequantize_reduce_quantize(
        self, qs: Sequence[Quantized], weight: float, layout: Layout, payload: Tensor, seed: int | None
    ) -> None:
        """As the reference does."""
        self._encode(_reading(qs, weight), layout, payload, seed)

    def _encode(self, job: Job, layout: Layout, payload: Tensor, seed: int | None) -> None:
        base = payload.data_ptr()
        _write_frame(base, layout)
        job.scales = base + HEADER_NBYTES
        job.codes = base + layout.codes_offset
        job.flags = base + FLAGS_OFFSET
        job.numel = layout.numel
        job.block = layout.block_numel
        job.blocks = layout.blocks
        job.stochastic = seed is not None
        job.seed = seed or 0
        if layout.block_numel > BIG_BLOCK:
            self._encode_big_blocks(job, layout)
        else:
            job.grain = max(1, ITEM_ELEMENTS // layout.block_numel)
            job.items = -(-layout.blocks // job.grain)
            job.run(self._address("blocks"), layout.numel)

    def _encode_big_blocks(self, job: Job, layout: Layout) -> None:
        partials = (ctypes.c_float * (MAX_SEGMENTS * STATE_FLOATS))()
        job.partials = ctypes.addressof(partials)
        for first in range(0, layout.numel, layout.block_numel):
            job.first, job.stop = first, min(first + layout.block_numel, layout.numel)
            numel = job.stop - job.first
            grain = max(ITEM_ELEMENTS, -(-numel // MAX_SEGMENTS))
            job.grain = -(-grain // TILE) * TILE
            job.items = -(-numel // job.grain)
            for kernel in ("partial", "finish"):
                job.counter = 0
                job.run(self._address(kernel), numel)

    def _decode(self, q: Quantized, out: Tensor, alpha: float | None) -> None:
        job = _reading((q,), 1.0)
        job.out = out.data_ptr()
        job.out_kind = _KINDS[out.dtype]
        job.add = alpha is not None
        job.alpha = alpha or 0.0
        # Stores that bypass the caches need 64-byte alignment, in every block.
        aligned = job.out % 64 == 0 and q.layout.block_numel % 16 == 0
        large = q.numel * out.element_size() >= STREAM_NBYTES
        job.stream = aligned and large and out.dtype == torch.float32
        self._run("decode", job)

    def _run(self, kernel: str, job: Job) -> None:
        job.grain = ITEM_ELEMENTS
        job.items = -(-job.numel // ITEM_ELEMENTS)
        job.run(self._address(kernel), job.numel)


def _reading(qs: Sequence[Quantized], weight: float) -> Job:
    """Return a job that reads payloads."""
    job, layout = Job(), qs[0].layout
    addresses = (ctypes.c_int64 * len(qs))(*[q.payload.data_ptr() for q in qs])
    job.payloads = ctypes.addressof(addresses)
    job.kept_alive = addresses
    job.source = PAYLOADS
    job.members = len(qs)
    job.weight = weight
    job.numel = layout.numel
    job.payload_block = layout.block_numel
    job.payload_codes = layout.codes_offset
    return job


def _write_frame(base: int, layout: Layout) -> None:
    """Write what the kernels leave out: the header, and the zeros after the scales and after the codes."""
    ctypes.memmove(base, layout.header, HEADER_NBYTES)
    behind_scales = HEADER_NBYTES + 8 * layout.blocks
    ctypes.memset(base + behind_scales, 0, layout.codes_offset - behind_scales)
    behind_codes = layout.codes_offset + layout.numel
    ctypes.memset(base + behind_codes, 0, layout.nbytes - behind_codes)
