"""What every codec is: a few verbs on payloads, which begin with a header that says whose they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from lsgd.errors import ConfigError, ProtocolError
from lsgd.lazy import torch
from lsgd.payload import DTYPE_NAMES, FLAGS_OFFSET, HEADER_NBYTES, MAX_NAME_NBYTES, Header

if TYPE_CHECKING:
    from torch import Tensor

LARGE = 1 << 24


@dataclass(frozen=True)
class Codec:
    """Base of the codecs: ways to write a vector as a payload, one contiguous uint8 tensor.

    A codec is a frozen dataclass; its fields, at most two whole numbers, are its parameters. Name and parameters
    stand in each payload's header, and a payload of another codec, of other parameters or of another number of numbers
    is refused. To write one: :meth:`nbytes`, :meth:`encode` and :meth:`decode`; the other verbs are made of these
    and may be replaced by faster ones.

    Vectors are contiguous, of one dimension; those to encode are float32, float16 or bfloat16, those to decode
    into also float64. Equal input gives equal bytes, and equal bytes decode to equal bits, on every device. Where
    NaN or Inf stood, NaN comes out; the rest of a block with one may become NaN, too.
    """

    name: ClassVar[str]
    """Up to 8 ASCII letters and digits."""

    lossless: ClassVar[bool] = False
    """Whether float32 comes out as it went in, so that a tensor can as well travel as it is."""

    stochastic: ClassVar[bool] = False
    """Whether it can round at random, without bias."""

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        name = vars(cls).get("name", "x")
        if not (name.isascii() and name.isalnum() and len(name) <= MAX_NAME_NBYTES):
            raise ConfigError(f"the name of a codec has up to 8 ASCII letters and digits, not {name!r}")

    @property
    def unit(self) -> int:
        """So many numbers are written together; a vector is cut into chunks at multiples of it only."""
        return 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the payload of ``numel`` numbers, header included; known without torch."""
        raise NotImplementedError

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Write the payload of ``x``; see :meth:`begin`.

        Args:
            x: the vector.
            payload: uint8, of ``nbytes(x.numel())`` bytes, at a multiple of 16 bytes; overwritten.
            seed: key of random rounding, 64 bits; None: to the nearest. Codecs that are not ``stochastic`` ignore it.
        """
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the vector to ``out``; see :meth:`body`.

        Raises:
            ProtocolError: the payload is not of this codec, these parameters, or ``out.numel()`` numbers.
        """
        raise NotImplementedError

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the vector to ``out``, in float32 or what is wider; raises as :meth:`decode` does."""
        part = self._decoded(payload, out.numel())
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        out.copy_(wide + part * alpha)

    def reduce(self, payloads: Sequence[Tensor], out: Tensor, *, mean: bool) -> None:
        """Write the sum or mean of vectors to float32 ``out``, added in the order given."""
        self.decode(payloads[0], out)
        for payload in payloads[1:]:
            self.decode_add(payload, out)
        if mean:
            out.mul_(1.0 / len(payloads))

    def reduce_encode(
        self, payloads: Sequence[Tensor], payload: Tensor, *, numel: int, mean: bool, seed: int | None = None
    ) -> None:
        """Write the payload of the sum or mean of vectors of ``numel`` numbers."""
        total = torch.empty(numel, dtype=torch.float32, device=payload.device)
        self.reduce(payloads, total, mean=mean)
        self.encode(total, payload, seed)

    # ---- what codecs are written with ------------------------------------------------------------------------

    def begin(self, payload: Tensor, x: Tensor) -> Tensor:
        """Write the header of ``x``'s payload, with its flag for NaN and Inf, and return the rest to be written."""
        dtype = DTYPE_NAMES.index(str(x.dtype).removeprefix("torch."))
        header = torch.frombuffer(bytearray(self.header(x.numel(), dtype).pack()), dtype=torch.uint8)
        payload[:HEADER_NBYTES].copy_(header)
        payload[FLAGS_OFFSET] = ~x.isfinite().all()
        return payload[HEADER_NBYTES:]

    def body(self, payload: Tensor, numel: int) -> Tensor:
        """Return what stands behind the header of a payload of ``numel`` numbers, after :meth:`check`."""
        self.check(payload, numel)
        return payload[HEADER_NBYTES:]

    # ---- what they are used with -----------------------------------------------------------------------------

    def header(self, numel: int, dtype: int = 0) -> Header:
        """Return the header of a payload of ``numel`` numbers whose flags are clear."""
        first, second, *more = (*astuple(self), 0, 0)
        if any(more) or not (0 <= first < 1 << 32 and 0 <= second < 1 << 16):
            raise ConfigError(f"{self}: a codec has at most two parameters, of 32 and of 16 bits")
        return Header(self.name, numel, first, second, dtype)

    def check(self, payload: Tensor, numel: int) -> None:
        """Refuse a payload that is not what both sides agreed on.

        On a GPU, where reading the header would wait for the stream, only the length is compared: whatever it
        holds, nothing outside it is read.

        Raises:
            ProtocolError: it is of another length, version, codec, or of other parameters.
        """
        header, nbytes = _expected(self, numel)
        if payload.numel() >= HEADER_NBYTES and payload.device.type == "cpu":
            header.refuse_other(bytes(payload[:HEADER_NBYTES].tolist()))
        if payload.numel() != nbytes:
            raise ProtocolError(
                f"a payload of {numel} numbers in {self} has {nbytes} bytes, but {payload.numel()} bytes came"
            )

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Return room for the payload of ``numel`` numbers."""
        return torch.empty(self.nbytes(numel), dtype=torch.uint8, device=device)

    @property
    def number_nbytes(self) -> float:
        """Bytes of a number in a large vector."""
        return (self.nbytes(2 * LARGE) - self.nbytes(LARGE)) / LARGE

    def _decoded(self, payload: Tensor, numel: int) -> Tensor:
        out = torch.empty(numel, dtype=torch.float32, device=payload.device)
        self.decode(payload, out)
        return out

    def __str__(self) -> str:
        parameters = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{self.name}:{parameters}" if parameters else self.name


@functools.lru_cache(maxsize=4096)
def _expected(codec: Codec, numel: int) -> tuple[Header, int]:
    return codec.header(numel), codec.nbytes(numel)


def flags_of(payload: Tensor) -> Tensor:
    """Return int32, shape (1,), a view into a payload: not zero when its vector held NaN or Inf; no waiting."""
    return payload[FLAGS_OFFSET : FLAGS_OFFSET + 4].view(torch.int32)
