"""The processes of one worker, which share one sharded model: the first, the head, speaks with the servers for all.

All of them run the same script. What the head hears it shares, and what each finds they compare. They are on one
machine, and each of the others has a connection to the head. A thread at each end tells the other every second
that its process runs. So a process that ends, freezes or hangs ends the island, also where the others wait for it in a
collective of torch's that has no deadline.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from lsgd.client.control.folder import socket_folder
from lsgd.errors import ConfigError, ExchangeError, IslandError, LsgdError
from lsgd.shards import mesh_of

logger = logging.getLogger("lsgd")

T = TypeVar("T")

SIZE_VARIABLE = "LSGD_ISLAND"
"""The variable by which the launcher tells of how many processes a worker is."""

CONNECT_WITHIN_S = 60.0
"""How long the processes of an island have to connect to the head, in seconds."""

FIRST_PATIENCE_S = 600.0
"""How long the head waits for another process to make the same call while they join, in seconds."""

STUCK_AFTER_S = 5.0
"""How long a process may take to end after another one of its island has; then its thread ends it, in seconds."""

BEAT_S = 1.0


class ElsewhereError(ExchangeError):
    """A round failed in another process of this worker's island."""


class Island:
    """A worker of one process: the island that consists of its head.

    Attributes:
        rank: of this process in the island; 0 is the head.
        size: processes of the island.
    """

    rank = 0
    size = 1

    @property
    def is_head(self) -> bool:
        """Whether this process speaks with the servers."""
        return self.rank == 0

    def share(self, what: str, call: Callable[[], T]) -> T:
        """Return on all processes what ``call`` returns on the head; raise on all what it raises there."""
        return call()

    def gather(self, what: str, value: T) -> list[T]:
        """Return on all processes the values of all, by rank."""
        return [value]

    def poll(self, value: T) -> list[T]:
        """Return on all processes the values of all, by rank, in a round.

        All processes commit a round, or none: it, or :meth:`agree`, is called before each commit.

        Raises:
            ElsewhereError: the round has failed in another one.
        """
        said = self.gather("votes in a round", (value, ""))
        if reason := next((reason for _, reason in said if reason), ""):
            raise ElsewhereError(f"it failed in another process of this worker: {reason}")
        return [value for value, _ in said]

    def agree(self, ok: bool = True) -> bool:
        """Return whether ``ok`` holds in all processes; raise as :meth:`poll`."""
        return all(self.poll(ok))

    def fail(self, error: ExchangeError) -> None:
        """Have the other processes' next :meth:`poll` fail, unless one of them has failed this one's."""
        if not isinstance(error, ElsewhereError):
            self.gather("votes in a round", (None, str(error)))

    def close(self) -> None:
        """Be of this island no more; the others' ends are no errors from now on."""


class ManyProcesses(Island):
    """An island of several processes; all call each method together, in the same order.

    Args:
        mesh: of the processes (``torch.distributed.device_mesh.DeviceMesh``), of one dimension.

    Attributes:
        silence_s: after so long without a sign of another process, the island is lost.
        patience_s: how long the head waits for another process to make the same call.
        take: on the head, called with what :meth:`pass_up` was given; elsewhere, with what :meth:`pass_down` was.

    Raises:
        ConfigError: the processes are not on one machine.
        IslandError: one does not connect.
    """

    def __init__(self, mesh: Any) -> None:
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.silence_s, self.patience_s = CONNECT_WITHIN_S, FIRST_PATIENCE_S
        self.take: Callable[[bytes], None] = lambda frame: None
        self._calls = 0
        links = _connect(mesh.get_group(), self.rank, self.size)
        self._peers = [_Peer(self, f"process {rank}" if rank else "the head", link) for rank, link in links]

    def share(self, what: str, call: Callable[[], T]) -> T:
        """Return on all processes what ``call`` returns on the head; raise on all what it raises there."""
        tag = self._tag(what)
        if not self.is_head:
            good, value = self._peers[0].receive(tag, math.inf)
            if not good:
                raise value
            return value  # type: ignore[no-any-return]
        try:
            value = call()
        except Exception as error:
            self._tell(tag, (False, _portable(error)))
            raise
        self._tell(tag, (True, value))
        return value

    def gather(self, what: str, value: T) -> list[T]:
        """Return on all processes the values of all, by rank."""
        tag = self._tag(what)
        if not self.is_head:
            self._peers[0].send("call", (tag, value))
            return list(self._peers[0].receive(tag, math.inf))
        values = [value, *(peer.receive(tag, self.patience_s) for peer in self._peers)]
        self._tell(tag, values)
        return values

    def pass_up(self, frame: bytes) -> None:
        """Give the head a message for the servers."""
        self._peers[0].send("frame", frame)

    def pass_down(self, frame: bytes) -> None:
        """Give all others a message of the servers'; one that is gone is noticed elsewhere."""
        for peer in self._peers:
            with suppress(IslandError):
                peer.send("frame", frame)

    def close(self) -> None:
        """Be of this island no more; the others' ends are no errors from now on."""
        for peer in self._peers:
            peer.close()

    def _tag(self, what: str) -> tuple[int, str]:
        self._calls += 1
        return self._calls, what

    def _tell(self, tag: tuple[int, str], value: object) -> None:
        for peer in self._peers:
            peer.send("call", (tag, value))


class _Peer:
    """Another process of the island, and the thread that listens to it."""

    def __init__(self, island: ManyProcesses, name: str, link: Connection) -> None:
        self._island = island
        self._name = name
        self._link = link
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[tuple[tuple[int, str], Any] | None] = queue.SimpleQueue()
        self._lost: LsgdError = IslandError(f"{name} of this island has ended")
        self._over = threading.Event()  # on one side or the other: silence is no error any more
        threading.Thread(target=self._listen, name="lsgd-island", daemon=True).start()

    def send(self, kind: str, value: object) -> None:
        """Send it something.

        Raises:
            IslandError: it is gone.
        """
        with self._sending:
            try:
                self._link.send((kind, value))
            except (OSError, ValueError):
                raise IslandError(f"{self._name} of this island has ended") from None

    def receive(self, tag: tuple[int, str], within_s: float) -> Any:
        """Return what it has sent in the same call.

        Raises:
            IslandError: it is gone.
            LsgdError: it has left the run, makes another call, or none in time.
        """
        try:
            came = self._received.get(timeout=None if math.isinf(within_s) else within_s)
        except queue.Empty:
            raise LsgdError(
                f"{self._name} of this island does not come: this one {tag[1]}, and has waited {within_s:g} s; all "
                f"processes of an island have to call the worker's methods together, in the same order"
            ) from None
        if came is None:
            raise self._lost
        if came[0] != tag:
            raise LsgdError(
                f"this process {tag[1]} (call {tag[0]}), and {self._name} of its island {came[0][1]} (call "
                f"{came[0][0]}); all processes of an island have to call the worker's methods together, in the same "
                f"order"
            )
        return came[1]

    def close(self) -> None:
        """Say that this process leaves the island, and end the connection."""
        self._over.set()
        with suppress(IslandError):
            self.send("bye", None)

    def _listen(self) -> None:
        heard_at = beat_at = time.monotonic()
        try:
            while True:
                now = time.monotonic()
                if now - beat_at >= BEAT_S:
                    self.send("beat", None)
                    beat_at = now
                if self._link.poll(BEAT_S / 2):
                    kind, value = self._link.recv()
                    heard_at = time.monotonic()
                    if kind == "call":
                        self._received.put(value)
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
            # The training thread hangs in a collective, perhaps for ever, and nothing else can end it.
            logger.error("%s: this process ends with exit code %d", self._lost, IslandError.exit_code)
            logging.shutdown()
            os._exit(IslandError.exit_code)

    def _end(self, reason: LsgdError) -> None:
        self._lost = reason
        self._received.put(None)


def island_of(model: nn.Module) -> Island:
    """Return the processes that share a model; all of them call this.

    Raises:
        ConfigError: it is sharded in a way that is not supported, or not at all where the launcher expects it.
    """
    mesh = mesh_of(model)
    if mesh is not None and mesh.size() > 1:
        return ManyProcesses(mesh)
    if (size := os.environ.get(SIZE_VARIABLE, "1")) != "1":
        raise ConfigError(
            f"lsgd launch has started {size} processes for this worker (--processes-per-worker), and its model is not "
            f"sharded over them: call fully_shard(model) before Worker.join, or launch with --workers instead"
        )
    return Island()


def _connect(group: dist.ProcessGroup, rank: int, size: int) -> list[tuple[int, Connection]]:
    """Return connections to all others for the head, and to the head for the others, with their ranks, in order."""
    folder = socket_folder() if rank == 0 else Path()
    told = [(socket.gethostname(), str(folder / "island"))]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            if rank == 0:
                listener.bind(told[0][1])
                listener.listen(size)
                listener.settimeout(CONNECT_WITHIN_S)
            dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group)
            if rank != 0:
                return [(0, _call(*told[0], rank))]
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
            f"({error.strerror}); all processes of an island have to be on one machine, and see the same {path}"
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
    """Return an error as another process can raise it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return LsgdError(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, Exception) else LsgdError(str(error))
