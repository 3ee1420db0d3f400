"""The mean of a tensor over all workers: exact inside a node, in a codec between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from lsgd.codecs import Codec
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Group
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.lazy import Tensor, torch

Mean: TypeAlias = "Callable[[], Iterator[tuple[slice, Tensor]]]"
"""Yields a mean in pieces, in order, each with its place; it may be called again.

One that came in a codec is decoded each time, in pieces if the codec can, so that it takes no memory in between. The
next piece may overwrite the last one.
"""

DENSE_GATHERED, SPARSE_GATHERED = 2, 5
"""The most members with which each sends its payload to all others. Two members send the same number of bytes in one
round as in two, but round once and wait for one latency. A mean of sparse payloads is less sparse than the payloads, so
a second round would lose most of it."""


def gathers(codec: Codec, members: int) -> bool:
    """Return whether members send their payloads to all others, rather than use the two-round all-reduce."""
    return members <= (SPARSE_GATHERED if codec.sparse else DENSE_GATHERED)


def sent_nbytes(codec: Codec, numel: int, members: int) -> float:
    """Return the bytes that each of ``members`` members sends for a mean of ``numel`` elements, without headers."""
    share = members - 1 if gathers(codec, members) else 2 * (members - 1) / members
    return share * numel * codec.element_nbytes


class CompressedMean:
    """The mean over the workers of a group, bit-identical on all.

    If ``hierarchical``, the workers of a node first average at full precision, and one of them exchanges with the other
    nodes; otherwise all workers exchange in the codec. With ``contributors``, each element is divided by the number of
    payloads in which it is not zero, not by that of all.
    """

    def __init__(self, group: Group, codec: Codec, *, hierarchical: bool, contributors: bool = False) -> None:
        self._group = group
        self._node = group.node if hierarchical and group.node.size > 1 else None
        self._units = group.across if hierarchical else group
        self._number = len(group.node_sizes) if hierarchical else group.size
        self._codec = codec
        self._contributors = contributors

    def __call__(self, x: Tensor, seed: tuple[object, ...], feedback: ErrorFeedback, decay: float) -> Mean:
        """Return the mean of ``x``, float32, which becomes memory of this.

        The other arguments and errors are those of :meth:`QuantizedAllReduce.payloads`.
        """
        if self._number < self._group.size:
            x.mul_(self._number / self._group.size)
        if self._node is not None:
            self._node.all_reduce(x).wait()
        if self._number == 1:
            return in_memory(x)
        if self._units is not None:
            mean = self._across(x, self._units, seed, feedback, decay)
            if self._node is None:
                return mean
            x = torch.empty_like(x)
            for here, piece in mean():
                x[here] = piece
        assert self._node is not None
        self._node.broadcast(x, 0)
        return in_memory(x)

    def _across(self, x: Tensor, group: Group, seed: tuple[object, ...], feedback: ErrorFeedback, decay: float) -> Mean:
        """Return the mean over units; ``x`` becomes what rounding lost of it."""
        if gathers(self._codec, self._number):
            return self._gather(x, group, feedback, decay)
        all_reduce = QuantizedAllReduce(group, self._codec, contributors=self._contributors)
        chunks = all_reduce.payloads(x, seed, feedback, decay)

        def read() -> Iterator[tuple[slice, Tensor]]:
            for chunk, payload in chunks:
                for here, piece in self._codec.means([payload], chunk.stop - chunk.start):
                    yield slice(chunk.start + here.start, chunk.start + here.stop), piece

        return read

    def _gather(self, x: Tensor, group: Group, feedback: ErrorFeedback, decay: float) -> Mean:
        """Send this member's payload to all others; the mean is that of all payloads in rank order."""
        codec = self._codec
        payloads = [codec.empty(x.numel(), x.device) for _ in range(group.size)]
        codec.encode_and_subtract(feedback.added_in_place(x, decay), payloads[group.rank])
        group.all_gather(payloads, payloads[group.rank]).wait()
        if not self._contributors:
            return partial(codec.means, payloads, x.numel())
        mean = torch.empty_like(x)
        codec.reduce_contributors(payloads, mean)
        return in_memory(mean)


def in_memory(x: Tensor) -> Mean:
    """Return a mean that is in memory."""
    return lambda: iter([(slice(0, x.numel()), x)])
