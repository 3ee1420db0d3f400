"""The two-round all-reduce in a codec (from Bagua's ByteGrad, arXiv 2107.01499), as one collective on a Group."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import TypeVar

from lsgd.codecs.base import Codec, flags_of
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Group, Transfer
from lsgd.lazy import Tensor, torch
from lsgd.payload import ALIGNMENT

MAX_SEGMENTS = 4
SEGMENT_CHUNK_NUMEL = 1 << 18
"""A tensor is reduced in up to four segments, whose chunks, one per member, have about this many elements or more."""

STAGES = 3
"""Stages of an all-reduce."""

T = TypeVar("T")


def seed_of(*parts: object) -> int:
    """Return a 64-bit seed of stochastic rounding for what ``parts`` name (run, round, rank, stage, tensor).

    Rounding errors average out only if every member, round and tensor has a seed of its own.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _completed(stages: Generator[None, None, T]) -> T:
    """Run all stages, and return what the last one returns."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: T = end.value
            return result


def chunk_bounds(numel: int, size: int, unit: int) -> list[int]:
    """Return where each of ``size`` chunks of a vector begins, and where the last one ends.

    Chunks differ by at most ``unit`` elements, and are multiples of it except at the end of the vector.
    """
    units = -(-numel // unit)
    return [min(units * rank // size * unit, numel) for rank in range(size + 1)]


class QuantizedAllReduce:
    """Sum or average of a flat tensor over all members of a group; every member decodes the same bytes.

    1. Each member cuts the tensor into one chunk per member and encodes each chunk.
    2. Member i gets everyone's chunk i, decodes and adds them up in float32, and encodes the result.
    3. All members get all results and decode them.

    A large tensor is first cut into segments, which overlap: while one travels, the next is encoded or the last
    decoded.

    A member sends ``2 (n - 1) / n`` of the tensor's elements in the codec, and a header of 32 bytes per chunk of a
    segment. NaN and Inf travel as a payload's flag: they, and maybe the rest of their blocks, become NaN on all members
    alike. A single member keeps its elements unchanged.

    Error feedback covers both roundings (DoubleSqueeze, arXiv 1905.05957, algorithm 1): that of a member's own
    elements, and that of the results for the chunks that it owns, one per segment.

    If the codec's block is the whole vector, that means a segment's chunk. With error feedback and ``contributors``,
    each element is divided by the number of members that sent another value than zero.
    """

    def __init__(
        self,
        group: Group,
        codec: Codec,
        *,
        rounding: str = "nearest",
        average: bool = True,
        contributors: bool = False,
    ) -> None:
        self.group = group
        self.codec = codec
        self.rounding = rounding
        self.average = average
        self.contributors = contributors
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Sequence[_Segment]]] = defaultdict(list)

    def __call__(
        self, x: Tensor, out: Tensor, seed: tuple[object, ...], feedback: ErrorFeedback | None = None
    ) -> Tensor:
        """Write the sum or mean of all members' ``x`` to ``out``, which may be ``x``.

        Both are contiguous vectors of the same size on all members, float32, float16, bfloat16 or float64 (which is
        rounded to float32). The seed of rounding depends on ``seed``, segment, rank, stage and chunk. The caller
        commits ``feedback``, whose residual is added to ``x``. After an ExchangeError, ``out`` is undefined.

        Returns:
            int32, shape (1,): non-zero if a member's ``x`` had NaN or Inf, equal on all members; 0 with one member.
        """
        return _completed(self.stages(x, out, seed, feedback))

    def stages(
        self, x: Tensor, out: Tensor, seed: tuple[object, ...], feedback: ErrorFeedback | None = None
    ) -> Generator[None, None, Tensor]:
        """Do the same in three stages: yield between them, while payloads travel, and return the same at the end.

        Several tensors may be in flight, so that one travels while another waits for the latency of its messages. All
        members run the same stages in the same order and wait for transfers in the order in which they began
        (:class:`lsgd.collectives.pipeline.Pipeline`). ``x``, ``out`` and ``feedback`` belong to this until it ends.
        """
        if feedback is not None:
            x = feedback.added_to(x)
        elif x.dtype == torch.float64:
            x = x.to(torch.float32)
        if self.group.size == 1:
            out.copy_(x)
            if feedback is not None:
                x.zero_()
            return torch.zeros(1, dtype=torch.int32, device=x.device)
        free = self._free[x.numel(), x.dtype, x.device]
        segments = free.pop() if free else self._new_segments(x)
        second = yield from self._exchange(x, segments, seed, feedback)
        flags = []
        for segment, transfer in zip(segments, second, strict=True):
            transfer.wait()
            for payload, place in zip(segment.gathered, segment.chunks, strict=True):
                self.codec.decode(payload, out[place])
                flags.append(flags_of(payload))
        found = torch.stack(flags).amax(0)
        free.append(segments)
        return found

    def payloads(
        self, x: Tensor, seed: tuple[object, ...], feedback: ErrorFeedback, decay: float
    ) -> Sequence[tuple[slice, Tensor]]:
        """Exchange ``x``, float32, and return the result's payloads, in order, each with its place.

        The group has several members. ``decay`` times the residual of ``feedback`` is added to ``x``, which becomes
        the next one. Raises ExchangeError.
        """
        segments = self._new_segments(x)
        sums = feedback.added_in_place(x, decay)
        for transfer in _completed(self._exchange(sums, segments, seed, feedback)):
            transfer.wait()
        return [pair for each in segments for pair in zip(each.chunks, each.gathered, strict=True)]

    def _exchange(
        self, x: Tensor, segments: Sequence[_Segment], seed: tuple[object, ...], feedback: ErrorFeedback | None
    ) -> Generator[None, None, Sequence[Transfer]]:
        """Exchange payloads, and yield between the stages; return the last transfers, which are under way."""
        first, second = [], []
        for segment in segments:
            self._encode(x, segment, seed, keep_error=feedback is not None)
            first.append(self.group.all_to_all(segment.received, segment.sent))
        yield
        for segment, transfer in zip(segments, first, strict=True):
            transfer.wait()
            self._reduce(segment, seed, feedback)
            second.append(self.group.all_gather(segment.gathered, segment.gathered[self.group.rank]))
        yield
        return second

    def _encode(self, x: Tensor, segment: _Segment, seed: tuple[object, ...], *, keep_error: bool) -> None:
        """Write the payloads of one segment; with ``keep_error``, leave in ``x`` what rounding lost."""
        me, start = self.group.rank, segment.chunks[0].start
        for rank, (payload, place) in enumerate(zip(segment.sent, segment.chunks, strict=True)):
            chunk = x[place]
            encode = self.codec.encode_and_subtract if keep_error else self.codec.encode
            encode(chunk, payload, self._key(*seed, start, me, 0, rank))

    def _reduce(self, segment: _Segment, seed: tuple[object, ...], feedback: ErrorFeedback | None) -> None:
        """Write the payload of this member's chunk of the result, and note what rounding lost."""
        me, mean = self.group.rank, self.average
        place, payload = segment.chunks[me], segment.gathered[me]
        key = self._key(*seed, segment.chunks[0].start, me, 1)
        numel = place.stop - place.start
        if feedback is None:
            self.codec.reduce_encode(segment.received, payload, numel=numel, mean=mean, seed=key)
            return
        result = torch.empty(numel, dtype=torch.float32, device=payload.device)
        if self.contributors:
            self.codec.reduce_contributors(segment.received, result)
        else:
            self.codec.reduce(segment.received, result, mean=mean)
        feedback.added_to_result(result, place.start)
        self.codec.encode_and_subtract(result, payload, key)

    def _key(self, *parts: object) -> int | None:
        return seed_of(*parts) if self.rounding == "stochastic" else None

    def _new_segments(self, x: Tensor) -> Sequence[_Segment]:
        chunk = max(SEGMENT_CHUNK_NUMEL, self.codec.unit)
        count = max(1, min(MAX_SEGMENTS, x.numel() // (self.group.size * chunk)))
        bounds = chunk_bounds(x.numel(), count, self.codec.unit)
        return [_Segment(start, end, x.device, self.group, self.codec) for start, end in pairwise(bounds)]


class _Segment:
    """A tensor's elements from ``start`` to ``end``: their chunks and payloads."""

    def __init__(self, start: int, end: int, device: torch.device, group: Group, codec: Codec) -> None:
        bounds = chunk_bounds(end - start, group.size, codec.unit)
        self.chunks = [slice(start + first, start + last) for first, last in pairwise(bounds)]
        sizes = [chunk.stop - chunk.start for chunk in self.chunks]
        self.sent = [codec.empty(size, device) for size in sizes]
        # Rows of a matrix, which CUDA kernels reduce in place.
        nbytes = codec.nbytes(sizes[group.rank])
        rows = torch.empty(group.size, nbytes + -nbytes % ALIGNMENT, dtype=torch.uint8, device=device)
        self.received = [row[:nbytes] for row in rows]
        self.sent[group.rank] = self.received[group.rank]
        self.gathered = [codec.empty(size, device) for size in sizes]
