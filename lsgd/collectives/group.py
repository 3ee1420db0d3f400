"""The Group: the few verbs with which members of a generation exchange tensors.

Algorithms know this class and nothing else of the outside. :mod:`lsgd.client.groups.torch_group` has the real one,
on torch.distributed; :mod:`lsgd.collectives.simulation` has one of threads in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lsgd.collectives.topology import first_ranks, node_ranks
from lsgd.lazy import Tensor


class Transfer:
    """Tensors under way. Until :meth:`wait` has returned they belong to the group.

    Each is waited for once, in the order in which they were begun, and before a verb of the same group that blocks.

    Args:
        wait: waits until all are sent and received, and raises the group's error when that fails.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until all are sent and received.

        Raises:
            ExchangeError: it failed; what was to be received is undefined, and the group is of no more use.
        """
        self._wait()


class Group:
    """Members that exchange tensors. Every verb is collective and has a deadline.

    ``all_reduce``, ``all_gather`` and ``all_to_all`` only begin, and return a :class:`Transfer` to wait for; several
    may be under way. The others block until done.

    All members call the same verbs in the same order with tensors of the same sizes and dtypes, contiguous and on
    the group's device. When a verb raises :class:`lsgd.errors.ExchangeError`, what it was to write is undefined
    and the group is of no more use.

    Attributes:
        rank: of this member in the group, 0 to ``size - 1``.
        size: number of members.
        node_sizes: members of each node, in rank order; ranks of a node are consecutive.
        poll: for a member of several processes, each with a part of its model and a group of its own: returns what
            each of them gives it; None for one process.
    """

    poll: Callable[[Any], list[Any]] | None = None
    rank: int
    size: int
    node_sizes: tuple[int, ...]

    # -- what each kind of group has of its own ----------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members, with the same bits on all."""
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of the member ``source``, whose own is not changed."""
        raise NotImplementedError

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        """Begin :meth:`exchange`."""
        raise NotImplementedError

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> Group:
        """Return the group of these ranks, this member's among them: all on one node, or each on its own."""
        raise NotImplementedError

    # -- what all have -----------------------------------------------------------------------------------------

    def agree(self, ok: bool = True) -> bool:
        """Return whether ``ok`` holds in all processes of this member.

        Algorithms call it where they judge numbers, of which a process may have only a part, and after the last
        verb of an exchange, before they change anything: all processes commit it, or none. They call it in the thread
        that calls their hooks, because all processes of a member have to vote in the same order.

        Raises:
            ExchangeError: the exchange has failed in another process.
        """
        return ok if self.poll is None else all(self.poll(ok))

    def total(self, number: float) -> float:
        """Return the sum over all processes of this member, to be called where :meth:`agree` may be; raise as that."""
        return number if self.poll is None else sum(self.poll(number))

    @property
    def node(self) -> Group:
        """The members on this member's node."""
        return self._subgroup("node", list(node_ranks(self.rank, self.node_sizes)), one_node=True)

    @property
    def across(self) -> Group | None:
        """The first member of each node, in order of nodes; None for a member that is not the first of its node."""
        firsts = first_ranks(self.node_sizes)
        return self._subgroup("across", firsts, one_node=False) if self.rank in firsts else None

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        """Begin to write each member's ``tensor`` to ``outputs[rank]``; sizes may differ between members.

        ``outputs[own rank]`` may be ``tensor``.
        """
        return self.all_to_all(outputs, [tensor] * self.size)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Transfer:
        """Begin to send ``inputs[r]`` to each ``r``, and to write what it sends to ``outputs[r]``; sizes may differ.

        ``outputs[own rank]`` may be ``inputs[own rank]``.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        outputs[self.rank].copy_(inputs[self.rank])
        return self._begin_exchange({r: inputs[r] for r in others}, {r: outputs[r] for r in others})

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send ``sends[r]`` to each ``r`` and write what each ``r`` sends to ``receives[r]``.

        Unlike the other verbs it binds only those named: members without partners need not call it.
        """
        self._begin_exchange(sends, receives).wait()
