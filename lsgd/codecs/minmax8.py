"""8 bits per element, between the least and the greatest element of a block, with :mod:`lsgd.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lsgd.codecs.base import Codec, kernels
from lsgd.errors import ConfigError
from lsgd.lazy import Tensor, torch
from lsgd.payload import HEADER_NBYTES, aligned


@dataclass(frozen=True)
class MinMax8(Codec):
    """One byte per element and eight per block; docs/concepts/kernels.md has the arithmetic.

    Args:
        block: elements that share one range of codes; 0: the whole vector.
    """

    name: ClassVar[str] = "minmax8"
    stochastic: ClassVar[bool] = True

    block: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.block < 1 << 31:
            raise ConfigError(f"block = {self.block} is not in 0 … {(1 << 31) - 1}")

    @property
    def unit(self) -> int:
        """The elements of a block."""
        return self.block or 1

    def nbytes(self, numel: int) -> int:
        """Return what ``lsgd.kernels.payload_nbytes`` does, without torch."""
        blocks = -(-numel // (self.block or max(numel, 1)))
        return HEADER_NBYTES + aligned(8 * blocks) + aligned(numel)

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Quantize."""
        kernels.quantize(x, block=self.block or None, rounding=_rounding(seed), seed=seed or 0, out=payload)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Dequantize."""
        q = self._read(payload, out.numel())
        if out.dtype == torch.float64:
            out.copy_(kernels.dequantize(q))
        else:
            kernels.dequantize(q, out=out)

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Dequantize and add in one pass."""
        if out.dtype == torch.float64:
            super().decode_add(payload, out, alpha)
        else:
            kernels.dequantize_add(self._read(payload, out.numel()), out, alpha=alpha)

    def reduce(self, payloads: Sequence[Tensor], out: Tensor, *, mean: bool) -> None:
        """Dequantize and add up in one pass."""
        parts = [self._read(payload, out.numel()) for payload in payloads]
        kernels.dequantize_reduce(parts, op="mean" if mean else "sum", out=out)

    def reduce_encode(
        self, payloads: Sequence[Tensor], payload: Tensor, *, numel: int, mean: bool, seed: int | None = None
    ) -> None:
        """Dequantize, add up and quantize in one pass."""
        kernels.dequantize_reduce_quantize(
            [self._read(each, numel) for each in payloads],
            op="mean" if mean else "sum",
            block=self.block or None,
            rounding=_rounding(seed),
            seed=seed or 0,
            out=payload,
        )

    def _read(self, payload: Tensor, numel: int) -> kernels.Quantized:
        kernels.layout.check_payload_tensor(payload, "payload")
        self.check(payload, numel)
        return kernels.Quantized(payload, kernels.Layout(numel, self.block or None, torch.float32))


def _rounding(seed: int | None) -> kernels.dispatch.Rounding:
    return "nearest" if seed is None else "stochastic"
