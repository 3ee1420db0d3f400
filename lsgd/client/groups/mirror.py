"""Groups of an island of replicas: the head's, which exchanges, and those of the others, which get what it received.

All processes of the island run the same algorithm on equal models. So if all get the same tensors from operations of
the group, they compute the same results, and what the algorithm keeps is equal, too. Inside the machine travels what
has come over the network, perhaps in few bits, and what the head itself has contributed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from lsgd.client.control.island import Island, Key
from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import HEADS, Members, WorkerGroup
from lsgd.collectives.group import Transfer
from lsgd.errors import ExchangeError
from lsgd.protocol.messages import Generation

T = TypeVar("T")


def mirrored(generation: Generation, membership: Membership, form: Callable[[], WorkerGroup]) -> WorkerGroup:
    """Return this process's group of a generation, which ``form`` makes; only the head of an island of replicas does.

    Raises:
        ExchangeError: as ``form``.
    """
    island, number = membership.island, generation.number
    if not island.replicas:
        return form()
    members = Members.of(generation, membership.join.worker)
    if not island.is_head:
        device = membership.device if generation.transport == "nccl" else torch.device("cpu")
        return Mirror(island, number, members, device)
    try:
        return HeadGroup(island, number, members, form())
    except BaseException:
        island.end_generation(number)
        raise


class _IslandGroup(WorkerGroup):
    """A group of one process of an island: all processes get what the head's operations receive."""

    def __init__(self, island: Island, generation: int, members: Members, device: torch.device) -> None:
        super().__init__(members, 0.0)
        self.device = device
        self._island, self._generation = island, generation
        self._numbers = Counter[str]()  # of the last operations, by name

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members."""
        return self._begin([tensor] if self.size > 1 else [], lambda group: group.all_reduce(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``."""

        def broadcast(group: WorkerGroup) -> Transfer:
            group.broadcast(tensor, source)
            return Transfer(lambda: None)

        self._begin([tensor] if self.size > 1 else [], broadcast).wait()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Transfer:
        """Begin to send ``inputs[r]`` to each ``r`` and to write what ``r`` sends to ``outputs[r]``."""
        return self._begin(outputs, lambda group: group.all_to_all(outputs, inputs))

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        arriving = [receives[rank] for rank in sorted(receives)]
        return self._begin(arriving, lambda group: group._begin_exchange(sends, receives))

    def take_heads(self, tensors: Sequence[Tensor], name: str = HEADS) -> None:
        """Replace tensors by those of the head; they have nothing to do with the group."""
        self._begin(tensors, lambda group: Transfer(lambda: None), name).wait()

    def _begin(self, arriving: Sequence[Tensor], begin: Callable[[WorkerGroup], Transfer], name: str = "") -> Transfer:
        """Begin an operation, which ``begin`` begins in the head's group; at its end these tensors are the group's."""
        raise NotImplementedError

    def _next_key(self, name: str) -> Key:
        name = name or self._members.name
        self._numbers[name] += 1
        return self._generation, name, self._numbers[name]


class HeadGroup(_IslandGroup):
    """A group whose operations hand the island's other processes what they have received.

    Args:
        group: what carries the tensors.
    """

    def __init__(self, island: Island, generation: int, members: Members, group: WorkerGroup) -> None:
        super().__init__(island, generation, members, group.device)
        self.transport = group.transport
        self._group = group

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> WorkerGroup:
        if kind not in self._subgroups:
            members = self._members.some(kind, ranks, one_node=one_node)
            group = self._group._subgroup(kind, ranks, one_node=one_node)
            self._subgroups[kind] = HeadGroup(self._island, self._generation, members, group)
        return self._subgroups[kind]

    def _begin(self, arriving: Sequence[Tensor], begin: Callable[[WorkerGroup], Transfer], name: str = "") -> Transfer:
        hand = partial(self._island.hand, self._next_key(name))

        def ended(operation: Callable[[], T]) -> T:
            try:
                return operation()
            except ExchangeError:
                hand(None)
                raise

        transfer = ended(lambda: begin(self._group))

        def wait() -> None:
            ended(transfer.wait)
            if arriving:
                hand(arriving)

        return Transfer(wait)

    def progress(self) -> str:
        """Return how far a transfer is that takes long."""
        return self._group.progress()

    def cut(self) -> None:
        """Make everything that waits in this group or its subgroups fail at once, in all processes of the island."""
        self._group.cut()
        self._island.end_generation(self._generation)

    def close(self) -> None:
        """Drop the connections, so that peers waiting for this member fail at once."""
        self._group.close()
        self._island.end_generation(self._generation)


class Mirror(_IslandGroup):
    """A group whose operations get what those of the head have received."""

    transport = "the head"

    def _group_of(self, members: Members) -> "Mirror":
        return Mirror(self._island, self._generation, members, self.device)

    def _begin(self, arriving: Sequence[Tensor], begin: Callable[[WorkerGroup], Transfer], name: str = "") -> Transfer:
        key = self._next_key(name)
        return Transfer(lambda: self._island.handed.take(key, arriving) if arriving else None)

    def cut(self) -> None:
        """Make everything that waits in this group or its subgroups fail at once."""
        self._island.handed.end(self._generation)

    def close(self) -> None:
        """Drop what the head has handed over and nobody has taken."""
        self._island.handed.end(self._generation)
