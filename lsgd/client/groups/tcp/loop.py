"""A thread that serves the lines of one direction."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsgd.client.groups.tcp.line import Line

TURN_S = 1.0
"""How often idle lines are checked, in seconds."""


class Loop:
    """Serves each line whose socket is ready, if the line has asked for it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._lines: dict[int, Line] = {}
        self._epoll = select.epoll()
        self._ended = os.eventfd(0)
        self._epoll.register(self._ended, select.EPOLLIN)
        self._ending = threading.Lock()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def add(self, descriptor: int, line: Line) -> None:
        """Watch a line's socket from now on, whenever :meth:`arm` asks for it."""
        self._lines[descriptor] = line
        self._epoll.register(descriptor, select.EPOLLONESHOT)

    def arm(self, descriptor: int, events: int) -> None:
        """Serve the line once, at one of these epoll events."""
        self._epoll.modify(descriptor, events | select.EPOLLONESHOT)

    def remove(self, descriptor: int) -> None:
        """Forget a socket that is about to be closed."""
        del self._lines[descriptor]
        with suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)

    def end(self) -> None:
        """End the thread; all sockets must have been removed."""
        if self._ending.acquire(blocking=False):
            os.eventfd_write(self._ended, 1)

    def _serve(self) -> None:
        watched_at = time.monotonic()
        while True:
            for descriptor, _ in self._epoll.poll(TURN_S):
                if descriptor == self._ended:
                    self._epoll.close()
                    os.close(self._ended)
                    return
                if line := self._lines.get(descriptor):
                    line.serve()
            if time.monotonic() - watched_at > TURN_S:
                watched_at = time.monotonic()
                for line in tuple(self._lines.values()):
                    line.watch()
