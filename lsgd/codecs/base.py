"""The base of all codecs: operations on payloads, whose header names the codec."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar

from lsgd.errors import ConfigError, ProtocolError
from lsgd.lazy import Tensor, torch
from lsgd.payload import ALIGNMENT, DTYPE_NAMES, FLAGS_OFFSET, HEADER_NBYTES, MAX_NAME_NBYTES, Header

LARGE = 1 << 24


@dataclass(frozen=True)
class Codec:
    """Base of the codecs, which write a vector as a payload: one contiguous uint8 tensor.

    A codec is a frozen dataclass; its fields, at most two integers, are its parameters. Each payload's header has the
    name and the parameters. A payload of another codec, other parameters or another number of elements is refused. A
    new codec needs :meth:`nbytes`, :meth:`encode` and :meth:`decode`. The other operations have defaults that call
    these; a codec may override them with faster ones.

    Vectors are contiguous and one-dimensional. ``encode`` takes float32, float16 or bfloat16; ``decode`` also writes
    float64. Equal input gives equal bytes, and equal bytes decode to equal bits, on every device. NaN and Inf decode to
    NaN; so may the other elements of their block.
    """

    name: ClassVar[str]
    """Up to 8 ASCII letters and digits."""

    lossless: ClassVar[bool] = False
    """Whether it keeps float32 unchanged, so a tensor can be sent without a payload."""

    stochastic: ClassVar[bool] = False
    """Whether it supports stochastic, unbiased rounding."""

    sparse: ClassVar[bool] = False
    """Whether most decoded elements are zero."""

    former_names: ClassVar[Mapping[str, str]] = {}
    """Parameters by names that they had in earlier versions."""

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        name = vars(cls).get("name", "x")
        if not (name.isascii() and name.isalnum() and len(name) <= MAX_NAME_NBYTES):
            raise ConfigError(f"{name!r} is not a valid codec name; use 1 to 8 ASCII letters and digits")

    @property
    def unit(self) -> int:
        """Elements that are encoded together; vectors are cut into chunks only at multiples of this."""
        return 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a payload of ``numel`` elements, including the header; needs no torch."""
        raise NotImplementedError

    def encode(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Write the payload of ``x``, ``nbytes(x.numel())`` bytes aligned to 16 bytes; see :meth:`begin`.

        ``seed`` is a 64-bit key of stochastic rounding; None: nearest. Codecs that are not ``stochastic`` ignore it.
        """
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the vector to ``out``; see :meth:`body`, which raises ProtocolError for another payload."""
        raise NotImplementedError

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the vector to ``out``, in float32 or wider; raises like :meth:`decode`."""
        part = torch.empty(out.numel(), dtype=torch.float32, device=payload.device)
        self.decode(payload, part)
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        out.copy_(wide + part * alpha)

    def encode_and_subtract(self, x: Tensor, payload: Tensor, seed: int | None = None) -> None:
        """Write the payload of float32 ``x``, and leave in ``x`` what rounding lost."""
        self.encode(x, payload, seed)
        self.decode_add(payload, x, alpha=-1.0)

    def reduce(self, payloads: Sequence[Tensor], out: Tensor, *, mean: bool) -> None:
        """Write the sum or mean of vectors to float32 ``out``, adding in the given order."""
        self.decode(payloads[0], out)
        for payload in payloads[1:]:
            self.decode_add(payload, out)
        if mean and len(payloads) > 1:
            out.mul_(1.0 / len(payloads))

    def reduce_contributors(self, payloads: Sequence[Tensor], out: Tensor) -> None:
        """Write the sum of vectors to float32 ``out``, each element over the number of vectors where it is not 0."""
        part, contributors = torch.empty_like(out), torch.zeros_like(out)
        out.zero_()
        for payload in payloads:
            self.decode(payload, part)
            out.add_(part)
            contributors.add_(part != 0)
        out.div_(contributors.clamp_(min=1))

    def means(self, payloads: Sequence[Tensor], numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mean of vectors in pieces, in order, each with its place; the next may overwrite the last."""
        out = torch.empty(numel, dtype=torch.float32, device=payloads[0].device)
        self.reduce(payloads, out, mean=True)
        yield slice(0, numel), out

    def reduce_encode(
        self, payloads: Sequence[Tensor], payload: Tensor, *, numel: int, mean: bool, seed: int | None = None
    ) -> None:
        """Write the payload of the sum or mean of vectors of ``numel`` elements."""
        total = torch.empty(numel, dtype=torch.float32, device=payload.device)
        self.reduce(payloads, total, mean=mean)
        self.encode(total, payload, seed)

    # ---- for writing codecs ----------------------------------------------------------------------------------

    def begin(self, payload: Tensor, x: Tensor) -> Tensor:
        """Write the header of ``x``'s payload, with its flag for NaN and Inf, and return the rest of the payload."""
        payload[:HEADER_NBYTES].copy_(self.header_for(payload, x.numel(), x.dtype))
        payload[FLAGS_OFFSET] = ~x.isfinite().all()
        return payload[HEADER_NBYTES:]

    def header_for(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Check memory for a payload and return the bytes of its header, with clear flags, on the same device."""
        check_payload(payload)
        header, nbytes = _header_of(self, numel, dtype, payload.device)
        if payload.numel() != nbytes:
            raise ConfigError(
                f"a payload of {numel} elements in {self} needs {nbytes} bytes, but has {payload.numel()}"
            )
        return header

    def body(self, payload: Tensor, numel: int) -> Tensor:
        """Check a payload of ``numel`` elements and return the bytes after its header."""
        self.check(payload, numel)
        return payload[HEADER_NBYTES:]

    # ---- for using codecs ------------------------------------------------------------------------------------

    def header(self, numel: int, dtype: int = 0) -> Header:
        """Return the header of a payload of ``numel`` elements, with clear flags."""
        first, second, *more = (*astuple(self), 0, 0)
        if any(more) or not (0 <= first < 1 << 32 and 0 <= second < 1 << 16):
            raise ConfigError(f"{self}: a codec has at most two parameters, of 32 and of 16 bits")
        return Header(self.name, numel, first, second, dtype)

    def check(self, payload: Tensor, numel: int) -> None:
        """Refuse a payload that is not what both sides agreed on.

        On a GPU this compares only the length, because reading the header would wait for the stream. Whatever the
        payload contains, decoding reads nothing outside it. Raises ProtocolError, or like :func:`check_payload`.
        """
        check_payload(payload)
        header, nbytes = _expected(self, numel)
        if payload.numel() >= HEADER_NBYTES and on_host(payload):
            header.refuse_other(bytes(payload[:HEADER_NBYTES].tolist()))
        if payload.numel() != nbytes:
            raise ProtocolError(
                f"a payload of {numel} elements in {self} has {nbytes} bytes, but {payload.numel()} bytes came"
            )

    def prepare(self, vectors: Iterable[Tensor], rounding: str = "nearest") -> None:
        """Do once what rounds do with such vectors, so that no round waits for kernels to be compiled."""
        seed = 0 if rounding == "stochastic" else None
        for device, dtype in {(x.device, x.dtype) for x in vectors}:
            x, payload, other = torch.zeros(1, dtype=dtype, device=device), self.empty(1, device), self.empty(1, device)
            wide = x.to(torch.float32)
            self.encode(wide if dtype == torch.float64 else x, payload, seed)
            self.encode_and_subtract(wide, payload, seed)
            self.decode(payload, x)
            self.decode_add(payload, x)
            self.reduce([payload, payload], wide, mean=True)
            self.reduce_encode([payload, payload], other, numel=1, mean=True, seed=seed)

    def empty(self, numel: int, device: torch.device) -> Tensor:
        """Return uninitialized memory for a payload of ``numel`` elements."""
        return torch.empty(self.nbytes(numel), dtype=torch.uint8, device=device)

    @property
    def element_nbytes(self) -> float:
        """Bytes per element in a large vector."""
        return (self.nbytes(2 * LARGE) - self.nbytes(LARGE)) / LARGE

    def __str__(self) -> str:
        parameters = ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{self.name}:{parameters}" if parameters else self.name


@functools.lru_cache(maxsize=4096)
def _expected(codec: Codec, numel: int) -> tuple[Header, int]:
    return codec.header(numel), codec.nbytes(numel)


@functools.lru_cache(maxsize=4096)
def _header_of(codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    """Return the header's bytes, on the device so that writing them waits for nothing, and the payload's size."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ConfigError(f"a vector to encode is float32, float16 or bfloat16, not {name}")
    header = codec.header(numel, DTYPE_NAMES.index(name)).pack()
    return torch.tensor(list(header), dtype=torch.uint8, device=device), codec.nbytes(numel)


def on_host(x: Tensor) -> bool:
    """Whether a look at an element waits for no device."""
    return x.device.type == "cpu"


def check_payload(payload: Tensor) -> None:
    """Refuse a tensor that cannot contain a payload; raises ConfigError."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise ConfigError(f"a payload must be a contiguous one-dimensional uint8 tensor, but is {_shown(payload)}")
    if payload.data_ptr() % ALIGNMENT or payload.storage_offset() % 4:
        raise ConfigError(f"a payload must be aligned to {ALIGNMENT} bytes; clone() it, or pad its buffer")


def check_vector(x: Tensor) -> None:
    """Refuse a tensor that is not a vector; raises ConfigError."""
    if x.dim() != 1 or not x.is_contiguous():
        raise ConfigError(f"a vector must be contiguous and one-dimensional, but this tensor is {_shown(x)}")


def _shown(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}, {'' if x.is_contiguous() else 'not '}contiguous"


def flags_of(payload: Tensor) -> Tensor:
    """Return a view into a payload, int32, shape (1,): non-zero if its vector has NaN or Inf; does not synchronize."""
    return payload[FLAGS_OFFSET : FLAGS_OFFSET + 4].view(torch.int32)
