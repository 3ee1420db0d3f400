"""The mean of a tensor over all workers: exact inside a node, in a codec between nodes."""

from __future__ import annotations

from lsgd.codecs import Codec
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Group
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.lazy import Tensor

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
        self._node = group.node if hierarchical else None
        self._units = group.across if hierarchical else group
        self._number = len(group.node_sizes) if hierarchical else group.size
        self._codec = codec
        self._contributors = contributors

    def __call__(self, x: Tensor, seed: tuple[object, ...], feedback: ErrorFeedback, decay: float) -> None:
        """Replace ``x``, float32, by the mean; arguments and errors are those of :class:`QuantizedAllReduce`."""
        if self._node is not None:
            x.mul_(self._number / self._group.size)
            self._node.all_reduce(x).wait()
        if self._number > 1:
            if self._units is not None and gathers(self._codec, self._number):
                self._gather(x, self._units, feedback, decay)
            elif self._units is not None:  # created each time, so that no payload stays in memory
                all_reduce = QuantizedAllReduce(self._units, self._codec, contributors=self._contributors)
                all_reduce(x, x, seed, feedback, decay)
            if self._node is not None:
                self._node.broadcast(x, 0)

    def _gather(self, x: Tensor, group: Group, feedback: ErrorFeedback, decay: float) -> None:
        """Send this member's payload to all others, and average all payloads in rank order."""
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
