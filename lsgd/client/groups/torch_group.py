"""Groups on torch.distributed, for NCCL; each generation has new ones."""

import atexit
import datetime
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from lsgd.client.control.joining import Membership
from lsgd.client.groups.base import Members, Traffic, WorkerGroup
from lsgd.client.groups.store import ServerStore
from lsgd.collectives.group import Transfer
from lsgd.collectives.point_to_point import begin_exchange

END_WITHIN_S = 5.0
"""How long :meth:`ProcessGroups.end` waits for each thread that builds or aborts a group, in seconds."""

LEAVE_WITHIN_S = 1.0
"""How long the process waits at its end for a thread that had waited for a group, to let go of it, in seconds."""

LATE_S = 1.0
"""How long after a group's deadline the wait for its construction ends, in seconds: torch's own error comes first."""


class ProcessGroups:
    """The process groups of a generation. Each is built in a thread, and a cut aborts them all.

    Args:
        make: returns a process group with this name of these ranks of the generation, in ``timeout_s``.
        when_cut: ends the waits for what members publish; must not wait itself.
    """

    def __init__(
        self,
        make: Callable[[str, Sequence[int]], dist.ProcessGroup],
        timeout_s: float,
        when_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._when_cut = when_cut
        self._made: dict[str, dist.ProcessGroup] = {}
        self._cut: Future[None] = Future()
        self._threads: set[threading.Thread] = set()
        self._callers: set[threading.Thread] = set()  # of build
        self._lock = threading.Lock()
        _open.add(self)
        _end_at_exit()

    def build(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the process group with this name, built at the first call.

        Raises:
            ConnectionAbortedError: the groups were cut before it was built. Its thread is left behind.
            TimeoutError: it took too long.
        """
        built: Future[dist.ProcessGroup] = Future()
        with self._lock:
            self.check()
            if (made := self._made.get(name)) is not None:
                return made
            self._callers.add(threading.current_thread())
            self._start(lambda: self._build(built, name, ranks), "lsgd-build")
        ends: list[Future[Any]] = [built, self._cut]
        wait(ends, self._timeout_s + LATE_S, FIRST_COMPLETED)
        self.check()
        if not built.done():
            raise TimeoutError("another member did not do its part in time")
        return built.result()

    def cut(self) -> None:
        """Abort all groups: what waits in them fails. Safe from any thread, and does not wait itself."""
        with self._lock:
            if self._cut.done():
                return
            self._cut.set_result(None)
            made, self._made = [*self._made.values()], {}
            if made:
                self._start(lambda: _abort(made), "lsgd-abort")
        self._when_cut()

    def end(self, *, callers: bool = False) -> None:
        """Cut, and wait for the threads, with ``callers`` also for those that have called :meth:`build`."""
        self.cut()
        with self._lock:
            waits = dict.fromkeys(self._callers if callers else (), LEAVE_WITHIN_S)
            waits |= dict.fromkeys(self._threads, END_WITHIN_S)
        for thread, within_s in waits.items():
            if thread is not threading.current_thread():
                thread.join(within_s)

    @contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Cut the groups if the block lasts beyond ``deadline`` (of ``time.monotonic``).

        Raises:
            ConnectionAbortedError: they were cut meanwhile; what the block has received is undefined.
        """
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self.check()

    def check(self) -> None:
        """Raise ConnectionAbortedError if the groups were cut."""
        if self._cut.done():
            raise ConnectionAbortedError("its generation is over, or another operation of it has failed")

    def _start(self, work: Callable[[], object], name: str) -> None:
        """Run ``work`` in a thread; call it with the lock held, so that nobody joins the thread before it has begun."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _build(self, built: Future[dist.ProcessGroup], name: str, ranks: Sequence[int]) -> None:
        try:
            group = self._make(name, ranks)
            with self._lock:
                over = self._cut.done()
                if not over:
                    self._made[name] = group
            if over:
                group.abort()
            built.set_result(group)
        except Exception as error:
            built.set_exception(error.with_traceback(None))  # its frames hold the group


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort groups, the newest first, as torch itself does."""
    for group in reversed(groups):
        group.abort()


class TorchGroup(WorkerGroup):
    """A Group (:class:`lsgd.collectives.group.Group`) on a torch process group; subgroups are built when first used.

    Args:
        backend: torch's name of what carries the tensors.
        device: the tensors' device.
    """

    _errors = (RuntimeError, OSError)

    def __init__(
        self,
        groups: ProcessGroups,
        members: Members,
        timeout_s: float,
        backend: str,
        device: torch.device,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(members, timeout_s, traffic)
        self.transport = backend
        self.device = device
        self._groups = groups
        self._timeout = datetime.timedelta(seconds=self._timeout_s)

    def _group_of(self, members: Members) -> "TorchGroup":
        return TorchGroup(self._groups, members, self._timeout_s, self.transport, self.device, self._traffic)

    def cut(self) -> None:
        """Make everything that waits in this group or its subgroups fail at once; safe from any thread."""
        self._groups.cut()

    def close(self) -> None:
        """Drop the process groups, so that peers waiting for this member fail at once."""
        self._groups.end()

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        passed = 2 * (self.size - 1) * tensor.nbytes // self.size  # as in a ring
        return self._begin("all_reduce", lambda group: group.allreduce([tensor], options), sent=passed, received=passed)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``."""
        options = dist.BroadcastOptions()
        options.timeout = self._timeout
        options.rootRank = source
        options.rootTensor = 0
        sent = 0 if (self.rank + 1) % self.size == source else tensor.nbytes  # from each to the next
        received = 0 if self.rank == source else tensor.nbytes
        what = f"broadcast from {self._members.names[source]}"
        self._begin(what, lambda group: group.broadcast([tensor], options), sent=sent, received=received).wait()

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        peers = ", ".join(self._members.names[rank] for rank in sorted({*sends, *receives}))
        batch = self.device if self.transport == "nccl" else None
        return self._begin(
            f"exchange with {peers}",
            lambda group: begin_exchange(group, sends, receives, batch),
            sent=sum(tensor.nbytes for tensor in sends.values()),
            received=sum(tensor.nbytes for tensor in receives.values()),
        )

    def _begin(self, what: str, start: Callable[[dist.ProcessGroup], Any], *, sent: int, received: int) -> Transfer:
        """Call ``start``, which returns an object with ``wait()``; a group of one has nothing to do."""
        if self.size == 1:
            return Transfer(lambda: None)
        self._traffic.add(sent, received)
        started_at = time.monotonic()
        with self._failing(what, started_at):
            work = start(self._groups.build(self._members.name, self._members.ranks))

        def wait() -> None:
            with self._failing(what, started_at), self._groups.until(started_at + self._timeout_s):
                work.wait()
                if self.device.type == "cuda":  # until then, only the GPU has waited
                    torch.cuda.current_stream(self.device).synchronize()

        return Transfer(wait)


def torch_group(
    members: Members,
    membership: Membership,
    store: ServerStore,
    traffic: Traffic | None = None,
    backend: str = "nccl",
    when_cut: Callable[[], None] | None = None,
) -> TorchGroup:
    """Return a group over a backend of torch, whose members meet in ``store``.

    Runs use NCCL. Tests and benchmarks use ``gloo`` in its place, on the host. ``when_cut`` is called when the group is
    cut, for whatever reason, and must not wait; by default it ends the waits in the store.
    """
    timeout_s, device = membership.plan.run.exchange_timeout_s, membership.device
    me, patience_s = members.ranks[members.rank], timeout_s * members.patience

    def make(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        rank = list(ranks).index(me)
        if backend == "nccl":
            return nccl_group(PrefixStore(name, store), rank, len(ranks), patience_s, device)
        return gloo_group(PrefixStore(name, store), rank, len(ranks), patience_s, membership.address)

    home = device if backend == "nccl" else torch.device("cpu")
    groups = ProcessGroups(make, patience_s, when_cut or store.end)
    return TorchGroup(groups, members, timeout_s, backend, home, traffic)


def nccl_group(store: Store, rank: int, size: int, timeout_s: float, device: torch.device) -> dist.ProcessGroup:
    """Return a process group over NCCL whose members have opened their communicator, which batched messages need.

    lsgd aborts it when a member is gone or late. For that, torch advises that its watchdog ignore errors; otherwise it
    ends the process.
    """
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.NCCL
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=2 * timeout_s)
    with _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(device, kind, nccl)
    group._set_default_backend(kind)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return group


def gloo_group(store: Store, rank: int, size: int, timeout_s: float, address: str) -> dist.ProcessGroup:
    """Return a process group over Gloo on the interface of an address.

    Gloo cannot abort: who waits for a silent member waits until the deadline. The end of a member's process, or of its
    group, frees the others at once.
    """
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    group._register_backend(torch.device("cpu"), kind, ProcessGroupGloo(store, rank, size, options))
    group._set_default_backend(kind)
    return group


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


_open: weakref.WeakSet[ProcessGroups] = weakref.WeakSet()


@functools.cache
def _end_at_exit() -> None:
    """Have no thread build a group when the interpreter ends: in torch's code, it would end the process by a signal."""
    atexit.register(_end_all)


def _end_all() -> None:
    for groups in tuple(_open):
        groups.end(callers=True)
