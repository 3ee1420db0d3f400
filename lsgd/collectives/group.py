"""The Group: the few operations by which members of a generation exchange tensors.

It is all that algorithms see of the outside. :mod:`lsgd.client.groups` has the real ones;
:mod:`lsgd.testing.simulation` has one of threads in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lsgd.collectives.topology import first_ranks, node_ranks
from lsgd.lazy import Tensor


class Transfer:
    """Tensors in flight. They belong to the group until :meth:`wait` returns.

    Wait once for each transfer, in the order in which they began, and before the next blocking operation of the group.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until all tensors are sent and received; after an ExchangeError, outputs are undefined."""
        self._wait()


class Group:
    """Members that exchange tensors. Every operation is collective and has a deadline.

    ``all_reduce``, ``all_gather`` and ``all_to_all`` only begin, and return a :class:`Transfer` to wait for; several
    may be in flight. The others block until done.

    All members call the same operations in the same order with tensors of the same sizes and dtypes, contiguous and on
    the group's device. When one raises :class:`lsgd.errors.ExchangeError`, its outputs are undefined and the group is
    unusable.

    Attributes:
        node_sizes: number of members on each node, in rank order; ranks of a node are consecutive.
    """

    rank: int
    size: int
    node_sizes: tuple[int, ...]

    # -- what each kind of group implements --------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members, bit-identical on all."""
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of the member ``source``, whose own is unchanged."""
        raise NotImplementedError

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        """Begin :meth:`exchange`."""
        raise NotImplementedError

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> Group:
        """Return the group of these ranks, which include this member's: all on one node, or each on its own."""
        raise NotImplementedError

    # -- what all share ----------------------------------------------------------------------------------------

    @property
    def node(self) -> Group:
        """The members on this member's node."""
        return self._subgroup("node", list(node_ranks(self.rank, self.node_sizes)), one_node=True)

    @property
    def across(self) -> Group | None:
        """The first member of each node, in node order; None for a member that is not the first of its node."""
        firsts = first_ranks(self.node_sizes)
        return self._subgroup("across", firsts, one_node=False) if self.rank in firsts else None

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        """Begin to write each member's ``tensor`` to ``outputs[rank]``; sizes may differ between members.

        ``outputs[own rank]`` may be ``tensor``.
        """
        return self.all_to_all(outputs, [tensor] * self.size)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Transfer:
        """Begin to send ``inputs[r]`` to each ``r`` and to write what ``r`` sends to ``outputs[r]``; sizes may differ.

        ``outputs[own rank]`` may be ``inputs[own rank]``.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        outputs[self.rank].copy_(inputs[self.rank])
        return self._begin_exchange({r: inputs[r] for r in others}, {r: outputs[r] for r in others})

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send ``sends[r]`` to each ``r`` and write what each ``r`` sends to ``receives[r]``.

        Unlike the other operations it involves only the ranks named: members without partners need not call it.
        """
        self._begin_exchange(sends, receives).wait()
