"""The listener and the three threads of a mesh: one makes connections, one sends, one receives."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from lsgd.client.groups.routes import Endpoint, listening
from lsgd.client.groups.stream import Loop

MAX_GREETING = 128
"""How many accepted connections may be in their handshake at a time; the oldest one makes room for the next."""

END_WITHIN_S = 5.0
"""How long :meth:`Service.join` waits for each thread, in seconds; none of them blocks."""

_PAUSE_S = 0.1

T = TypeVar("T")


class Service:
    """Listens on an address of this machine, and runs the coroutines that make connections.

    ``welcome`` accepts a connection; it is called with its socket, its origin, and the endpoint where the others dial.

    Raises:
        ExchangeError: it cannot listen there.
    """

    def __init__(
        self, address: str, welcome: Callable[[socket.socket, str, Endpoint], Coroutine[Any, Any, None]]
    ) -> None:
        self._welcome = welcome
        with ExitStack() as stack:
            self._listener, self.endpoint = stack.enter_context(listening(address))
            self._closing = stack.pop_all()
        self.sender = Loop("lsgd-send")
        self.receiver = Loop("lsgd-receive")
        self._events = asyncio.new_event_loop()
        self._ended = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting: dict[asyncio.Task[None], socket.socket] = {}
        self._thread = threading.Thread(target=self._serve, name="lsgd-connect", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` in the thread that makes connections, until :meth:`end` cancels it."""
        with suppress(RuntimeError):  # the loop is closed
            self._events.call_soon_threadsafe(self._begin, work)

    def end(self) -> None:
        """Tell the threads to end; safe from any thread."""
        with suppress(RuntimeError):
            self._events.call_soon_threadsafe(self._stop)
        self.sender.end()
        self.receiver.end()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in (self._thread, self.sender.thread, self.receiver.thread):
            thread.join(END_WITHIN_S)

    # -- in the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._listen()
        self._events.run_forever()
        self._events.remove_reader(self._listener)
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            self._events.run_until_complete(asyncio.sleep(0))
        self._events.close()
        self._closing.close()

    def _stop(self) -> None:
        if not self._ended:  # a second stop would interrupt the wait for cancelled tasks
            self._ended = True
            self._events.stop()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None] | None:
        if self._ended:
            return None
        task = self._events.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _listen(self) -> None:
        self._events.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, (origin, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the caller has gone
            return
        except OSError:  # this process is out of descriptors
            self._events.remove_reader(self._listener)
            self._events.call_later(_PAUSE_S, self._listen)
            return
        if len(self._greeting) >= MAX_GREETING:
            next(iter(self._greeting)).cancel()
        if (task := self._begin(lambda: self._welcome(connection, origin, self.endpoint))) is None:
            connection.close()
            return
        self._greeting[task] = connection
        task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        connection = self._greeting.pop(task)
        if task.cancelled():  # perhaps before it began
            connection.close()


async def retried(connection: socket.socket, step: Callable[[], T]) -> T:
    """Retry ``step`` on a non-blocking connection until it need not wait, and return its result."""
    events, descriptor = asyncio.get_running_loop(), connection.fileno()
    while True:
        try:
            return step()
        except (BlockingIOError, ssl.SSLWantReadError):
            add, remove = events.add_reader, events.remove_reader
        except ssl.SSLWantWriteError:
            add, remove = events.add_writer, events.remove_writer
        ready: asyncio.Future[None] = events.create_future()
        add(descriptor, _set, ready)
        try:
            await ready
        finally:
            remove(descriptor)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Return the next ``nbytes`` bytes; raise a ConnectionError if the other end closes the connection before."""
    data = bytearray(nbytes)
    left = memoryview(data)
    while left:
        if not (count := await retried(connection, partial(connection.recv_into, left))):
            raise ConnectionResetError("it was closed at the other end")
        left = left[count:]
    return bytes(data)
