"""The sockets of process groups, to be cut when their generation is over.

Gloo has no way to abort: a collective whose partner is frozen, or whose partner's partner is gone, waits for its
deadline, and abort() frees nobody. Shutting its sockets down does, on both ends of each.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Wires:
    """The TCP sockets that were made while process groups were."""

    def __init__(self) -> None:
        self._inodes: set[str] = set()
        self._cut: Future[None] = Future()

    def watch(self, build: Callable[[], T]) -> T:
        """Return what ``build`` returns, and take note of the sockets that it makes.

        It runs in a thread, which a cut leaves to itself and its own deadline: while Gloo waits for a member to
        connect that never will, there is no connection to shut down.

        Raises:
            ConnectionAbortedError: it was cut before the end of ``build``.
        """
        before = {inode for _, inode in _sockets()}
        built: Future[T] = Future()
        threading.Thread(target=_finish, args=(built, build), name="lsgd-build", daemon=True).start()
        ends: list[Future[Any]] = [built, self._cut]
        wait(ends, return_when=FIRST_COMPLETED)
        self._inodes |= {inode for _, inode in _sockets()} - before
        if self._cut.done():
            raise ConnectionAbortedError("its generation was over before its process group was built")
        try:
            return built.result()
        finally:
            del built, ends  # an error's traceback leads here: they would keep it, and with it Gloo's sockets

    def cut(self) -> None:
        """Shut the connections down: what waits on them, here or on the other side, fails at once."""
        with suppress(InvalidStateError):  # it was cut before
            self._cut.set_result(None)
        for descriptor, inode in _sockets():
            if inode not in self._inodes:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # raises for one that listens, whose end Gloo would not survive
                    connection.shutdown(socket.SHUT_RDWR)
        self._inodes.clear()


def _finish(built: Future[T], build: Callable[[], T]) -> None:
    try:
        built.set_result(build())
    except Exception as error:
        built.set_exception(error.with_traceback(None))  # whose frames have the group's sockets


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield descriptor and name (unique while it lives) of each socket of this process."""
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:"):
                yield int(entry), target
