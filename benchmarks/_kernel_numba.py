"""The candidate that lost on the CPU: numba, written for SIMD, with outputs given."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import _kernel_cases as cases


def _compile() -> tuple[Any, Any]:
    import numba

    @numba.njit(parallel=True, fastmath={"nnan", "nsz"}, cache=False)
    def nearest(x: Any, scales: Any, codes: Any, block: int) -> None:
        for b in numba.prange(x.size // block):
            part = x[b * block : (b + 1) * block]
            lo = hi = part[0]
            for i in range(block):
                lo = min(lo, part[i])
                hi = max(hi, part[i])
            unit = (hi - lo) / np.float32(255)
            inverse = np.float32(1) / unit if unit > 0 else np.float32(0)
            scales[b, 0] = lo
            scales[b, 1] = unit
            out = codes[b * block : (b + 1) * block]
            for i in range(block):
                out[i] = np.uint8(np.int32((part[i] - lo) * inverse + np.float32(0.5)))

    @numba.njit(parallel=True, cache=False)
    def dequantize(codes: Any, scales: Any, out: Any, block: int) -> None:
        for b in numba.prange(codes.size // block):
            lo, unit = scales[b, 0], scales[b, 1]
            part, target = codes[b * block : (b + 1) * block], out[b * block : (b + 1) * block]
            for i in range(block):
                target[i] = lo + np.float32(part[i]) * unit

    return nearest, dequantize


def cases_of(buffers: list[tuple[Tensor, Tensor]]) -> list[cases.Case]:
    """Nearest, without our guards, and decoding."""
    import numba

    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    nearest, dequantize = _compile()
    arrays = [(x.numpy(), y.numpy()) for x, y in buffers]
    numel = arrays[0][0].size
    scales, codes = np.zeros((max(1, numel // cases.BLOCK), 2), np.float32), np.zeros(numel, np.uint8)
    size = 5 + cases.SCALES
    return [
        cases.Case(
            "numba: nearest", size, [partial(nearest, x, scales, codes, cases.BLOCK) for x, _ in arrays]
        ),
        cases.Case(
            "numba: dequantize",
            size,
            [partial(dequantize, codes, scales, y, cases.BLOCK) for _, y in arrays],
        ),
    ]
