"""What benchmarks.kernels measures: our paths, and what users have today."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lsgd.codecs import codec_of
from lsgd.codecs.minmax import MinMax8
from lsgd.kernels import Kernels
from lsgd.kernels.cpu.minmax8 import MinMax8Kernels
from lsgd.kernels.cuda.launch import CupyLaunch

BLOCK = 2048
MEMBERS = 8
SLEPT_CYCLES = 1_000_000
"""About half a millisecond: so long may Python take to queue a call."""

SCALES = 8 / BLOCK  # bytes of lo and unit per element
FEW_BITS = ("levels2", "levels1", "minmax4", "topk")

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One operation: the same call on each of the rotated buffers."""

    name: str
    bytes_per_element: float
    calls: list[Call]


class Device(Protocol):
    """Where the cases run and how they are timed."""

    def name(self) -> str:
        """Return its name."""

    def time(self, call: Call) -> float:
        """Return the seconds that one call takes."""

    def cases(self, numel: int, rotated: int, *, slow: bool) -> list[Case]:
        """Return the cases at one size, the copy first."""


class InTorch(MinMax8):
    """The 8-bit codec without kernels."""

    def kernels_on(self, device: torch.device) -> Kernels | None:
        """Return None."""
        return None


class OnAvx2(MinMax8):
    """The 8-bit codec with the kernels of a CPU without AVX-512."""

    def kernels_on(self, device: torch.device) -> Kernels | None:
        """Return the kernels."""
        return kernels_of_avx2(self.block)


@functools.cache
def kernels_of_avx2(block: int) -> Kernels:
    """Return the kernels for a block size."""
    return MinMax8Kernels(block, cpu="haswell")


def minmax8_cases(name: str, codec: MinMax8, buffers: list[tuple[Tensor, Tensor]]) -> list[Case]:
    """Every operation of the 8-bit codec on (input, output) pairs, outputs given."""
    payloads = []
    for x, _ in buffers:
        payloads.append(codec.empty(x.numel(), x.device))
        codec.encode(x, payloads[-1])
    scales = 8 / codec.width(buffers[0][0].numel())
    read = 4 if codec.block else 8
    tag = f"{name}, {f'blocks of {codec.block}' if codec.block else 'one block'}"
    triples = [(x, y, payload) for (x, y), payload in zip(buffers, payloads, strict=True)]
    return [
        Case(f"{tag}: nearest", read + 1 + scales, [partial(codec.encode, x, p) for x, _, p in triples]),
        Case(f"{tag}: stochastic", read + 1 + scales, [partial(codec.encode, x, p, 7) for x, _, p in triples]),
        Case(f"{tag}: dequantize", 5 + scales, [partial(codec.decode, p, y) for _, y, p in triples]),
        Case(f"{tag}: dequantize-add", 9 + scales, [partial(codec.decode_add, p, y, 1e-3) for _, y, p in triples]),
    ]


def codec_cases(text: str, buffers: list[tuple[Tensor, Tensor]]) -> list[Case]:
    """The operations of a codec on (input, output) pairs."""
    codec = codec_of(text)
    payloads = [codec.empty(x.numel(), x.device) for x, _ in buffers]
    nbytes = codec.element_nbytes
    triples = [(x, y, payload) for (x, y), payload in zip(buffers, payloads, strict=True)]
    return [
        Case(f"{text}: encode", 4 + nbytes, [partial(codec.encode, x, p) for x, _, p in triples]),
        Case(f"{text}: decode", 4 + nbytes, [partial(codec.decode, p, y) for _, y, p in triples]),
        Case(f"{text}: decode-add", 8 + nbytes, [partial(codec.decode_add, p, y, 1e-3) for _, y, p in triples]),
    ]


def reduce_case(name: str, x: Tensor) -> Case:
    """Dequantize, add up and quantize again the chunks of eight members, each an eighth of the elements."""
    codec, numel = MinMax8(BLOCK), x.numel() // MEMBERS
    rows = torch.empty(MEMBERS + 1, codec.nbytes(numel), dtype=torch.uint8, device=x.device)
    chunks = x.view(-1)[: numel * MEMBERS].view(MEMBERS, -1)
    for row, chunk in zip(rows, chunks, strict=False):
        codec.encode(chunk, row)
    call = partial(codec.reduce_encode, list(rows[:MEMBERS]), rows[MEMBERS], numel=numel, mean=True)
    return Case(f"{name}: reduce {MEMBERS} members", (1 + SCALES) * (1 + 1 / MEMBERS), [call])


def blocks_of(x: Tensor) -> Tensor:
    """Return the whole blocks as rows."""
    return x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)


def plain_nearest(rows: Tensor, codes: Tensor) -> None:
    """Quantize as one would write it in torch, without our guards: no flag, no care for constants."""
    lo, hi = rows.aminmax(dim=1, keepdim=True)
    codes.copy_(((rows - lo) * (255 / (hi - lo))).round().to(torch.uint8))


def plain_stochastic(rows: Tensor, codes: Tensor) -> None:
    """The same with torch's own random numbers."""
    lo, hi = rows.aminmax(dim=1, keepdim=True)
    codes.copy_(((rows - lo) * (255 / (hi - lo)) + torch.rand_like(rows)).floor().clamp(max=255).to(torch.uint8))


def plain_dequantize(codes: Tensor, lo: Tensor, unit: Tensor, out: Tensor) -> None:
    """Decode as one would write it in torch."""
    out.copy_(codes.to(torch.float32) * unit + lo)


def torch_cases(buffers: list[tuple[Tensor, Tensor]], wrap: Callable[[Any], Any], name: str) -> list[Case]:
    """What plain torch does, eager or compiled."""
    nearest, stochastic, decode = wrap(plain_nearest), wrap(plain_stochastic), wrap(plain_dequantize)
    codes = torch.empty_like(blocks_of(buffers[0][0]), dtype=torch.uint8)
    lo, hi = blocks_of(buffers[0][0]).aminmax(dim=1, keepdim=True)
    unit = (hi - lo) / 255
    rows = [(blocks_of(x), blocks_of(y)) for x, y in buffers]
    return [
        Case(f"{name}: nearest", 5 + SCALES, [partial(nearest, x, codes) for x, _ in rows]),
        Case(f"{name}: stochastic", 5 + SCALES, [partial(stochastic, x, codes) for x, _ in rows]),
        Case(f"{name}: dequantize", 5 + SCALES, [partial(decode, codes, lo, unit, y) for _, y in rows]),
    ]


def quantize_per_tensor_case(buffers: list[tuple[Tensor, Tensor]]) -> Case:
    """torch.quantize_per_tensor, with the range found first, as it must be."""

    def call(x: Tensor) -> object:
        lo, hi = x.aminmax()
        scale = float(hi - lo) / 255
        return torch.quantize_per_tensor(x, scale, min(255, max(0, round(-float(lo) / scale))), torch.quint8)

    return Case("torch.quantize_per_tensor", 9, [partial(call, x) for x, _ in buffers])


class CpuDevice:
    """This machine's processor."""

    def name(self) -> str:
        """Return what torch calls it."""
        return "cpu"

    def time(self, call: Call) -> float:
        """Return the wall time."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def cases(self, numel: int, rotated: int, *, slow: bool) -> list[Case]:
        """The copy, both instruction sets, and plain torch."""
        buffers = [(torch.randn(numel), torch.zeros(numel)) for _ in range(rotated)]
        found = [
            Case("copy_", 8, [partial(y.copy_, x) for x, y in buffers]),
            *minmax8_cases("lsgd", MinMax8(BLOCK), buffers),
            *minmax8_cases("lsgd", MinMax8(0), buffers)[:2],
            reduce_case("lsgd", buffers[0][0]),
            *(case for codec in FEW_BITS for case in codec_cases(codec, buffers)),
            *minmax8_cases("lsgd as on AVX2", OnAvx2(BLOCK), buffers),
            *torch_cases(buffers, lambda function: function, "torch eager"),
            quantize_per_tensor_case(buffers),
        ]
        if slow:
            found += torch_cases(buffers, lambda f: torch.compile(f, dynamic=False), "torch.compile")
        return found


class CudaDevice:
    """The first GPU."""

    def name(self) -> str:
        """Return its name."""
        return torch.cuda.get_device_name()

    def time(self, call: Call) -> float:
        """Return the time on the GPU, by events around the call, which is queued while the GPU sleeps."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEPT_CYCLES)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def cases(self, numel: int, rotated: int, *, slow: bool) -> list[Case]:
        """The copy kernel, our kernels, plain torch, and the sequence of three kernels."""
        buffers = [(torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")) for _ in range(rotated)]
        found = [
            Case("float4 copy kernel", 8, float4_copies(buffers)),
            *minmax8_cases("cuda", MinMax8(BLOCK), buffers),
            *minmax8_cases("cuda", MinMax8(0), buffers)[:2],
            reduce_case("cuda", buffers[0][0]),
            *(case for codec in FEW_BITS for case in codec_cases(codec, buffers)),
            *minmax8_cases("in torch", InTorch(BLOCK), buffers),
            *torch_cases(buffers, lambda function: function, "min, max and codes apart"),
            quantize_per_tensor_case(buffers),
        ]
        if slow:
            found += torch_cases(buffers, lambda f: torch.compile(f, dynamic=False), "torch.compile")
        return found


FLOAT4_COPY = r"""
extern "C" __global__ void copy(long long from, long long to, long long count) {
  long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (index < count) ((float4*)to)[index] = ((const float4*)from)[index];
}
"""


def float4_copies(buffers: list[tuple[Tensor, Tensor]]) -> list[Call]:
    """Return calls that copy by a kernel of our own; torch's copy where CuPy is missing."""
    try:
        launch = CupyLaunch(FLOAT4_COPY, buffers[0][0].device)
    except (ImportError, RuntimeError):
        return [partial(y.copy_, x) for x, y in buffers]

    def copy(x: Tensor, y: Tensor) -> None:
        count = x.numel() // 4
        launch("copy", -(-count // 256), 256, (x.data_ptr(), y.data_ptr(), count))

    return [partial(copy, x, y) for x, y in buffers]
