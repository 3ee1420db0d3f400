"""The codecs' compiled kernels, on the devices that have any: the same bytes as the codecs make in torch, but faster.

docs/concepts/kernels.md describes them. Importing this compiles and loads nothing, not even torch.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Container, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from lsgd.lazy import Tensor, torch

LEVELS_BLOCKS: Final = tuple(1 << i for i in range(6, 12))
"""Block sizes of the levels codecs that have kernels; larger ones would need too much straight-line code."""

_CLASSES: Final[Mapping[str, tuple[str, Container[int]]]] = {
    "levels": ("LevelsKernels", LEVELS_BLOCKS),
    "minmax4": ("MinMax4Kernels", range(64, (1 << 15) + 1, 64)),
    "minmax8": ("MinMax8Kernels", range(1 << 31)),
    "topk": ("TopKKernels", (4096,)),
}
"""The class of each family's kernels, and the block sizes that it supports."""

_log = logging.getLogger(__name__)


class Sum(NamedTuple):
    """``weight`` times the sum of vectors of ``numel`` elements, added in the order of their payloads.

    ``places`` are the bytes of a payload at which its parts begin.
    """

    payloads: Sequence[Tensor]
    places: Sequence[int]
    numel: int
    weight: float


class Kernels:
    """The kernels of one codec on one device.

    ``header`` and ``parts`` are a payload's, uint8. A non-finite element sets the header's flag.
    Vectors are contiguous and not empty.
    """

    narrow: ClassVar[bool] = False
    """Whether vectors may be float16 or bfloat16; otherwise they are float32."""

    reduces: ClassVar[bool] = False
    """Whether it has the optional operations, :meth:`reduce` and :meth:`reduce_encode`."""

    def takes(self, numel: int) -> int:
        """Return how many of ``numel`` elements, from the first, the kernels process: whole blocks, or all."""
        return numel

    def encode(self, x: Tensor, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of ``x``."""
        raise NotImplementedError

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        raise NotImplementedError

    def reduce(self, total: Sum, out: Tensor) -> None:
        """Write the sum to float32 ``out``."""
        raise NotImplementedError

    def reduce_encode(self, total: Sum, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of the sum, without writing that out in between."""
        raise NotImplementedError


@functools.cache
def kernels_for(device: torch.device, family: str, block: int, *form: float | None) -> Kernels | None:
    """Return a family's kernels for one block size and form on a device; None if there are none.

    The first call compiles them, on a GPU for seconds. If that fails, it logs why, and there are none.
    """
    modules = {"cpu": f"lsgd.kernels.cpu.{family}", "cuda": "lsgd.kernels.cuda.launch"}
    name, blocks = _CLASSES[family]
    if device.type not in modules or block not in blocks:
        return None
    try:
        module = importlib.import_module(modules[device.type])
        made = getattr(module, name)
        if device.type == "cuda":
            made = functools.partial(made, launch=module.cupy_launch(made.source, device))
        return made(block, *form)  # type: ignore[no-any-return]
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "; pip install llvmlite" if isinstance(error, ImportError) and device.type == "cpu" else ""
        _warn(device.type, f"{error}{remedy}")
        return None


@functools.cache
def _warn(device: str, reason: str) -> None:
    """Log once why there are no kernels."""
    _log.warning("codecs run in plain torch on %s, ten times slower: %s", device, " ".join(reason.split()))
