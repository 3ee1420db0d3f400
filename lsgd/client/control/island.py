"""The processes of one worker; the first, the head, talks to the servers for all.

They share one sharded model, and each exchanges its part; or each has a replica in DistributedDataParallel, and the
head exchanges for all (:mod:`lsgd.client.control.replicas`). All run the same script on one machine. The head decides
for all, by what they report. A thread at each end of each connection to the head sends a sign of life every second. So
a process that ends, freezes or hangs ends the island, even if the others wait for it in a torch collective without a
deadline.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import pickle
import queue
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lsgd.client.control.channel import Channel, Message, heartbeat_every_s
from lsgd.client.control.closing import on_error
from lsgd.client.control.replicas import bare, ddp_of, fingerprints
from lsgd.errors import ConfigError, ExchangeError, IslandError, LsgdError
from lsgd.protocol.messages import Get, Put
from lsgd.protocol.socket_folder import ISLAND_NAME, socket_folder
from lsgd.shards import mesh_of

logger = logging.getLogger("lsgd")

T = TypeVar("T")
R = TypeVar("R")

SIZE_VARIABLE = "LSGD_ISLAND"
"""The variable in which the launcher says how many processes a worker has."""

CONNECT_WITHIN_S = 60.0
"""How long an island's processes have to connect to the head, in seconds."""

SAID_AFTER_S = 120.0
"""After how long the head says which process it waits for, in seconds; again after twice as long each time."""

STUCK_AFTER_S = 5.0
"""How long a process may outlive another one of its island before its thread ends it, in seconds."""

LONGEST_NBYTES = 16
"""The bytes of the longest element that torch has."""

LEAST_SHARED_NBYTES = 1 << 16
"""From this size on, tensors pass through memory that the processes share, instead of their connections."""

_TOGETHER = "all processes of an island must call the worker's methods together, in the same order"


class ElsewhereError(ExchangeError):
    """A round failed in another process of this worker's island."""


class Island:
    """The processes of one worker, which call the same methods in the same order; one process is only a head.

    Args:
        rank: this process's in the island; 0 is the head.
        size: number of processes.
        links: ranks and connections, in order: the head's to all others, and another process's to the head.
        replicas: whether each process has the whole model; otherwise each has a shard.

    Attributes:
        handed: tensors that the head has handed to this process.
        passed: returns how many bytes of tensors this process has sent and received.
        take: called with the frames that the others pass up to the head, or the head passes down.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, links: Sequence[tuple[int, Connection]] = (), *, replicas: bool = False
    ) -> None:
        self.rank, self.size, self.replicas = rank, size, replicas
        self.handed = Handed()
        self.passed: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.take: Callable[[bytes], None] = lambda frame: None
        self.silence_s = CONNECT_WITHIN_S
        self._calls = 0
        self._others: Sequence[tuple[int, int]] = ()  # what the others have passed
        self._peers = [_Peer(self, f"process {rank}" if rank else "the head", link) for rank, link in links]

    @property
    def is_head(self) -> bool:
        """Whether this process speaks with the servers."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        """The number of this process's part of the model."""
        return 0 if self.replicas else self.rank

    @property
    def shards(self) -> int:
        """In how many parts the processes have the model."""
        return 1 if self.replicas else self.size

    def decide(
        self,
        what: str,
        report: Callable[[], R],
        decision: Callable[[Callable[[], list[R]]], T],
        *,
        reports: bool = True,
    ) -> T:
        """Return on all processes what ``decision`` returns on the head; raise on all what it raises there.

        Args:
            what: words for what this process does; all do the same.
            report: returns this process's report.
            decision: function of a function that returns the reports of all processes, by rank. It asks once at most.
            reports: whether all report at once; otherwise only if the decision asks, which takes another message to
                the others and one back.
        """
        if self.size == 1:
            return decision(lambda: [report()])
        self._calls += 1
        tag, own = (self._calls, what), report() if reports else None
        if not self.is_head:
            return self._follow(tag, report, own)  # type: ignore[no-any-return]
        try:
            others = [peer.receive(tag) for peer in self._peers]
            self._others = [passed for _, passed in others]

            def ask() -> list[R]:
                if reports:
                    return [own, *(report for report, _ in others)]
                self._tell(tag, None)
                return [report(), *(peer.receive(tag) for peer in self._peers)]

            decided = decision(ask)
        except Exception as error:
            with suppress(IslandError):
                self._tell(tag, (False, _portable(error)))
            raise
        self._tell(tag, (True, decided))
        return decided

    def _follow(self, tag: tuple[int, str], report: Callable[[], R], own: R | None) -> Any:
        """Return what the head decides, and report to it if it asks."""
        self._tell(tag, (own, self.passed()))
        while (answer := self._peers[0].receive(tag)) is None:
            self._tell(tag, report())
        good, value = answer
        if not good:
            raise value
        return value

    def share(self, what: str, call: Callable[[], T]) -> T:
        """Return on all processes what ``call`` returns on the head; raise on all what it raises there."""
        return self.decide(what, lambda: None, lambda _: call())

    def gather(self, what: str, value: R) -> list[R]:
        """Return on all processes the values of all, by rank."""
        return self.decide(what, lambda: value, lambda values: values())

    def vote(self, judged: Sequence[float] | ExchangeError) -> list[float]:
        """Return on all processes the sums of the numbers that each has judged, if its part of a round went well.

        Replicas have each judged the same whole model, so of theirs these are the largest.

        A vote precedes each commit, so that all processes commit a round, or none. A process whose part has failed
        votes with the error once, which fails the vote of the others.

        Raises:
            ElsewhereError: the round has failed in another process.
        """
        if isinstance(judged, ElsewhereError):  # this was the vote
            return []
        failed = isinstance(judged, ExchangeError)
        votes = self.gather("votes in a round", ((), str(judged)) if failed else (judged, ""))
        if failed:
            return []
        if reason := next((reason for _, reason in votes if reason), ""):
            raise ElsewhereError(f"it failed in another process of this worker: {reason}")
        combine = max if self.replicas else sum
        return [combine(each) for each in zip(*(numbers for numbers, _ in votes), strict=True)]

    def total_passed(self) -> tuple[int, int]:
        """Return on the head the bytes of all processes: its own now, those of others as of their last report."""
        sent, received = zip(self.passed(), *self._others, strict=True)
        return sum(sent), sum(received)

    def connect(self, channel: Channel) -> None:
        """On the head, pass the other processes' messages to the servers, and back what concerns them."""
        self.take, channel.pass_down = channel.put, self._pass_down

    def has_joined(self, lease_s: float) -> None:
        """From now on wait for other processes that are silent as long as the plan says."""
        self.silence_s = lease_s

    def hand(self, key: Key, tensors: Sequence[Tensor] | None) -> None:
        """From the head, give the other processes tensors under a key; None: the head has none, because it failed."""
        nbytes = -1 if tensors is None else sum(map(_room, tensors))
        if nbytes < LEAST_SHARED_NBYTES:
            data = None if tensors is None else bytearray(nbytes)
            if data:
                _fill(data, tensors or ())
            self._hand(key, data)
            return
        file = os.memfd_create("lsgd")
        try:
            os.ftruncate(file, nbytes)
            with mmap.mmap(file, nbytes) as memory:
                _fill(memory, tensors or ())
            self._hand(key, nbytes, file)
        finally:
            os.close(file)

    def _hand(self, key: Key, data: bytearray | int | None, file: int | None = None) -> None:
        for peer in self._peers:
            with suppress(IslandError):  # one that is gone is noticed elsewhere
                peer.send("tensors", (key, data), file)

    def end_generation(self, generation: int) -> None:
        """On the head, end the waits of the other processes for what it receives in a generation."""
        for peer in self._peers:
            with suppress(IslandError):
                peer.send("over", generation)

    def pass_up(self, frame: bytes) -> None:
        """Give the head a message for the servers."""
        self._peers[0].send("frame", frame)

    def close(self) -> None:
        """Leave this island: if other processes end from now on, that is no error."""
        for peer in self._peers:
            peer.close()

    def _pass_down(self, frame: bytes) -> None:
        for peer in self._peers:
            with suppress(IslandError):  # one that is gone is noticed elsewhere
                peer.send("frame", frame)

    def _tell(self, tag: tuple[int, str], value: object) -> None:
        for peer in self._peers:
            peer.send("call", (tag, value))


Key = tuple[int, str, int]
"""A generation (0: none), a group in it, and the number of an operation in that."""


class Handed:
    """Tensors that the head has handed to this process, until it takes them."""

    def __init__(self) -> None:
        self._arrived: dict[Key, bytearray | mmap.mmap | None] = {}
        self._over = -1
        self._lost: LsgdError | None = None
        self._changed = threading.Condition()

    def put(self, key: Key, data: bytearray | mmap.mmap | None) -> None:
        """Keep the bytes of tensors; None: the head has failed."""
        with self._changed:
            if key[0] > self._over or not key[0]:
                self._arrived[key] = data
                self._changed.notify_all()

    def end(self, generation: int) -> None:
        """Drop what is left of generations up to this one; waits for more of them fail."""
        with self._changed:
            self._over = max(self._over, generation)
            self._arrived = {key: data for key, data in self._arrived.items() if key[0] > self._over or not key[0]}
            self._changed.notify_all()

    def lose(self, reason: LsgdError) -> None:
        """Let all waits fail: the head is gone."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    def take(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Wait for tensors, and copy them into these.

        Raises:
            ExchangeError: the head has failed, or the generation is over.
            LsgdError: the head is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or self._lost or 0 < key[0] <= self._over)
            if key not in self._arrived:
                raise self._lost or ExchangeError(f"generation {key[0]} is over for the head of this island")
            data = self._arrived.pop(key)
        if data is None:
            raise ExchangeError("the exchange of the head of this island has failed")
        for x, part in zip(tensors, _parts(data, tensors), strict=True):
            x.copy_(part)


def _fill(data: bytearray | mmap.mmap, tensors: Sequence[Tensor]) -> None:
    for x, part in zip(tensors, _parts(data, tensors), strict=True):
        part.copy_(x.detach())


def _parts(data: bytearray | mmap.mmap, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of bytes, one after the other, shaped like tensors."""
    start = 0
    for x in tensors:
        yield torch.frombuffer(data, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape) if x.numel() else x
        start += _room(x)


def _room(x: Tensor) -> int:
    """Return the bytes for a tensor, before the next one, whose elements may be longer."""
    return -(-x.nbytes // LONGEST_NBYTES) * LONGEST_NBYTES


class _Peer:
    """Another process of the island, and the thread that listens to it."""

    def __init__(self, island: Island, name: str, link: Connection) -> None:
        self._island = island
        self._name = name
        self._link = link
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[tuple[tuple[int, str], Any] | None] = queue.SimpleQueue()
        self._lost: LsgdError = IslandError(f"{name} of this island has ended")
        self._over = threading.Event()  # this side has left the island, so silence is no error
        threading.Thread(target=self._listen, name="lsgd-island", daemon=True).start()

    def send(self, kind: str, value: object, file: int | None = None) -> None:
        """Send a value, and perhaps an open file; raise an IslandError if the process is gone."""
        with self._sending:
            try:
                self._link.send((kind, value))
                if file is not None:
                    send_handle(self._link, file, None)
            except (OSError, ValueError):
                raise IslandError(f"{self._name} of this island has ended") from None

    def receive(self, tag: tuple[int, str]) -> Any:
        """Return what the process sent in the same call, however long it works on something else before.

        Raises:
            IslandError: the process is gone or silent.
            LsgdError: it has left the run, or makes another call.
        """
        received = self._next(tag[1])
        if received is None:
            self._received.put(None)  # for the next call
            raise self._lost
        if received[0] != tag:
            raise LsgdError(
                f"this process {tag[1]} (call {tag[0]}), but {self._name} of its island {received[0][1]} (call "
                f"{received[0][0]}); {_TOGETHER}"
            )
        return received[1]

    def _next(self, what: str) -> tuple[tuple[int, str], Any] | None:
        """Wait for what arrives next; the head says now and then for whom."""
        waited_s, more_s = 0.0, SAID_AFTER_S
        while True:
            try:
                return self._received.get(timeout=more_s if self._island.is_head else None)
            except queue.Empty:
                waited_s += more_s
                more_s = waited_s
                logger.warning(
                    "this process %s, and has waited %g s for %s of its island, which runs, but has made no call; it "
                    "goes on waiting, and %s",
                    *(what, waited_s, self._name, _TOGETHER),
                )

    def close(self) -> None:
        """Say that this process leaves the island, and end the connection."""
        self._over.set()
        with suppress(IslandError):
            self.send("bye", None)

    def _listen(self) -> None:
        heard_at = beat_at = time.monotonic()
        try:
            while True:
                now, beat_s = time.monotonic(), heartbeat_every_s(self._island.silence_s)
                if now - beat_at >= beat_s and self._beat():
                    beat_at = now
                if self._link.poll(beat_s / 2):
                    kind, value = self._link.recv()
                    heard_at = time.monotonic()
                    if kind == "call":
                        self._received.put(value)
                    elif kind == "tensors":
                        self._island.handed.put(value[0], self._received_data(value[1]))
                    elif kind == "over":
                        self._island.handed.end(value)
                    elif kind == "frame" and not self._over.is_set():
                        self._island.take(value)
                    elif kind == "bye":
                        self._end(LsgdError(f"{self._name} of this island has left the run, and this one has not"))
                        return
                elif self._over.is_set():
                    return
                elif now - heard_at > self._island.silence_s:
                    silent = f"{self._name} of this island has been silent for {now - heard_at:.0f} s"
                    self._end(IslandError(silent))
                    break
        except (OSError, EOFError, IslandError):
            self._end(self._lost)
        if not self._over.wait(STUCK_AFTER_S):
            # The training thread hangs in a collective, perhaps forever, and nothing else can end it.
            logger.error("%s: this process ends with exit code %d", self._lost, IslandError.exit_code)
            logging.shutdown()
            os._exit(IslandError.exit_code)

    def _beat(self) -> bool:
        """Send a sign of life, and return True; or False, rather than wait for a process that takes nothing."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            room = select.poll()
            room.register(self._link, select.POLLOUT)
            if not room.poll(0):
                return False
            self._link.send(("beat", None))
            return True
        finally:
            self._sending.release()

    def _received_data(self, data: bytearray | int | None) -> bytearray | mmap.mmap | None:
        """Return the bytes of tensors; a number of them is followed by a file in memory."""
        if not isinstance(data, int):
            return data
        file = recv_handle(self._link)
        try:
            return mmap.mmap(file, data)
        finally:
            os.close(file)

    def _end(self, reason: LsgdError) -> None:
        self._lost = reason
        self._received.put(None)
        self._island.handed.lose(reason)


class FollowerChannel(Channel):
    """A channel through the head, for the addresses of process groups only; the head says all else for its island.

    The wait for an address ends with its generation or at its own deadline.
    """

    def __init__(self, address: str, incarnation: int, island: Island) -> None:
        self._island = island
        super().__init__(address, incarnation, math.inf)

    def _open(self, incarnation: int) -> None:
        self._island.take = self._take

    def send(self, message: Message) -> None:
        """Have the head forward a message, if it is about an address."""
        if isinstance(message, Put | Get):
            super().send(message)

    def put(self, frame: bytes) -> None:
        """Have the head send a packed message."""
        self._island.pass_up(frame)


def island_of(model: nn.Module) -> Island:
    """Return the processes that share a model; all of them call this.

    Raises:
        ConfigError: the model is sharded in an unsupported way or over machines, or not sharded although the launcher
            expects it.
        IslandError: a process does not connect.
    """
    mesh, ddp = mesh_of(model), ddp_of(model)
    if mesh is not None and mesh.size() > 1:
        rank, size = mesh.get_local_rank(), mesh.size()
        return Island(rank, size, _connect(mesh.get_group(), rank, size))
    size = dist.get_world_size(ddp.process_group) if ddp is not None else 1
    expected, world = int(os.environ.get(SIZE_VARIABLE, "1")), _world_size()
    if ddp is not None and 1 < size == max(size, expected, world):
        rank = dist.get_rank(ddp.process_group)
        island = Island(rank, size, _connect(ddp.process_group, rank, size), replicas=True)
        with on_error(island.close):
            _check_equal(island, bare(model))
        return island
    shared = (
        "but its model is not shared by them: join with DistributedDataParallel(model), or after fully_shard(model), "
        "over all of them; or"
    )
    if expected > 1:
        raise ConfigError(
            f"lsgd launch has started {expected} processes for this worker (--processes-per-worker), {shared} "
            f"launch with --workers instead"
        )
    if world > 1:
        raise ConfigError(
            f"torch.distributed is initialized with {world} processes, {shared} start each worker by itself, with lsgd "
            f"launch --torchrun, whose groups have one process"
        )
    return Island()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_equal(island: Island, model: nn.Module) -> None:
    """Raise ConfigError on all processes unless all have the same parameters."""
    named = dict(model.named_parameters())
    own, *others = island.gather("compares its model", fingerprints(list(named.values())))
    for rank, other in enumerate(others, 1):
        if other != own:
            name = next(name for name, one, its in zip(named, own, other, strict=True) if one != its)
            raise ConfigError(
                f"process {rank} of this island has another model than the head: the parameter {name} differs; "
                f"DistributedDataParallel(model) makes all equal, so load weights before it, or the same on all"
            )


def _connect(group: dist.ProcessGroup, rank: int, size: int) -> list[tuple[int, Connection]]:
    """Return connections with their ranks, in order: the head's to all others, and another process's to the head."""
    folder = socket_folder() if rank == 0 else Path()
    place = [(socket.gethostname(), str(folder / ISLAND_NAME))]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            if rank == 0:
                listener.bind(place[0][1])
                listener.listen(size)
                listener.settimeout(CONNECT_WITHIN_S)
            dist.broadcast_object_list(place, dist.get_global_rank(group, 0), group)
            if rank != 0:
                return [(0, _call(*place[0], rank))]
            return sorted((_accept(listener) for _ in range(size - 1)), key=lambda accepted: accepted[0])
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _call(host: str, path: str, rank: int) -> Connection:
    try:
        connection = Client(path, "AF_UNIX")
    except OSError as error:
        raise ConfigError(
            f"process {rank} of this island runs on {socket.gethostname()} and cannot reach the head on {host} "
            f"({error.strerror}); all processes of an island must be on one machine, and see the same {path}"
        ) from None
    connection.send(rank)
    return connection


def _accept(listener: socket.socket) -> tuple[int, Connection]:
    try:
        link, _ = listener.accept()
    except TimeoutError:
        raise IslandError(f"a process of this island has not connected within {CONNECT_WITHIN_S:g} s") from None
    link.settimeout(None)
    connection = Connection(link.detach())
    return int(connection.recv()), connection


def _portable(error: Exception) -> Exception:
    """Return an error that another process can raise."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return LsgdError(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, Exception) else LsgdError(str(error))
