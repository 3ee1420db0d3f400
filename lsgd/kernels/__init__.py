"""8-bit min-max quantization: one specification, and two fast paths (CPU, CUDA) with the same bits.

:mod:`~lsgd.kernels.reference` is the definition; docs/concepts/kernels.md describes the payload.
Importing this compiles nothing.
"""

from lsgd.kernels import few_bits
from lsgd.kernels.dispatch import (
    dequantize,
    dequantize_add,
    dequantize_reduce,
    dequantize_reduce_quantize,
    quantize,
)
from lsgd.kernels.layout import DEFAULT_BLOCK, Layout, NonFiniteError, Quantized, payload_nbytes

__all__ = [
    "DEFAULT_BLOCK",
    "Layout",
    "NonFiniteError",
    "Quantized",
    "dequantize",
    "dequantize_add",
    "dequantize_reduce",
    "dequantize_reduce_quantize",
    "few_bits",
    "payload_nbytes",
    "quantize",
]
