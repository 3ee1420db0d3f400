"""The mean of a tensor over all workers: exact inside a node, in a codec between nodes."""

from __future__ import annotations

from lsgd.codecs import Codec
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Group
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.lazy import Tensor

DENSE_GATHERED, SPARSE_GATHERED = 2, 5
"""Members up to which each sends its payload to all others. Two send as many bytes in one round as in two, round once
instead of twice, and wait for one latency. A mean of sparse payloads is less sparse than they are, so a second round
would lose most of it."""


def gathers(codec: Codec, members: int) -> bool:
    """Return whether members send their payloads to all others; else they use the two-round all-reduce."""
    return members <= (SPARSE_GATHERED if codec.sparse else DENSE_GATHERED)


def sent_nbytes(codec: Codec, numel: int, members: int) -> float:
    """Return the bytes that one of ``members`` members sends for a mean of ``numel`` elements, without headers."""
    share = members - 1 if gathers(codec, members) else 2 * (members - 1) / members
    return share * numel * codec.element_nbytes


class CompressedMean:
    """Mean over the workers of a group, with the same bits on all.

    Args:
        group: the workers.
        codec: of what nodes send each other.
        hierarchical: the workers of a node first average at full precision, and one of them exchanges with the other
            nodes; else all workers exchange in the codec.
        contributors: divide each element by the number of payloads in which it is not zero, instead of by all.
    """

    def __init__(self, group: Group, codec: Codec, *, hierarchical: bool, contributors: bool = False) -> None:
        self._group = group
        self._node = group.node if hierarchical else None
        self._units = group.across if hierarchical else group
        self._number = len(group.node_sizes) if hierarchical else group.size
        self._codec = codec
        self._contributors = contributors

    def __call__(self, x: Tensor, seed: tuple[object, ...], feedback: ErrorFeedback, decay: float) -> None:
        """Replace ``x`` by the mean.

        Args:
            x: float32, contiguous, one dimension, of the same size on all members.
            seed: what the rounding's seed is made from.
            feedback: of this tensor; the caller commits it.
            decay: by which its residual shrinks before it is added to ``x``.

        Raises:
            ExchangeError: it failed on the network; ``x`` is undefined.
        """
        if self._node is not None:
            x.mul_(self._number / self._group.size)
            self._node.all_reduce(x).wait()
        if self._number > 1:
            if self._units is not None and gathers(self._codec, self._number):
                self._gather(x, self._units, feedback, decay)
            elif self._units is not None:  # made anew, so that no payload stays in memory
                all_reduce = QuantizedAllReduce(self._units, self._codec, contributors=self._contributors)
                all_reduce(x, x, seed, feedback, decay)
            if self._node is not None:
                self._node.broadcast(x, 0)

    def _gather(self, x: Tensor, group: Group, feedback: ErrorFeedback, decay: float) -> None:
        """Send all others this member's payload, and average all payloads in rank order."""
        codec = self._codec
        payloads = [codec.empty(x.numel(), x.device) for _ in range(group.size)]
        own, contribution = payloads[group.rank], feedback.added_to(x, decay)
        codec.encode(contribution, own)
        transfer = group.all_gather(payloads, own)
        codec.decode_add(own, contribution, alpha=-1.0)
        transfer.wait()
        if self._contributors:
            codec.reduce_contributors(payloads, x)
        else:
            codec.reduce(payloads, x, mean=True)
