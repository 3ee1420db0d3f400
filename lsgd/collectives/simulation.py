"""A Group of threads in one process: for tests, and for experiments with more workers than there are cores."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from lsgd.collectives.group import Group, Transfer
from lsgd.errors import ExchangeError

T = TypeVar("T")


class _Mail:
    """Tensors under way between members, by sender and receiver."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._arrived = threading.Condition()
        self._boxes: dict[tuple[str, int, int], deque[Tensor]] = {}
        self._failure: str | None = None

    def send(self, name: str, source: int, target: int, tensor: Tensor) -> None:
        with self._arrived:
            self._boxes.setdefault((name, source, target), deque()).append(tensor.detach().clone())
            self._arrived.notify_all()

    def receive(self, name: str, source: int, target: int, out: Tensor) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._arrived:
            while not (box := self._boxes.get((name, source, target))):
                if self._failure:
                    raise ExchangeError(self._failure)
                if not self._arrived.wait(deadline - time.monotonic()):
                    raise ExchangeError(
                        f"rank {source} sent nothing to rank {target} for {self._timeout_s:g} s"
                    )
            tensor = box.popleft()
        if tensor.shape != out.shape or tensor.dtype != out.dtype:
            raise AssertionError(
                f"{source} sent {tensor.shape} {tensor.dtype}, {target} expects {out.shape} {out.dtype}"
            )
        out.copy_(tensor)

    def fail(self, reason: str) -> None:
        with self._arrived:
            self._failure = reason
            self._arrived.notify_all()


class SimulatedGroup(Group):
    """One member's view of a simulated group; see :class:`lsgd.collectives.group.Group` for the verbs.

    ``sent_nbytes`` counts what this member has sent, its subgroups included.
    """

    def __init__(
        self, mail: _Mail, name: str, members: Sequence[int], rank: int, node_sizes: Sequence[int]
    ) -> None:
        self._mail = mail
        self._name = name
        self._members = tuple(members)
        self.rank = rank
        self.size = len(members)
        self.node_sizes = tuple(node_sizes)
        self._own_nbytes = 0
        self._subgroups: dict[str, SimulatedGroup] = {}

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this member has sent so far, in this group and its subgroups."""
        return self._own_nbytes + sum(group.sent_nbytes for group in self._subgroups.values())

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> "SimulatedGroup":
        if kind not in self._subgroups:
            members = [self._members[rank] for rank in ranks]
            sizes = [len(ranks)] if one_node else [1] * len(ranks)
            name = f"{self._name}/{kind}"
            self._subgroups[kind] = SimulatedGroup(self._mail, name, members, ranks.index(self.rank), sizes)
        return self._subgroups[kind]

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        under_way = self.all_gather(parts, tensor)

        def wait() -> None:
            under_way.wait()
            total = parts[0]
            for part in parts[1:]:
                total += part
            tensor.copy_(total)

        return Transfer(wait)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``."""
        others = [rank for rank in range(self.size) if rank != source]
        if self.rank == source:
            self.exchange(dict.fromkeys(others, tensor), {})
        else:
            self.exchange({}, {source: tensor})

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        me = self._members[self.rank]
        for rank, tensor in sends.items():
            self._mail.send(self._name, me, self._members[rank], tensor)
            self._own_nbytes += tensor.nbytes

        def receive() -> None:
            for rank, tensor in receives.items():
                self._mail.receive(self._name, self._members[rank], me, tensor)

        return Transfer(receive)


def simulate(
    node_sizes: Sequence[int], member: Callable[[SimulatedGroup], T], *, timeout_s: float = 60.0
) -> list[T]:
    """Run ``member(group)`` for each rank in a thread of its own and return the results in rank order.

    When one raises, the others' exchanges fail at once with ExchangeError, and the first error is raised here.
    """
    size = sum(node_sizes)
    mail = _Mail(timeout_s)
    errors: list[BaseException] = []

    def run(rank: int) -> T:
        try:
            return member(SimulatedGroup(mail, "world", range(size), rank, node_sizes))
        except BaseException as error:
            errors.append(error)
            mail.fail(f"rank {rank} failed: {error!r}")
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
