"""The two-round all-reduce in 8 bits (ByteGrad's of Bagua, arXiv 2107.01499), as one collective on a Group."""

import hashlib
from collections import defaultdict
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lsgd.group import Transfer
from lsgd.kernels import (
    Quantized,
    dequantize,
    dequantize_add,
    dequantize_reduce,
    dequantize_reduce_quantize,
    quantize,
)
from lsgd.kernels.dispatch import Reduction, Rounding
from lsgd.kernels.layout import Layout

MAX_SEGMENTS = 4
SEGMENT_CHUNK_NUMEL = 1 << 18
"""A tensor is reduced in up to four segments, whose chunks, one for each member, have about so many numbers or more."""

STAGES = 3
"""Into which an all-reduce is divided."""


def seed_of(*parts: object) -> int:
    """Return a seed of stochastic rounding for what ``parts`` name (run, round, rank, stage, tensor): 64 bits.

    Errors of members, rounds and tensors average out only if each has a seed of its own.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def rounding_of(setting: str) -> Rounding:
    """Return the rounding that a setting names."""
    return "stochastic" if setting == "stochastic" else "nearest"


def decode_into(q: Quantized, out: Tensor) -> None:
    """Write the decoded vector to ``out``, float64 included."""
    if out.dtype == torch.float64:
        out.copy_(dequantize(q))
    else:
        dequantize(q, out=out)


def add_decoded(q: Quantized, x: Tensor) -> None:
    """``x ← x + decoded``, with the same bits wherever ``x`` and the payload have the same; float64 included."""
    if x.dtype == torch.float64:
        x.add_(dequantize(q))
    else:
        dequantize_add(q, x)


def chunk_bounds(numel: int, size: int, block: int | None) -> list[int]:
    """Return where each of ``size`` chunks of a vector begins, and where the last one ends.

    Chunks differ by at most one block, and consist of whole blocks but for the end of the vector.
    """
    unit = block or 1
    blocks = -(-numel // unit)
    return [min(blocks * rank // size * unit, numel) for rank in range(size + 1)]


class Members(Protocol):
    """What the all-reduce needs of a :class:`lsgd.group.Group`."""

    @property
    def rank(self) -> int:
        """As in Group."""
        ...

    @property
    def size(self) -> int:
        """As in Group."""
        ...

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        """As in Group; ``tensor`` is ``outputs[rank]``."""
        ...

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Transfer:
        """As in Group; ``inputs[rank]`` is ``outputs[rank]``."""
        ...


class QuantizedAllReduce:
    """Sum or average of a flat tensor over all members of a group; every member decodes the same bytes.

    1. The tensor is cut into one chunk per member, and each chunk quantized.
    2. Member i gets everyone's chunk i, decodes and adds them up in float32, and quantizes the result.
    3. All get all results and decode them.

    A large tensor is cut into segments first, and so is done one part after the other: while one travels, the next is
    quantized or the last decoded.

    A member sends ``2 (n - 1) / n`` bytes per number, and 8 bytes per block and 64 per chunk of a segment. NaN and Inf
    travel as the flag of a payload: the blocks that hold them become NaN on all members alike. A single member keeps
    its numbers as they are.

    With a residual (error feedback on both rounds, DoubleSqueeze, arXiv 1905.05957, algorithm 1) it is added before,
    and then holds what this member's rounding lost: of its own numbers in the first round, and of the result for
    the chunks that it owns, one of each segment, in the second.

    Args:
        group: the members.
        block: numbers that share one range of codes; None: all of a segment's chunk.
        rounding: ``nearest`` or ``stochastic``.
        average: whether to divide by the number of members.
    """

    def __init__(self, group: Members, *, block: int | None, rounding: str, average: bool = True) -> None:
        self.group = group
        self.block = block
        self.rounding = rounding_of(rounding)
        self.average = average
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Sequence[_Segment]]] = defaultdict(list)

    def __call__(
        self, x: Tensor, out: Tensor, seed: tuple[object, ...], residual: Tensor | None = None
    ) -> Tensor:
        """Write the sum or mean of all members' ``x`` to ``out``.

        Args:
            x: contiguous, one dimension, float32, float16, bfloat16 or float64 (which is rounded to float32); the
                same size and dtype on all members. Not changed, unless it is ``out``.
            out: like ``x``, of any of these dtypes; may be ``x``.
            seed: what the rounding's seed is made from, besides segment, rank, stage and chunk.
            residual: float32, like ``x``; changed.

        Returns:
            int32, shape (1,): not zero if some member's ``x`` held NaN or Inf; equal on all members of two or more.

        Raises:
            ExchangeError: it failed on the wire; ``out`` and ``residual`` are undefined.
        """
        stages = self.stages(x, out, seed, residual)
        while True:
            try:
                next(stages)
            except StopIteration as end:
                flags: Tensor = end.value
                return flags

    def stages(
        self, x: Tensor, out: Tensor, seed: tuple[object, ...], residual: Tensor | None = None
    ) -> Generator[None, None, Tensor]:
        """Do the same in three stages, and yield between them, while payloads travel; return the same in the end.

        Several tensors may be under way, so that one travels while another waits for the latency of its messages: on
        all members the same ones, with their stages in the same order, and so that what was begun first is waited for
        first (:class:`lsgd.group.Transfer`). ``x``, ``out`` and ``residual`` belong to it until it ends.
        """
        if residual is not None:
            x = residual.add_(x)
        elif x.dtype == torch.float64:
            x = x.to(torch.float32)
        if self.group.size == 1:
            out.copy_(x)
            if residual is not None:
                residual.zero_()
            return torch.zeros(1, dtype=torch.int32, device=x.device)
        free = self._free[x.numel(), x.dtype, x.device]
        segments = free.pop() if free else self._new_segments(x)
        first, second = [], []
        for segment in segments:
            self._quantize(x, segment, seed, residual)
            first.append(self.group.all_to_all(segment.received, segment.sent))
        yield
        for segment, transfer in zip(segments, first, strict=True):
            transfer.wait()
            self._reduce(segment, seed, residual)
            second.append(self.group.all_gather(segment.gathered, segment.gathered[self.group.rank]))
        yield
        flags = []
        for segment, transfer in zip(segments, second, strict=True):
            transfer.wait()
            for payload, layout, place in zip(segment.gathered, segment.results, segment.chunks, strict=True):
                q = Quantized.from_payload(payload, layout=layout)
                decode_into(q, out[place])
                flags.append(q.flags)
        found = torch.stack(flags).amax(0)
        free.append(segments)
        return found

    def _quantize(
        self, x: Tensor, segment: "_Segment", seed: tuple[object, ...], residual: Tensor | None
    ) -> None:
        """Write the payloads of one segment, and note what their rounding lost."""
        me, start = self.group.rank, segment.chunks[0].start
        for rank, (payload, place) in enumerate(zip(segment.sent, segment.chunks, strict=True)):
            chunk = x[place]
            key = seed_of(*seed, start, me, 0, rank)
            q = quantize(chunk, block=self.block, rounding=self.rounding, seed=key, out=payload)
            if residual is not None:
                dequantize_add(q, chunk, alpha=-1.0)

    def _reduce(self, segment: "_Segment", seed: tuple[object, ...], residual: Tensor | None) -> None:
        """Write the payload of this member's chunk of the result, and note what its rounding lost."""
        me = self.group.rank
        parts = [Quantized.from_payload(payload, layout=segment.chunk) for payload in segment.received]
        key = seed_of(*seed, segment.chunks[0].start, me, 1)
        op: Reduction = "mean" if self.average else "sum"
        payload = segment.gathered[me]
        if residual is None:
            dequantize_reduce_quantize(
                parts, op=op, block=self.block, rounding=self.rounding, seed=key, out=payload
            )
            return
        result = dequantize_reduce(parts, op=op)
        q = quantize(result, block=self.block, rounding=self.rounding, seed=key, out=payload)
        # It comes back as one member's contribution: in a mean, it then counts one n-th.
        lost = dequantize_add(q, result, alpha=-1.0)
        residual[segment.chunks[me]].add_(lost, alpha=self.group.size if self.average else 1)

    def _new_segments(self, x: Tensor) -> "Sequence[_Segment]":
        chunk = max(SEGMENT_CHUNK_NUMEL, self.block or 1)
        count = max(1, min(MAX_SEGMENTS, x.numel() // (self.group.size * chunk)))
        bounds = chunk_bounds(x.numel(), count, self.block)
        return [_Segment(start, end, x, self.group, self.block) for start, end in pairwise(bounds)]


class _Segment:
    """A part of tensors like ``x``, from ``start`` to ``end``: the payloads of it, and how they are to be read."""

    def __init__(self, start: int, end: int, x: Tensor, group: Members, block: int | None) -> None:
        bounds = chunk_bounds(end - start, group.size, block)
        self.chunks = [slice(start + first, start + last) for first, last in pairwise(bounds)]
        sizes = [chunk.stop - chunk.start for chunk in self.chunks]
        layouts = [Layout(size, block, x.dtype) for size in sizes]
        self.results = [Layout(size, block, torch.float32) for size in sizes]
        self.chunk = layouts[group.rank]
        self.sent = [layout.empty(device=x.device) for layout in layouts]
        self.received = [self.chunk.empty(device=x.device) for _ in sizes]
        self.received[group.rank] = self.sent[group.rank]
        self.gathered = [layout.empty(device=x.device) for layout in self.results]
