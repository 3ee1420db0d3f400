"""The codecs on CUDA: launches the kernels of few_bits.cu and minmax8.cu.

NVRTC, through CuPy, compiles a file once in a process for each architecture. That takes one to three seconds, and
nothing is kept on disk. The kernels get the tensors' addresses, so nothing is copied, and run on torch's current stream
of the tensors' device. They produce the same bytes as the codecs do in torch, including those of a shorter last block.
This is the only module that imports CuPy.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lsgd.kernels import Kernels, Sum
from lsgd.payload import FLAGS_OFFSET

FEW_BITS: Final = Path(__file__).with_name("few_bits.cu")
MINMAX8: Final = Path(__file__).with_name("minmax8.cu")
COMPILE_OPTIONS: Final = ("-std=c++14", "-fmad=false")

THREADS: Final = 256  # topk's kernels are written for this number
WARPS: Final = THREADS // 32
MAX_THREADS: Final = 1024
# Of minmax8:
ELEMENTS: Final = 8  # per thread and step
CHUNKS: Final = 4  # of ELEMENTS that a thread can keep in registers
# The ranges of this many segments fit into the codes of any block too big for one thread block's registers.
MAX_SEGMENTS: Final = 1024
ELEMENTS_PER_DECODER: Final = 16

_Arguments: TypeAlias = Sequence[int | float]  # to the kernel, a ``long long`` and a ``float``

Launch: TypeAlias = Callable[[str, int, int, _Arguments], None]
"""Queues a kernel (by name, with grid, threads and arguments) on the current stream of one device."""


class _Stream(NamedTuple):
    """A stream's handle, where CuPy looks for it."""

    ptr: int


class CupyLaunch:
    """Launches a source's kernels on one device through CuPy; they take only ``long long`` and ``float``.

    They are compiled and loaded here, not at the first launch, and without ``cupy.RawModule``, which always makes
    subnormal numbers zero (``-ftz=true``).

    Raises:
        ImportError: CuPy cannot be imported.
        RuntimeError: CuPy is built for another CUDA than torch's, finds no GPU, or cannot compile or load the source.
    """

    def __init__(self, source: str, device: torch.device) -> None:
        version = torch.version.cuda
        if version is None:
            raise RuntimeError("this build of torch has no CUDA (perhaps it is for ROCm), so CuPy cannot work with it")
        major = int(version.split(".")[0])
        remedy = f"pip install cupy-cuda{major}x"
        try:
            import cupy
        except Exception as error:  # CuPy 13.0 beside NumPy 2 raises AttributeError
            raise ImportError(f"CuPy cannot be imported ({error}); {remedy}") from error
        built_for = cupy.cuda.runtime.runtimeGetVersion() // 1000
        if built_for != major:
            raise RuntimeError(f"CuPy is built for CUDA {built_for}, torch for CUDA {major}; {remedy}")
        if not cupy.cuda.is_available():
            raise RuntimeError(f"CuPy finds no GPU though torch does; {remedy}")
        self._device, self._device_of = device, cupy.cuda.Device  # one for each launch: threads must not share it
        self._float: Any = cupy.float32
        self._functions: dict[str, Any] = {}
        try:
            code = _compiled(source, cupy.cuda.Device(device.index).compute_capability)
            self._module: Any = cupy.cuda.function.Module()
            with self._device_of(device.index):
                self._module.load(code)
        except Exception as error:  # CuPy's errors have no base in common
            raise RuntimeError(f"CuPy cannot compile or load the kernels for {device}: {error}") from error

    def __call__(self, kernel: str, grid: int, threads: int, arguments: _Arguments) -> None:
        """Queue the kernel."""
        typed = tuple(self._float(a) if isinstance(a, float) else a for a in arguments)
        stream = _Stream(torch.cuda.current_stream(self._device).cuda_stream)
        with self._device_of(self._device.index):
            function = self._functions.get(kernel)
            if function is None:
                function = self._functions[kernel] = self._module.get_function(kernel)
            function((grid,), (threads,), typed, stream=stream)


@functools.cache
def _compiled(source: str, architecture: str) -> bytes:
    """Return a source's code for an architecture, such as ``90``."""
    import cupy

    code: bytes
    code, _ = cupy.cuda.compiler.compile_using_nvrtc(source, COMPILE_OPTIONS, architecture, cache_in_memory=True)
    return code


@functools.cache
def cupy_launch(source: Path, device: torch.device) -> Launch:
    """Return the launcher of a file's kernels on a device; raises like :class:`CupyLaunch`."""
    return CupyLaunch(source.read_text(), device)


# ---- levels1, levels2, minmax4, topk -----------------------------------------------------------------------------


class _FewBitsKernels(Kernels):
    """Launches the kernels of a low-bit codec; a thread block works on ``elements``.

    ``encoder`` and ``decoder`` are a kernel's name, and its arguments besides arrays and their length.
    """

    source: ClassVar[Path] = FEW_BITS

    def __init__(
        self, encoder: tuple[str, _Arguments], decoder: tuple[str, _Arguments], elements: int, launch: Launch
    ) -> None:
        self._encoder, self._decoder = encoder, decoder
        self._elements = elements
        self._launch = launch

    def encode(self, x: Tensor, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of ``x``."""
        kernel, form = self._encoder
        self._run(kernel, x, (x.data_ptr(), *self._arrays(parts), header.data_ptr() + FLAGS_OFFSET, x.numel(), *form))

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        kernel, form = self._decoder
        added = (0.0, 0) if alpha is None else (float(alpha), 1)
        self._run(kernel, out, (*self._arrays(parts), out.data_ptr(), out.numel(), *form, *added))

    def _arrays(self, parts: Sequence[Tensor]) -> list[int]:
        return [part.data_ptr() for part in parts]

    def _run(self, kernel: str, values: Tensor, arguments: _Arguments) -> None:
        self._launch(kernel, -(-values.numel() // self._elements), THREADS, arguments)


class LevelsKernels(_FewBitsKernels):
    """The kernels for one block size and these levels; see :class:`lsgd.codecs.levels.ScaledBlocks`."""

    def __init__(self, block: int, near: float, far: float, threshold: float | None, launch: Launch) -> None:
        steps = (threshold or 0.0, near, far - near, near**2, far**2 - near**2)
        constants = struct.unpack("<5q", struct.pack("<5d", *steps))
        encoder = f"encode_levels{1 if threshold is None else 2}_{block}"
        super().__init__((encoder, constants), ("decode_levels", (block, near, far)), WARPS * block, launch)

    def _arrays(self, parts: Sequence[Tensor]) -> list[int]:
        """Return the addresses of scales, signs and fars; 0 for a missing part."""
        return [*super()._arrays(parts), 0][:3]


class MinMax4Kernels(_FewBitsKernels):
    """The kernels for one block size."""

    def __init__(self, block: int, launch: Launch) -> None:
        super().__init__(("encode_minmax4", (block,)), ("decode_minmax4", (block,)), WARPS * block, launch)


class TopKKernels(_FewBitsKernels):
    """The kernels for chunks of 4,096 and one ``k``, a power of two from 8 to half a chunk."""

    def __init__(self, chunk: int, k: int, launch: Launch) -> None:
        super().__init__(("encode_topk", (k,)), ("decode_topk", (k,)), chunk, launch)


# ---- minmax8 -----------------------------------------------------------------------------------------------------


class MinMax8Kernels(Kernels):
    """The kernels for one block size; 0: the whole vector is one block."""

    source: ClassVar[Path] = MINMAX8
    narrow: ClassVar[bool] = True
    reduces: ClassVar[bool] = True

    def __init__(self, block: int, launch: Launch) -> None:
        self._block = block
        self._launch = launch

    def encode(self, x: Tensor, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of ``x``."""
        source = (x.data_ptr(), 0, 0, 1, 0, 0, 1.0)
        self._encode(_name(x.dtype), source, header, parts, x.numel(), seed)

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        verb, more = ("dequantize", ()) if alpha is None else ("dequantize_add", (float(alpha),))
        numel, (scales, codes) = out.numel(), (part.data_ptr() for part in parts)
        where = (scales, codes, out.data_ptr(), numel, *self._divisor(numel))
        grid = -(-numel // (THREADS * ELEMENTS_PER_DECODER))
        self._launch(f"{verb}_{_name(out.dtype)}", grid, THREADS, (*where, *more))

    def reduce(self, total: Sum, out: Tensor) -> None:
        """Write the sum to ``out``."""
        source, keep = self._payloads(total)
        grid = -(-out.numel() // (THREADS * ELEMENTS))
        self._launch("dequantize_reduce", grid, THREADS, (*source, out.data_ptr(), out.numel()))
        del keep  # the stream reuses it only after the kernel

    def reduce_encode(self, total: Sum, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of the sum."""
        source, keep = self._payloads(total)
        self._encode("payloads", source, header, parts, total.numel, seed)
        del keep  # the stream reuses it only after the kernels

    def _encode(
        self, name: str, source: _Arguments, header: Tensor, parts: Sequence[Tensor], numel: int, seed: int | None
    ) -> None:
        block = self._block or numel
        blocks, most = -(-numel // block), MAX_THREADS * ELEMENTS * CHUNKS
        scales, codes = (part.data_ptr() for part in parts)
        target = (scales, codes, header.data_ptr() + FLAGS_OFFSET)
        rounding = "nearest" if seed is None else "stochastic"
        key = 0 if seed is None else seed - (seed >> 63 << 64)  # the same 64 bits, as a signed number

        def quantize(first: int, count: int, longest: int) -> None:
            chunks = 1 if longest <= THREADS * ELEMENTS else CHUNKS
            threads = -(-longest // (32 * chunks * ELEMENTS)) * 32
            kernel = f"quantize_{name}_{chunks}_{rounding}"
            self._launch(kernel, count, threads, (*source, *target, first, numel, block, key))

        if block <= most:
            quantize(0, blocks, min(block, numel))
            return
        last = numel % block  # a shorter last block, which may not have room for its segments' ranges
        big = blocks - (0 < last <= most)
        if big:
            segments = min(MAX_SEGMENTS, -(-min(block, numel) // (THREADS * ELEMENTS)))
            where = (numel, block, segments)
            self._launch(f"find_ranges_{name}", big * segments, THREADS, (*source, codes, *where))
            self._launch("close_blocks", big, THREADS, (*target, block, segments))
            kernel = f"write_codes_{name}_{rounding}"
            self._launch(kernel, big * segments, THREADS, (*source, scales, codes, *where, key))
        if big < blocks:
            quantize(big, 1, last)

    def _divisor(self, numel: int) -> tuple[int, int]:
        """Return the elements per block, and log2 of that, or -1 if it is not a power of two."""
        block = self._block or numel
        return block, block.bit_length() - 1 if block & (block - 1) == 0 else -1

    def _payloads(self, total: Sum) -> tuple[tuple[int | float, ...], Tensor | None]:
        """Return a source's seven arguments for payloads, and a tensor to keep alive for them.

        The kernels need payloads at equal distances, like rows of a receive buffer. Others are first copied together.
        """
        payloads, (scales, codes), numel, weight = total
        addresses, together = [payload.data_ptr() for payload in payloads], None
        stride = addresses[1] - addresses[0] if len(payloads) > 1 else 0
        if any(b - a != stride for a, b in itertools.pairwise(addresses)):
            together = torch.stack(list(payloads))
            addresses[0], stride = together.data_ptr(), payloads[0].numel()
        return (addresses[0] + scales, stride, len(payloads), *self._divisor(numel), codes - scales, weight), together


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
