"""The sockets of process groups: closed to strangers once a group is formed, and cut when its generation is over.

Gloo cannot abort: a collective whose partner is frozen, or whose partner's partner is gone, waits for its deadline, and
abort() frees nobody. Shutting down its sockets does, on both ends.

The published addresses show which sockets are Gloo's, whatever other threads open meanwhile: each member publishes the
address that its group listens on, and Gloo reads the others'. A socket is Gloo's if it listens on the address that this
member published, if it was accepted there, or if its peer is an address that another member published. No other socket
of this machine can listen on such an address, because Gloo does not share its ports.
"""

import atexit
import functools
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

Endpoint = tuple[str, int]
"""An IP address and a port."""

END_WITHIN_S = 5.0
"""How long :meth:`Connections.end` waits for the threads that form groups, in seconds; Gloo's need milliseconds."""

LEAVE_WITHIN_S = 1.0
"""How long the process waits at its end for a thread that waited for a group to release Gloo's objects, in seconds."""

_SO_PEERNAME = 28  # Linux: gives the peer even of a connection in progress
_TURN_S = 0.02
_KNOCK_WITHIN_S = 1.0


@dataclass
class Forming:
    """A Gloo group in formation: what its members have published so far.

    Attributes:
        own: where this member listens; None: unknown so far.
        numbers: what each of the others sends first when it connects, to tell Gloo who it is.
        peers: where the others listen.
    """

    own: Endpoint | None = None
    numbers: Sequence[int] = ()
    peers: set[Endpoint] = field(default_factory=set)


class Connections:
    """The sockets of the process groups of one generation.

    Args:
        when_cut: called when they are cut; ends the waits for what members publish.
    """

    def __init__(self, when_cut: Callable[[], None] = lambda: None) -> None:
        self._when_cut = when_cut
        self._inodes: set[int] = set()
        self._forming: list[Forming] = []
        self._threads: set[threading.Thread] = set()
        self._callers: set[threading.Thread] = set()  # wait for those threads
        self._cut: Future[None] = Future()

    def watch(self, build: Callable[[], T]) -> T:
        """Run ``build`` in a thread, which a cut ends, and return its result.

        Raises:
            ConnectionAbortedError: a cut came before the end of ``build``.
        """
        self._go_on()
        built: Future[T] = Future()
        thread = threading.Thread(target=_finish, args=(built, build), name="lsgd-build", daemon=True)
        self._threads.add(thread)
        self._callers.add(threading.current_thread())
        _watched.add(self)
        _register()
        thread.start()
        ends: list[Future[Any]] = [built, self._cut]
        try:
            wait(ends, return_when=FIRST_COMPLETED)
            self._go_on()
            return built.result()
        finally:
            if not built.done():
                self.end()
            if built.done():
                self._threads.discard(thread)
            self._callers.discard(threading.current_thread())
            del built, ends  # an error's traceback leads here and would keep them alive, with Gloo's sockets

    def form(self, forming: Forming, make: Callable[[], T]) -> T:
        """Return the Gloo group that ``make`` returns, after noting its sockets and closing its port.

        Raises:
            ConnectionAbortedError: a cut came before the end of ``make``.
        """
        self._forming.append(forming)
        try:
            self._go_on()
            made = make()
            self._inodes |= {os.fstat(s.fileno()).st_ino for _, s in _sockets() if _connects(s, forming)}
            stop_listening(forming)
            self._go_on()
            return made
        finally:
            self._forming.remove(forming)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Count all sockets opened inside as the group's: for NCCL, which does not say which ones it opens."""
        before = {os.fstat(s.fileno()).st_ino for _, s in _sockets()}
        yield
        self._inodes |= {os.fstat(s.fileno()).st_ino for _, s in _sockets()} - before
        self._go_on()

    def _go_on(self) -> None:
        if self._cut.done():
            raise ConnectionAbortedError("its generation was over before its process group was built")

    def cut(self) -> None:
        """Shut down the connections: what waits on them, here or on the other side, fails at once."""
        with suppress(InvalidStateError):  # it was cut before
            self._cut.set_result(None)
        self._when_cut()
        for _, connection in _sockets(self._inodes):
            with suppress(OSError):
                connection.getpeername()  # raises for a listening socket, whose end NCCL might not survive
                connection.shutdown(socket.SHUT_RDWR)
        self._inodes.clear()

    def end(self) -> None:
        """Cut, and wait until no thread forms a group.

        If the interpreter ends while a daemon thread waits in Gloo for a member, the process dies with SIGABRT. Such a
        thread cannot be interrupted, but it can be given what it waits for.
        """
        self.cut()
        deadline = time.monotonic() + END_WITHIN_S
        knocked: list[Forming] = []
        with ExitStack() as doors:
            while time.monotonic() < deadline:
                for forming in tuple(self._forming):
                    _give_up_connecting(forming)
                    if forming.own and forming not in knocked:
                        knocked.append(forming)
                        _knock(forming, doors)
                if not any(_is_alive(thread) for thread in tuple(self._threads)):
                    return

    def end_if_forming(self) -> None:
        """End if this process is forming a group; a forked one has the sockets but not the threads."""
        callers = self._callers - {threading.current_thread()}
        if any(thread.is_alive() for thread in tuple(self._threads)):
            self.end()
        for caller in callers:  # it drops Gloo's objects; if the interpreter ended meanwhile, the process would die
            caller.join(LEAVE_WITHIN_S)


def stop_listening(forming: Forming) -> None:
    """Close the port of a formed group; otherwise Gloo would accept and keep connections as long as it lives.

    Gloo has no call for that, so its descriptor gets another socket. That one listens too, because Gloo ends the
    process if an accept() under way fails, but nobody can connect to it. Gloo's epoll refers to files, not
    descriptors. So the old file is unregistered, because a forked process may keep it open; and the new one is
    registered without events, because some releases of Gloo unregister it at the end, and end the process if they
    cannot.

    Raises:
        RuntimeError: there is no such socket.
    """
    for descriptor, listener in _sockets():
        if _listens(listener) and _own_end(listener) == forming.own:
            with socket.socket(socket.AF_UNIX) as deaf:
                deaf.setblocking(False)
                deaf.bind("")  # a free name in the abstract namespace
                deaf.listen(0)
                if not any([_replace(epoll, descriptor, deaf) for epoll in _epolls()]):
                    os.dup2(deaf.fileno(), descriptor, inheritable=False)
            return
    raise RuntimeError(f"Gloo should listen on {forming.own}, but no socket of this process does")


def endpoint(sockaddr: bytes) -> Endpoint:
    """Return the address in a ``struct sockaddr_in`` or ``sockaddr_in6``, as published or from the kernel.

    Raises:
        ValueError: it is neither.
    """
    family, port = struct.unpack_from("=H", sockaddr)[0], struct.unpack_from("!H", sockaddr, 2)[0]
    at = {socket.AF_INET: (4, 8), socket.AF_INET6: (8, 24)}.get(family)
    if at is None:
        raise ValueError(f"an address of family {family}")
    return socket.inet_ntop(family, sockaddr[slice(*at)]), port


def _own_end(connection: socket.socket) -> Endpoint | None:
    host, port, *_ = connection.getsockname()
    return host.partition("%")[0], port


def _other_end(connection: socket.socket) -> Endpoint | None:
    nbytes = 16 if connection.family == socket.AF_INET else 28
    try:
        return endpoint(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERNAME, nbytes))
    except OSError:
        return None


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _connects(connection: socket.socket, forming: Forming) -> bool:
    """Return whether this is a connection of the group, made or in progress."""
    peer = _other_end(connection)
    return peer is not None and (peer in forming.peers or _own_end(connection) == forming.own)


def _give_up_connecting(forming: Forming) -> None:
    """Make pending attempts to connect to members fail."""
    for _, connection in _sockets():
        if _other_end(connection) in forming.peers:
            try:
                connection.getpeername()
            except OSError:  # not connected
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _knock(forming: Forming, doors: ExitStack) -> None:
    """Connect in place of the missing members: then the group is formed, only to be dropped."""
    assert forming.own is not None
    for number in forming.numbers:
        with suppress(OSError):
            door = doors.enter_context(socket.create_connection(forming.own, _KNOCK_WITHIN_S))
            door.sendall(struct.pack("=q", number))


def _is_alive(thread: threading.Thread) -> bool:
    thread.join(_TURN_S)
    return thread.is_alive()


def _finish(built: Future[T], build: Callable[[], T]) -> None:
    try:
        built.set_result(build())
    except Exception as error:
        built.set_exception(error.with_traceback(None))  # its frames hold the group's sockets


def _sockets(inodes: set[int] | None = None) -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's TCP sockets, or those with these inodes, as pairs of descriptor and duplicate.

    Another thread may close a descriptor at any time, and the next socket may get its number. So only the duplicate is
    reliable.
    """
    for descriptor, name in _descriptors():
        if not name.startswith("socket:") or (inodes is not None and int(name[8:-1]) not in inodes):
            continue
        with suppress(OSError), _duplicate(descriptor) as connection:
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
                and (inodes is None or os.fstat(connection.fileno()).st_ino in inodes)
            ):
                yield descriptor, connection


def _epolls() -> Iterator[select.epoll]:
    for descriptor, name in _descriptors():
        if name == "anon_inode:[eventpoll]":
            with suppress(OSError), select.epoll.fromfd(os.dup(descriptor)) as epoll:
                yield epoll


def _replace(epoll: select.epoll, descriptor: int, deaf: socket.socket) -> bool:
    try:
        epoll.unregister(descriptor)
    except OSError:  # it does not watch it
        return False
    os.dup2(deaf.fileno(), descriptor, inheritable=False)
    epoll.register(descriptor, 0)
    return True


def _duplicate(descriptor: int) -> socket.socket:
    """Return a duplicate of a socket without changing the socket.

    Raises:
        OSError: it is gone, and another file may have taken its number.
    """
    duplicate = os.dup(descriptor)
    try:
        blocking = os.get_blocking(duplicate)
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    if socket.getdefaulttimeout() is not None:  # Python has just made both non-blocking
        os.set_blocking(duplicate, blocking)
    return connection


def _descriptors() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            yield int(entry), os.readlink(f"/proc/self/fd/{entry}")


_watched: weakref.WeakSet[Connections] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """End all threads that form groups before the interpreter ends."""
    for connections in tuple(_watched):
        connections.end_if_forming()
