"""Members of a generation as threads of one process: real channels, and the server's own rendezvous."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from lsgd.client.control.channel import Channel
from lsgd.client.control.identity import Identity, versions
from lsgd.client.control.island import Island
from lsgd.client.control.joining import Membership
from lsgd.plan.plan import Plan
from lsgd.protocol.credentials import run_certificate
from lsgd.protocol.messages import (
    PROTOCOL,
    Generation,
    GenerationOver,
    Get,
    Join,
    Message,
    Put,
    Welcome,
    decode,
    encode,
)
from lsgd.protocol.sockets import Listener, Wakeup, wait_for
from lsgd.server.global_daemon import Rendezvous

from ..integration.running import until

CERTIFICATE = run_certificate(b"s" * 32, "run")


def generation(
    *node_sizes: int, number: int = 1, transport: str = "tcp", nccl_nodes: tuple[int, ...] = ()
) -> Generation:
    places = [(node, index) for node, size in enumerate(node_sizes) for index in range(size)]
    return Generation.of(number, places, transport, nccl_nodes=nccl_nodes)


class Switchboard:
    """Stands where the servers are, for what process groups need of them.

    Args:
        folder: for its socket.
    """

    def __init__(self, folder: Path) -> None:
        self._listener = Listener(f"ipc://{folder}/s")
        self.address = self._listener.address
        self._wakeup = Wakeup()
        self._rendezvous = Rendezvous()
        self._peers: dict[str, bytes] = {}
        self._outbox: list[Message] = []
        self._closing = False
        self._channels: list[Channel] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()
        self._closing = True
        self._wakeup.set()
        self._thread.join()
        self._listener.close()
        self._wakeup.close()

    def push(self, message: Message) -> None:
        """Send a message to all members."""
        self._outbox.append(message)
        self._wakeup.set()

    def end(self, generation: int, reason: str) -> None:
        """Tell all members that a generation is over."""
        self.push(GenerationOver(generation, reason))

    @contextmanager
    def ending(self, generation: int, reason: str, members: int = 1) -> Iterator[None]:
        """Tell so once so many members have said something; nobody else would hear it."""

        def end() -> None:
            until(lambda: len(self._peers) == members, f"{members} have said something")
            self.end(generation, reason)

        thread = threading.Thread(target=end)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def member(self, name: str, plan: Plan | None = None, certificate: bytes = b"") -> Membership:
        """Return the membership of a worker on this machine."""
        incarnation = len(self._channels) + 1
        channel = Channel(self.address, incarnation, silence_s=20.0)
        self._channels.append(channel)
        identity = Identity(0, incarnation, self.address, None)
        join = Join(PROTOCOL, name, incarnation, int(name[4]), int(name[-1]), versions(), "m", "m", "", "127.0.0.1")
        plan = plan or Plan()
        welcome = Welcome("run", plan.to_json(), 0, 1, (), certificate)
        about = {"join": join, "welcome": welcome, "plan": plan, "island": Island()}
        return Membership(identity, 0, "", channel, device=torch.device("cpu"), **about)

    def _serve(self) -> None:
        while not self._closing:
            wait_for(1.0, self._listener, self._wakeup)
            self._wakeup.clear()
            while self._outbox:
                message = self._outbox.pop(0)
                for peer in self._peers.values():
                    self._listener.send(peer, [encode(message)])
            for peer, frames in self._listener.receive():
                for frame in frames:
                    self._take(peer, decode(frame))

    def _take(self, peer: bytes, message: Any) -> None:
        self._peers[message.worker] = peer
        if isinstance(message, Put | Get):
            self._rendezvous.reset(max(message.generation, self._rendezvous.generation))
        if isinstance(message, Put):
            for worker, _, value in self._rendezvous.put(message):
                self._listener.send(self._peers[worker], [encode(value)])
        elif isinstance(message, Get) and (value := self._rendezvous.get(message)):
            self._listener.send(peer, [encode(value)])


def together(work: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
    """Return what ``work(rank)`` returns for each rank, all run at once; an exception counts as a result."""

    def attempt(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(attempt, ranks))
