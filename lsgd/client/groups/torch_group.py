"""Groups on torch.distributed, rebuilt for each generation."""

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Members, Traffic, WorkerGroup, from_host, to_host
from lsgd.client.groups.connections import Connections
from lsgd.client.groups.gloo import gloo_group
from lsgd.client.groups.store import store_of
from lsgd.collectives.group import Transfer
from lsgd.collectives.point_to_point import PIECE_NBYTES, Exchange, Relay
from lsgd.errors import ExchangeError
from lsgd.protocol.messages import Generation


class TorchGroup(WorkerGroup):
    """A Group (:class:`lsgd.collectives.group.Group`) on a torch process group; subgroups are built when first used.

    Args:
        build: returns a process group with this name of these ranks of the generation.
        members: its members.
        timeout_s: deadline of each verb.
        transport: ``nccl`` or ``gloo``.
        device: best device for tensors that are created only for the group.
        connections: the sockets of the group that this one is a part of; None: it is a whole group.
        traffic: counts what this member sends and receives.
    """

    def __init__(
        self,
        build: Callable[[str, Sequence[int]], dist.ProcessGroup],
        members: Members,
        timeout_s: float,
        transport: str,
        device: torch.device,
        connections: Connections | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(members, timeout_s, traffic)
        self.device = device
        self.transport = transport
        self._build = build
        self._group: dist.ProcessGroup | None = None
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._connections = connections or Connections()

    def _group_of(self, members: Members) -> "TorchGroup":
        shared = self.transport, self.device, self._connections, self._traffic
        return TorchGroup(self._build, members, self._timeout_s, *shared)

    def cut(self) -> None:
        """Make everything that waits in this group or its subgroups fail at once; safe from any thread."""
        self._connections.cut()

    def close(self) -> None:
        """Drop the process groups, so that peers waiting for this member fail at once."""
        for group in self._subgroups.values():
            group.close()
        self._group = None

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        host = self._staged(tensor)
        passed = 2 * (self.size - 1) * tensor.nbytes // self.size  # as in a ring
        under_way = self._begin(
            "all_reduce", lambda group: group.allreduce([host], options), sent=passed, received=passed
        )

        def wait() -> None:
            under_way.wait()
            from_host(host, tensor)

        return Transfer(wait)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``.

        Over Gloo, a large tensor goes from each member to the next, piece by piece, so it leaves each node once. Gloo's
        own broadcast is a tree of whole messages: four hosts take three times as long as one transfer.
        """
        host = self._staged(tensor)

        def start(group: dist.ProcessGroup) -> Any:
            if self.transport == "gloo" and host.nbytes >= self.size * PIECE_NBYTES:
                return Relay(group, host, source, self.rank, self.size)
            options = dist.BroadcastOptions()
            options.timeout = self._timeout
            options.rootRank = source
            options.rootTensor = 0
            return group.broadcast([host], options)

        sent = 0 if (self.rank + 1) % self.size == source else host.nbytes  # from each to the next
        received = 0 if self.rank == source else host.nbytes
        self._begin(f"broadcast from {self._members.names[source]}", start, sent=sent, received=received).wait()
        if self.rank != source:
            from_host(host, tensor)

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        peers = ", ".join(self._members.names[rank] for rank in sorted({*sends, *receives}))
        outgoing = {rank: self._staged(tensor) for rank, tensor in sends.items()}
        incoming = {rank: self._staged(tensor, copy=False) for rank, tensor in receives.items()}
        together = self.device if self.transport == "nccl" else None
        under_way = self._begin(
            f"exchange with {peers}",
            lambda group: Exchange(group, outgoing, incoming, together),
            sent=sum(tensor.nbytes for tensor in sends.values()),
            received=sum(tensor.nbytes for tensor in receives.values()),
        )

        def wait() -> None:
            under_way.wait()
            for rank, tensor in receives.items():
                from_host(incoming[rank], tensor)

        return Transfer(wait)

    def _staged(self, tensor: Tensor, *, copy: bool = True) -> Tensor:
        """Return ``tensor``, or its copy in host memory if this group's transport cannot use the GPU's."""
        return tensor if self.transport == "nccl" else to_host(tensor, copy=copy)

    def _begin(self, what: str, start: Callable[[dist.ProcessGroup], Any], *, sent: int, received: int) -> Transfer:
        """Call ``start``, which returns an object with ``wait()``; a group of one has nothing to do.

        ``sent`` and ``received``: bytes of tensors that this member sends and receives.
        """
        if self.size == 1:
            return Transfer(lambda: None)
        self._traffic.add(sent, received)
        started_at = time.monotonic()
        with self._failing(what, started_at):
            if self._group is None:
                self._group = self._connections.watch(lambda: self._build(self._members.name, self._members.ranks))
            work = start(self._group)

        def wait() -> None:
            with self._failing(what, started_at):
                work.wait()
                if self.transport == "nccl":
                    torch.cuda.current_stream(self.device).synchronize()

        return Transfer(wait)

    @contextmanager
    def _failing(self, what: str, started_at: float) -> Iterator[None]:
        """If torch raises an error, close the group and raise an ExchangeError."""
        try:
            yield
        except (RuntimeError, ConnectionAbortedError) as error:
            self.close()
            raise ExchangeError(
                f"{what}: waited {time.monotonic() - started_at:.1f} s, then gave up: {str(error).splitlines()[0]}"
            ) from error


def torch_group(generation: Generation, membership: Membership, traffic: Traffic | None = None) -> TorchGroup:
    """Return the group of all members over Gloo or NCCL, as for :func:`lsgd.client.groups.form.form`."""
    address, device, timeout_s = membership.join.address, membership.device, membership.plan.run.exchange_timeout_s
    store = store_of(generation, membership)
    connections = Connections(when_cut=store.end)
    members = Members.of(generation, membership.join.worker)

    def build(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        rank = list(ranks).index(members.rank)
        if generation.transport == "nccl":
            named = PrefixStore(name, store)
            group = dist.ProcessGroup(named, rank, len(ranks))
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = datetime.timedelta(seconds=timeout_s)
            nccl = dist.ProcessGroupNCCL(named, rank, len(ranks), options)
            group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, nccl)
            group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
            # Batched messages need a communicator that all members have opened together.
            with connections.around():
                group.allreduce([torch.zeros(1, device=device)]).wait()
            return group
        return gloo_group(store, name, rank, [members.names[r] for r in ranks], address, timeout_s, connections)

    home = device if generation.transport == "nccl" else torch.device("cpu")
    return TorchGroup(build, members, timeout_s, generation.transport, home, connections, traffic)
