"""The processes of a node: one list of all that run, have ended, or are to start again."""

import signal
from collections.abc import Callable, Iterator, Sequence

from lsgd.node.process import Child, Command, Role, Running
from lsgd.node.restarts import Restarts


class Children:
    """The processes of one node.

    Args:
        start: starts the process of a command; gets its position, and whether it is a restart.

    Attributes:
        here: those that are part of the node, in the order of their start.
        dropped: those that were killed, and are no part of it any more.
        due: when to start one again, by name; it is still ``here``, dead.
        restarts: how often each has died.
    """

    def __init__(self, start: Callable[[Command, int, bool], Running]) -> None:
        self._start = start
        self.here: list[Child] = []
        self.dropped: list[Child] = []
        self.due: dict[str, float] = {}
        self.restarts = Restarts()

    @property
    def pids(self) -> list[int]:
        """The numbers of their processes."""
        return [child.process.pid for child in (*self.here, *self.dropped)]

    def start(self, command: Command, number: int, now: float) -> Child:
        """Start a process.

        Raises:
            OSError: it cannot be started.
        """
        child = Child(command, number, self._start(command, number, command.name in self.restarts), now)
        self.here.append(child)
        return child

    def drop(self, children: Sequence[Child]) -> None:
        """Kill processes that are no part of this node any more."""
        for child in children:
            child.send(signal.SIGKILL)
            self.due.pop(child.name, None)
            self.here.remove(child)
        self.dropped += children

    def named(self, name: str) -> Child:
        """Return the process of this name."""
        return next(child for child in self.here if child.name == name)

    def alive(self, *roles: Role) -> list[Child]:
        """Return the processes of these roles, or all, that run."""
        return [child for child in self.here if child.status is None and child.role in (roles or Role)]

    def due_of(self, *roles: Role) -> list[str]:
        """Return the names of those of these roles that are to start again."""
        return [name for name in self.due if self.named(name).role in roles]

    def take_due(self, now: float) -> Iterator[Child]:
        """Yield the dead ones whose time to start again has come, and take it that this is done."""
        for name in [name for name, due_s in self.due.items() if due_s <= now]:
            if self.due.pop(name, None) is not None:  # else the one before it has ended the node
                yield self.named(name)
