"""The header of a payload, version 2: the codec that wrote it, its parameters, and the number of elements.

Little-endian. docs/concepts/kernels.md has the same table.

========================  =====================================================================================
bytes                     content
========================  =====================================================================================
0 - 3                     ``b"LSGD"``
4                         version, 2
5                         dtype of the vector: 0 float32, 1 float16, 2 bfloat16
6 - 7                     second parameter of the codec, uint16; zero if it has none
8 - 15                    number of elements, uint64
16 - 19                   first parameter of the codec, uint32; in minmax8 elements per block, 0: one block
20 - 23                   flags, uint32; bit 0: the vector contains NaN or Inf
24 - 31                   name of the codec, ASCII, padded with zeros
32 -                      what the codec writes
========================  =====================================================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from lsgd.errors import ProtocolError

MAGIC: Final = b"LSGD"
VERSION: Final = 2
HEADER_NBYTES: Final = 32
FLAGS_OFFSET: Final = 20
FLAG_NONFINITE: Final = 1
DTYPE_NAMES: Final = ("float32", "float16", "bfloat16")
MAX_NAME_NBYTES: Final = 8
ALIGNMENT: Final = 16
"""Payloads begin at a multiple of this many bytes; in minmax8, so does each part."""

_FORM: Final = struct.Struct("<4sBBHQII8s")


@dataclass(frozen=True)
class Header:
    """The first 32 bytes of a payload; the table above describes the fields."""

    codec: str
    numel: int
    first: int = 0
    second: int = 0
    dtype: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        """Return the 32 bytes."""
        name = self.codec.encode("ascii")
        return _FORM.pack(MAGIC, VERSION, self.dtype, self.second, self.numel, self.first, self.flags, name)

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Return the header in 32 bytes from a peer; raise ProtocolError if they are none of this version."""
        magic, version, dtype, second, numel, first, flags, name = _FORM.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a payload begins with {MAGIC!r}, but these bytes begin with {magic!r}")
        if version != VERSION:
            raise ProtocolError(f"this payload has version {version}; this lsgd reads version {VERSION}")
        codec = name.rstrip(b"\0")
        if dtype >= len(DTYPE_NAMES) or flags & ~FLAG_NONFINITE or not (codec.isascii() and codec.isalnum()):
            raise ProtocolError(f"the header of this payload has values that version {VERSION} does not define")
        return cls(codec.decode("ascii"), numel, first, second, dtype, flags)

    @cached_property
    def _fixed(self) -> tuple[bytes, ...]:
        return _without_dtype_and_flags(self.pack())

    def refuse_other(self, data: bytes) -> None:
        """Raise ProtocolError if 32 bytes from a peer are not this header; dtype and flags may differ."""
        if _without_dtype_and_flags(data) != self._fixed:
            raise ProtocolError(f"this payload has {Header.parse(data)}, but {self} were expected")

    def __str__(self) -> str:
        return f"{self.numel} elements in {self.codec} with the parameters {self.first}, {self.second}"


def _without_dtype_and_flags(data: bytes) -> tuple[bytes, ...]:
    return data[:5], data[6:FLAGS_OFFSET], data[FLAGS_OFFSET + 4 :]
