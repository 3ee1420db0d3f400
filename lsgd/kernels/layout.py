"""The payload of minmax8: one contiguous uint8 tensor that contains a quantized vector.

========================  =====================================================================================
bytes                     content
========================  =====================================================================================
0 - 31                    the header (:mod:`lsgd.payload`), with the elements per block as first parameter
32 -                      ``lo`` and ``unit`` of each block, two float32; then zeros up to a multiple of 16
codes_offset -            one uint8 code per element; then zeros up to a multiple of 16
========================  =====================================================================================

A block with NaN or Inf has ``lo`` NaN, ``unit`` 0 and codes 0, so it decodes to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from lsgd.errors import ConfigError, LsgdError, ProtocolError
from lsgd.payload import ALIGNMENT, FLAG_NONFINITE, FLAGS_OFFSET, HEADER_NBYTES, Header, aligned

CODEC: Final = "minmax8"
DEFAULT_BLOCK: Final = 2048
MAX_BLOCK: Final = 2**31 - 1
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


class NonFiniteError(LsgdError, ArithmeticError):
    """A quantized vector contained NaN or Inf; its payload is flagged, and those blocks decode to NaN."""


@dataclass(frozen=True)
class Layout:
    """The layout of a vector's payload; payloads of equal layouts are interchangeable.

    Attributes:
        numel: Elements of the vector.
        block: Elements per block; None: the whole vector is one block.
        dtype: float32, float16 or bfloat16: the vector's dtype, and the default dtype of decoding.

    Raises:
        ConfigError: One of these is out of range.
    """

    numel: int
    block: int | None = DEFAULT_BLOCK
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ConfigError(f"numel must not be negative, but is {self.numel}")
        if self.block is not None and not 1 <= self.block <= MAX_BLOCK:
            raise ConfigError(f"block must be None or in 1..{MAX_BLOCK}, but is {self.block}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be float32, float16 or bfloat16, but is {self.dtype}")

    @cached_property
    def block_numel(self) -> int:
        """Elements per block, at least 1; the last block may be shorter."""
        return self.block or max(self.numel, 1)

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.numel // self.block_numel)

    @cached_property
    def codes_offset(self) -> int:
        """Byte at which the codes begin; a multiple of 16."""
        return HEADER_NBYTES + aligned(8 * self.blocks)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the payload; a multiple of 16, so rows of a matrix of payloads stay aligned."""
        return self.codes_offset + aligned(self.numel)

    @cached_property
    def header(self) -> bytes:
        """The first 32 bytes of a payload with clear flags."""
        return Header(CODEC, self.numel, self.block or 0, dtype=DTYPES.index(self.dtype)).pack()

    def empty(self, *, device: torch.device | str | None = None) -> Tensor:
        """Return an uninitialized uint8 tensor of the payload's size, for ``quantize(out=...)``."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def scales(self, payload: Tensor) -> Tensor:
        """Return the payload's float32 view of shape (blocks, 2): lo and unit of each block."""
        stop = HEADER_NBYTES + 8 * self.blocks
        return payload[HEADER_NBYTES:stop].view(torch.float32).view(self.blocks, 2)

    def codes(self, payload: Tensor) -> Tensor:
        """Return the payload's uint8 view of shape (numel,): the codes."""
        return payload[self.codes_offset : self.codes_offset + self.numel]


def payload_nbytes(numel: int, *, dtype: torch.dtype = torch.float32, block: int | None = DEFAULT_BLOCK) -> int:
    """Return the size in bytes of the payload of ``numel`` elements."""
    return Layout(numel, block, dtype).nbytes


def _read_header(payload: Tensor) -> tuple[Layout, int]:
    """Return the layout and the flags in the header of a peer's payload; on a GPU this waits for the stream.

    Raises:
        ProtocolError: The first 32 bytes are not a minmax8 header of this version.
    """
    found = Header.parse(bytes(payload[:HEADER_NBYTES].tolist()))
    if found.codec != CODEC:
        raise ProtocolError(f"this payload has the codec {found.codec}, but {CODEC} is expected")
    if found.first > MAX_BLOCK or found.second:
        raise ProtocolError(f"the header of this payload has parameters that {CODEC} does not define")
    return Layout(found.numel, found.first or None, DTYPES[found.dtype]), found.flags


def check_payload_tensor(payload: Tensor, what: str) -> None:
    """Refuse a tensor that cannot contain a payload.

    Raises:
        ConfigError: It is not a contiguous one-dimensional uint8 tensor aligned to 16 bytes.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise ConfigError(
            f"{what} must be a contiguous one-dimensional uint8 tensor, but is {payload.dtype} of shape "
            f"{tuple(payload.shape)}, {'' if payload.is_contiguous() else 'not '}contiguous"
        )
    if payload.data_ptr() % ALIGNMENT or payload.storage_offset() % 4:
        raise ConfigError(f"{what} must be aligned to {ALIGNMENT} bytes; clone() it, or pad its buffer")


@dataclass(slots=True, eq=False)
class Quantized:
    """A quantized vector: its payload, which alone is sent, and its layout.

    Attributes:
        payload: uint8, shape (layout.nbytes,).
        layout: Elements, block and dtype.
    """

    payload: Tensor
    layout: Layout

    @classmethod
    def from_payload(cls, payload: Tensor, *, layout: Layout | None = None) -> Quantized:
        """Read a payload that came from a peer.

        On a GPU, reading the header waits for the stream. With ``layout``, which both sides already know, only the
        length is compared there, so every access stays inside; :meth:`check` compares the header later.

        Args:
            payload: uint8, one-dimensional, contiguous, aligned to 16 bytes; kept, not copied.
            layout: The layout that the payload must have.

        Raises:
            ProtocolError: The payload is truncated, too long, of another version, or not of ``layout``.
            ConfigError: The tensor cannot contain a payload.
        """
        check_payload_tensor(payload, "payload")
        if payload.numel() < HEADER_NBYTES:
            raise ProtocolError(f"this payload has {payload.numel()} bytes; its header alone has {HEADER_NBYTES}")
        if layout is None or payload.device.type == "cpu":
            announced, _ = _read_header(payload)
            if layout is not None and announced != layout:
                raise ProtocolError(f"this payload has {announced}, but {layout} is expected")
            layout = announced
        if payload.numel() != layout.nbytes:
            raise ProtocolError(
                f"a payload of {layout.numel} elements in blocks of {layout.block} has {layout.nbytes} bytes, "
                f"but {payload.numel()} bytes came"
            )
        return cls(payload, layout)

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.layout.numel

    @property
    def flags(self) -> Tensor:
        """A view into the payload, int32, shape (1,): non-zero if the vector has NaN or Inf; does not synchronize."""
        return self.payload[FLAGS_OFFSET : FLAGS_OFFSET + 4].view(torch.int32)

    def check(self, name: str) -> None:
        """Check that the payload has the right header and finite values; on a GPU this waits for the stream.

        Args:
            name: The vector's name, for the message.

        Raises:
            NonFiniteError: The vector contained NaN or Inf.
            ProtocolError: The header does not match the layout.
        """
        announced, flags = _read_header(self.payload)
        if announced != self.layout:
            raise ProtocolError(f"the payload of {name} has {announced}, but {self.layout} is expected")
        if flags & FLAG_NONFINITE:
            raise NonFiniteError(f"{name} has NaN or Inf")

    def __repr__(self) -> str:
        return f"Quantized({self.layout}, device={str(self.payload.device)!r})"
