"""The group of a generation whose nodes exchange over TCP, and inside a node over NCCL where that can be."""

from lsgd.client.groups.base import Members, WorkerGroup
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.collectives.composed import Composed
from lsgd.collectives.topology import node_ranks


class ComposedGroup(Composed, WorkerGroup):
    """A Group of all members (:class:`lsgd.collectives.composed.Composed`) over two transports.

    Whoever makes the two groups lets each cut the other.

    Args:
        inside: the members of this member's node; None: ``between`` carries tensors there, too.
        between: all members.
    """

    def __init__(self, members: Members, inside: WorkerGroup | None, between: TcpGroup) -> None:
        if inside is None:
            inside = between._subgroup("node", [*node_ranks(members.rank, members.node_sizes)], one_node=True)
        Composed.__init__(self, inside, between)
        self._members = members
        self._parts = (between, inside)
        self.device = inside.device
        same = inside.transport == between.transport
        self.transport = between.transport if same else f"{between.transport}, and {inside.transport} inside the node"

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> WorkerGroup:
        between, inside = self._parts
        return inside if one_node else between._subgroup(kind, ranks, one_node=False)

    def progress(self) -> str:
        """Return how far the slowest transfer between nodes is, if it takes long; safe from any thread."""
        return self._parts[0].progress()

    def cut(self) -> None:
        """Make everything that waits in either group fail at once; safe from any thread."""
        for part in self._parts:
            part.cut()

    def close(self) -> None:
        """Drop the connections of both, so that peers waiting for this member fail at once."""
        for part in self._parts:
            part.close()
