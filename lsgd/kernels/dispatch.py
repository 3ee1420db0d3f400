"""The public operations: they check arguments, allocate outputs, and choose the path by device."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lsgd.errors import ConfigError
from lsgd.kernels.layout import DEFAULT_BLOCK, DTYPES, Layout, Quantized, check_payload_tensor
from lsgd.kernels.reference import ReferencePath

_log = logging.getLogger(__name__)

Rounding = Literal["nearest", "stochastic"]
Reduction = Literal["sum", "mean"]


@functools.cache
def path_for(device_type: str) -> ReferencePath:
    """Return the fastest path that works here for a type of device, determined at the first call.

    If the fast path is not available, log the reason and the remedy once, and return the reference.
    """
    if device_type == "cpu":
        try:
            from lsgd.kernels.cpu.path import CpuPath

            return CpuPath()
        except (ImportError, OSError, RuntimeError) as error:
            remedy = "; pip install llvmlite" if isinstance(error, ImportError) else ""
            _log.warning("the 8-bit kernels run in plain torch on the CPU, ten times slower: %s%s", error, remedy)
    elif device_type == "cuda":
        try:
            from lsgd.kernels.cuda.path import CudaPath

            return CudaPath()
        except (ImportError, OSError, RuntimeError) as error:
            _log.warning("the 8-bit kernels run in plain torch on CUDA, several times slower: %s", error)
    return ReferencePath()


def quantize(
    x: Tensor,
    *,
    block: int | None = DEFAULT_BLOCK,
    rounding: Rounding = "nearest",
    seed: int = 0,
    out: Tensor | Quantized | None = None,
) -> Quantized:
    """Quantize a tensor to 8 bits per element, with one range per block of elements.

    NaN or Inf in x does not raise here, because that would wait for a GPU. It sets the payload's flag, and its block
    decodes to NaN. :meth:`Quantized.check` raises.

    Args:
        x: float32, float16 or bfloat16, any shape; read as one flat vector, copied first if it is not contiguous.
        block: Elements per block; None: the whole vector is one block.
        rounding: ``nearest``, half to even, or ``stochastic``, which is unbiased.
        seed: Key of stochastic rounding, 0 to 2**64 - 1. The same seed always rounds element i the same way, so give
            every member, round and tensor its own.
        out: Where to write: a payload of the right size on x's device, or the result of an earlier call for a vector
            of the same layout. Then nothing is allocated.

    Returns:
        The quantized vector. Equal x, block, rounding and seed give equal bytes on every device.

    Raises:
        ConfigError: An argument is out of range, or out does not fit.
    """
    x = x.detach()
    key = _key(rounding, seed)
    result = _output_payload(Layout(x.numel(), block, x.dtype), out, x.device)
    path_for(x.device.type).quantize(x.contiguous(), result.layout, result.payload, key)
    return result


def dequantize(q: Quantized, *, out: Tensor | None = None) -> Tensor:
    """Decode a quantized vector.

    Args:
        q: The vector; blocks with NaN or Inf decode to NaN.
        out: Where to write: contiguous, q.numel elements of any shape, float32, float16 or bfloat16, on q's device.

    Returns:
        ``out``, or a new tensor of shape (q.numel,) and the dtype that was quantized.

    Raises:
        ConfigError: out does not fit.
    """
    if out is None:
        out = torch.empty(q.numel, dtype=q.layout.dtype, device=q.payload.device)
    else:
        _check_output(out, q)
    path_for(q.payload.device.type).dequantize(q, out.detach())
    return out


def dequantize_add(q: Quantized, out: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Add alpha times the decoded vector to a tensor in place, in one pass: out += alpha * decoded.

    Args:
        q: The vector.
        out: Contiguous, q.numel elements of any shape, float32, float16 or bfloat16, on q's device; changed.
        alpha: The factor; the sum is computed in float32 and rounded once to out's dtype.

    Returns:
        ``out``.

    Raises:
        ConfigError: out does not fit.
    """
    _check_output(out, q)
    path_for(q.payload.device.type).dequantize_add(q, out.detach(), float(alpha))
    return out


def dequantize_reduce(qs: Sequence[Quantized], *, op: Reduction = "mean", out: Tensor | None = None) -> Tensor:
    """Decode the same chunk of several members and add them up in one pass.

    Args:
        qs: One quantized chunk per member, at least one, with equal numel and block; added in this order.
        op: ``sum``, or ``mean``: the float32 sum times float32(1 / members).
        out: float32, contiguous, as many elements in any shape, on the same device.

    Returns:
        ``out``, or a new float32 tensor of shape (numel,).

    Raises:
        ConfigError: The chunks differ, op is unknown, or out does not fit.
    """
    weight = _weight(qs, op)
    if out is None:
        out = torch.empty(qs[0].numel, dtype=torch.float32, device=qs[0].payload.device)
    else:
        _check_output(out, qs[0])
        if out.dtype != torch.float32:
            raise ConfigError(f"out must be float32, but is {out.dtype}")
    path_for(out.device.type).dequantize_reduce(qs, out.detach(), weight)
    return out


def dequantize_reduce_quantize(
    qs: Sequence[Quantized],
    *,
    op: Reduction = "mean",
    block: int | None = DEFAULT_BLOCK,
    rounding: Rounding = "nearest",
    seed: int = 0,
    out: Tensor | Quantized | None = None,
) -> Quantized:
    """Do :func:`dequantize_reduce` and quantize the result, without writing it out in between.

    Args:
        qs: One quantized chunk per member, at least one, with equal numel and block; added in this order.
        op: ``sum`` or ``mean``.
        block: Elements per block of the result; may differ from the chunks'.
        rounding: As in :func:`quantize`.
        seed: As in :func:`quantize`.
        out: As in :func:`quantize`, for a float32 vector of the chunks' numel.

    Returns:
        The quantized reduction, dtype float32: the same bytes as ``quantize(dequantize_reduce(qs))``.

    Raises:
        ConfigError: The chunks differ, an argument is out of range, or out does not fit.
    """
    weight = _weight(qs, op)
    key = _key(rounding, seed)
    layout = Layout(qs[0].numel, block, torch.float32)
    result = _output_payload(layout, out, qs[0].payload.device)
    path_for(result.payload.device.type).dequantize_reduce_quantize(qs, weight, layout, result.payload, key)
    return result


def _key(rounding: str, seed: int) -> int | None:
    """Return the seed of stochastic rounding; None for nearest."""
    if rounding not in ("nearest", "stochastic"):
        raise ConfigError(f"rounding must be 'nearest' or 'stochastic', but is {rounding!r}")
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed must be in 0..2**64 - 1, but is {seed}")
    return seed if rounding == "stochastic" else None


def _weight(qs: Sequence[Quantized], op: str) -> float:
    """Return the factor of the sum, after checking that the chunks match."""
    if op not in ("sum", "mean"):
        raise ConfigError(f"op must be 'sum' or 'mean', but is {op!r}")
    if not qs:
        raise ConfigError("there is nothing to reduce: qs is empty")
    first = qs[0]
    for q in qs[1:]:
        same = q.numel == first.numel and q.layout.block == first.layout.block
        if not same or q.payload.device != first.payload.device:
            raise ConfigError(f"the chunks to reduce differ: {first} and {q}")
    return 1.0 if op == "sum" else ctypes.c_float(1.0 / len(qs)).value


def _output_payload(layout: Layout, out: Tensor | Quantized | None, device: torch.device) -> Quantized:
    if out is None:
        return Quantized(layout.empty(device=device), layout)
    payload = out.payload if isinstance(out, Quantized) else out
    check_payload_tensor(payload, "out")
    if payload.numel() != layout.nbytes or payload.device != device:
        raise ConfigError(
            f"out must have {layout.nbytes} bytes on {device} for {layout}, "
            f"but has {payload.numel()} on {payload.device}"
        )
    return Quantized(payload, layout)


def _check_output(out: Tensor, q: Quantized) -> None:
    if out.dtype not in DTYPES or not out.is_contiguous() or out.numel() != q.numel:
        raise ConfigError(
            f"out must be contiguous float32, float16 or bfloat16 with {q.numel} elements, but is {out.dtype} of "
            f"shape {tuple(out.shape)}, {'' if out.is_contiguous() else 'not '}contiguous"
        )
    if out.device != q.payload.device:
        raise ConfigError(f"out is on {out.device}, but the payload is on {q.payload.device}")
