"""The CUDA path: the kernels of quantize.cu, which CuPy compiles at first use and keeps in its disk cache.

Kernels get the tensors' addresses, so nothing is copied, and run on torch's current stream of the tensors' device. This
is the only module that imports CuPy.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lsgd.kernels.layout import Layout, Quantized
from lsgd.kernels.reference import ReferencePath
from lsgd.payload import HEADER_NBYTES

SOURCE: Final = Path(__file__).with_name("quantize.cu")
COMPILE_OPTIONS: Final = ("-std=c++14", "-fmad=false")

ELEMENTS: Final = 8  # per thread and step
THREADS: Final = 256
MAX_THREADS: Final = 1024
CHUNKS: Final = 4  # of ELEMENTS that a thread can keep in registers
# The ranges of this many segments fit into the codes of any block too big for one thread block's registers.
MAX_SEGMENTS: Final = 1024
ELEMENTS_PER_DECODER: Final = 16


class Launch(Protocol):
    """Queues a kernel on the current stream of a device; every int is a ``long long``, every float a ``float``."""

    def __call__(
        self, device: torch.device, kernel: str, grid: int, threads: int, arguments: Sequence[int | float]
    ) -> None:
        """Queue the kernel."""


@dataclass(frozen=True)
class _Stream:
    """A stream's handle, in the form that CuPy 14 and later accept."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CupyLaunch:
    """Launches through CuPy.

    Args:
        source: CUDA C++ whose kernels are ``extern "C"`` and take only ``long long`` and ``float``.

    Raises:
        ImportError: CuPy is not installed.
        RuntimeError: CuPy is built for a CUDA version other than torch's, or finds no GPU.
    """

    def __init__(self, source: str | None = None) -> None:
        version = torch.version.cuda
        if version is None:
            raise RuntimeError("this build of torch has no CUDA (perhaps it is for ROCm), so CuPy cannot work with it")
        major = int(version.split(".")[0])
        remedy = f"pip install cupy-cuda{major}x"
        try:
            import cupy
        except ImportError as error:
            raise ImportError(f"CuPy cannot be imported ({error}); {remedy}") from error
        built_for = cupy.cuda.runtime.runtimeGetVersion() // 1000
        if built_for != major:
            raise RuntimeError(f"CuPy is built for CUDA {built_for}, torch for CUDA {major}; {remedy}")
        if not cupy.cuda.is_available():
            raise RuntimeError(f"CuPy finds no GPU though torch does; {remedy}")
        self._cuda: Any = cupy.cuda
        self._float: Any = cupy.float32
        self._module: Any = cupy.RawModule(code=source or SOURCE.read_text(), options=COMPILE_OPTIONS)
        self._functions: dict[tuple[int, str], Any] = {}

    def __call__(
        self, device: torch.device, kernel: str, grid: int, threads: int, arguments: Sequence[int | float]
    ) -> None:
        """Queue the kernel."""
        with self._cuda.Device(device.index), self._stream(device):
            function = self._functions.get((device.index, kernel))
            if function is None:
                function = self._functions[device.index, kernel] = self._module.get_function(kernel)
            typed = tuple(self._float(a) if isinstance(a, float) else a for a in arguments)
            function((grid,), (threads,), typed)

    def _stream(self, device: torch.device) -> Any:
        """Return torch's current stream as CuPy's."""
        handle = torch.cuda.current_stream(device).cuda_stream
        if hasattr(self._cuda.Stream, "from_external"):
            return self._cuda.Stream.from_external(_Stream(handle))
        return self._cuda.ExternalStream(handle, device.index)  # CuPy 13


class CudaPath(ReferencePath):
    """The operations on CUDA tensors, faster.

    Args:
        launch: How to launch kernels; by default with CuPy.

    Raises:
        ImportError: CuPy is not installed.
        RuntimeError: CuPy does not match torch, or finds no GPU.
    """

    name = "cuda"

    def __init__(self, *, launch: Launch | None = None) -> None:
        self._launch = CupyLaunch() if launch is None else launch

    def quantize(self, x: Tensor, layout: Layout, payload: Tensor, seed: int | None) -> None:
        """As the reference does."""
        source = (x.data_ptr(), 0, 0, 1, 0, 0, 1.0)
        self._encode(_name(x.dtype), source, layout, payload, seed)

    def dequantize(self, q: Quantized, out: Tensor) -> None:
        """As the reference does."""
        self._decode(f"dequantize_{_name(out.dtype)}", q, out)

    def dequantize_add(self, q: Quantized, out: Tensor, alpha: float) -> None:
        """As the reference does."""
        self._decode(f"dequantize_add_{_name(out.dtype)}", q, out, alpha)

    def dequantize_reduce(self, qs: Sequence[Quantized], out: Tensor, weight: float) -> None:
        """As the reference does."""
        if out.numel():
            source, keep = _payloads(qs, weight)
            grid = -(-out.numel() // (THREADS * ELEMENTS))
            self._launch(out.device, "dequantize_reduce", grid, THREADS, (*source, out.data_ptr(), out.numel()))
            del keep  # the stream reuses it only after the kernel

    def dequantize_reduce_quantize(
        self, qs: Sequence[Quantized], weight: float, layout: Layout, payload: Tensor, seed: int | None
    ) -> None:
        """As the reference does."""
        source, keep = _payloads(qs, weight)
        self._encode("payloads", source, layout, payload, seed)
        del keep  # the stream reuses it only after the kernels

    def _encode(
        self,
        source_name: str,
        source: tuple[int | float, ...],
        layout: Layout,
        payload: Tensor,
        seed: int | None,
    ) -> None:
        device, target, numel, block = payload.device, payload.data_ptr(), layout.numel, layout.block_numel
        codes = layout.codes_offset
        ends = (HEADER_NBYTES + 8 * layout.blocks, codes, codes + numel, layout.nbytes)
        self._launch(device, "write_frame", 1, 32, (target, *struct.unpack("<4q", layout.header), *ends))
        rounding = "nearest" if seed is None else "stochastic"
        key = 0 if seed is None else seed - (seed >> 63 << 64)  # the same 64 bits, as a signed number

        def quantize(first: int, blocks: int, longest: int) -> None:
            chunks = 1 if longest <= THREADS * ELEMENTS else CHUNKS
            threads = -(-longest // (32 * chunks * ELEMENTS)) * 32
            kernel = f"quantize_{source_name}_{chunks}_{rounding}"
            self._launch(device, kernel, blocks, threads, (*source, target, first, numel, block, codes, key))

        if numel == 0:
            return
        if block <= MAX_THREADS * ELEMENTS * CHUNKS:
            quantize(0, layout.blocks, min(block, numel))
            return
        last = numel % block  # a shorter last block, which may not have room for its segments' ranges
        big = layout.blocks - (0 < last <= MAX_THREADS * ELEMENTS * CHUNKS)
        if big:
            segments = min(MAX_SEGMENTS, -(-min(block, numel) // (THREADS * ELEMENTS)))
            where = (target, numel, block, codes, segments)
            self._launch(device, f"find_ranges_{source_name}", big * segments, THREADS, (*source, *where))
            self._launch(device, "close_blocks", big, THREADS, (target, block, codes, segments))
            name = f"write_codes_{source_name}_{rounding}"
            self._launch(device, name, big * segments, THREADS, (*source, *where, key))
        if big < layout.blocks:
            quantize(big, 1, last)

    def _decode(self, kernel: str, q: Quantized, out: Tensor, *more: float) -> None:
        if q.numel:
            layout = q.layout
            grid = -(-q.numel // (THREADS * ELEMENTS_PER_DECODER))
            block = (layout.block_numel, _shift(layout.block_numel))
            where = (q.payload.data_ptr(), out.data_ptr(), q.numel, *block, layout.codes_offset)
            self._launch(out.device, kernel, grid, THREADS, (*where, *more))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shift(block: int) -> int:
    """Return log2(block), or -1 if block is not a power of two."""
    return block.bit_length() - 1 if block & (block - 1) == 0 else -1


def _payloads(qs: Sequence[Quantized], weight: float) -> tuple[tuple[int | float, ...], Tensor | None]:
    """Return a source's seven arguments for payloads, and a tensor to keep alive for them.

    The kernels need payloads at equal distances, like rows of a receive buffer. Others are first copied together.
    """
    layout = qs[0].layout
    addresses = [q.payload.data_ptr() for q in qs]
    stride = addresses[1] - addresses[0] if len(qs) > 1 else 0
    together = None
    if any(b - a != stride for a, b in itertools.pairwise(addresses)):
        together = torch.stack([q.payload for q in qs])
        addresses[0], stride = together.data_ptr(), layout.nbytes
    block = (layout.block_numel, _shift(layout.block_numel))
    return (addresses[0], stride, len(qs), *block, layout.codes_offset, weight), together
