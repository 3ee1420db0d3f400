"""What a worker's groups have in common over any transport."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lsgd.collectives.group import Group
from lsgd.errors import ExchangeError
from lsgd.protocol.messages import Generation

INSIDE_PATIENCE = 1000
"""How many times ``exchange_timeout_s`` a member waits for another one of its node that may be busy with other nodes.

It need not notice by itself that something is wrong. A member whose exchange with another node fails cuts its
connections; one that is frozen loses its lease; and the servers end a round in which nothing moves.
"""

HEADS = "the head's tensors"
"""Name of the operations of an island without the group."""


class Traffic:
    """Counts the bytes of tensors that groups send and receive; safe to use from several threads."""

    def __init__(self) -> None:
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self._lock = threading.Lock()

    def add(self, sent_nbytes: int, received_nbytes: int) -> None:
        """Count what this member sends and receives in a collective."""
        with self._lock:
            self.sent_nbytes += sent_nbytes
            self.received_nbytes += received_nbytes


@dataclass(frozen=True)
class Members:
    """The members of a group, seen from one of them.

    Args:
        name: the group's, unique in its generation.
        ranks: in the generation.
        names: the members', for errors.
        rank: this member's index in ``ranks``.
        node_sizes: number of members on each node, in order.
        patience: how many times ``exchange_timeout_s`` each waits for a silent one.
    """

    name: str
    ranks: Sequence[int]
    names: Sequence[str]
    rank: int
    node_sizes: Sequence[int]
    patience: float = 1.0

    @staticmethod
    def of(generation: Generation, worker: str) -> "Members":
        """Return all members of a generation, seen from a worker."""
        names = generation.members
        return Members("world", range(len(names)), names, names.index(worker), generation.node_sizes)

    @staticmethod
    def apart(names: Sequence[str], rank: int) -> "Members":
        """Return members that are each on their own node."""
        return Members("world", range(len(names)), names, rank, [1] * len(names))

    def some(self, kind: str, ranks: Sequence[int], *, one_node: bool) -> "Members":
        """Return the members with these ranks, including this one: all on one node, or each on its own."""
        return Members(
            f"{self.name}/{kind}{ranks[0] if one_node else ''}",
            [self.ranks[rank] for rank in ranks],
            [self.names[rank] for rank in ranks],
            ranks.index(self.rank),
            [len(ranks)] if one_node else [1] * len(ranks),
            INSIDE_PATIENCE if one_node and len(self.node_sizes) > 1 else 1.0,
        )


class WorkerGroup(Group):
    """A Group of the workers of a generation.

    Args:
        timeout_s: deadline of each verb, for members whose patience is 1.

    Attributes:
        device: best device for tensors that are created only for the group.
        transport: what carries its tensors, for the log.
    """

    device: torch.device
    transport: str
    _errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, members: Members, timeout_s: float, traffic: Traffic | None = None) -> None:
        self._members = members
        self._subgroups: dict[str, WorkerGroup] = {}
        self._timeout_s = timeout_s * members.patience
        self._traffic = traffic or Traffic()
        self.rank = members.rank
        self.size = len(members.ranks)
        self.node_sizes = tuple(members.node_sizes)

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> "WorkerGroup":
        if kind not in self._subgroups:
            self._subgroups[kind] = self._group_of(self._members.some(kind, ranks, one_node=one_node))
        return self._subgroups[kind]

    def _group_of(self, members: Members) -> "WorkerGroup":
        raise NotImplementedError

    @contextmanager
    def _failing(self, what: str, started_at: float) -> Iterator[None]:
        """If an operation fails, cut the group and raise an ExchangeError."""
        try:
            yield
        except self._errors as error:
            self.cut()
            waited_s, why = time.monotonic() - started_at, str(error).partition("\n")[0]
            raise ExchangeError(f"{what}: waited {waited_s:.1f} s, then gave up: {why}") from error.with_traceback(None)

    def take_heads(self, tensors: Sequence[Tensor], name: str = HEADS) -> None:
        """Replace tensors by those of the head, in all processes of an island of replicas; others have no more.

        Calls may come in the middle of the group's own operations; those of each ``name`` have one order.
        """

    def progress(self) -> str:
        """Return how far a transfer is that takes long; an empty text: none does, or nobody knows."""
        return ""

    def cut(self) -> None:
        """Make everything that waits in this group or its subgroups fail at once; safe from any thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the connections, so that peers waiting for this member fail at once."""
        raise NotImplementedError
