"""Supervision: several processes started, watched and ended as one."""

import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lsgd.client.guard import Guard
from lsgd.client.process import Child, Command
from lsgd.client.screen import Screen

STOP_PATIENCE_S = 120.0
"""How long a run that was told to stop may take for its last round, and its workers to save what they save."""

TERM_PATIENCE_S = 5.0
"""How long a process may take to end after SIGTERM."""

KILL_PATIENCE_S = 10.0
"""How long the system may take to end a process after SIGKILL."""

LINGER_S = 5.0
"""How long servers that nobody else needs may go on when the workers have ended."""


@dataclass(frozen=True)
class _Step:
    """A step toward the end: a signal to these processes, or none, and time for them to end."""

    number: signal.Signals | None
    targets: Sequence[Child]
    patience_s: float


class Supervisor:
    """Runs processes until all have ended, or ends them.

    The first SIGINT, SIGTERM or SIGHUP is passed on as SIGTERM to ``stops_run``, which is to make the others end by
    themselves; those that do not are ended after a time. A second one kills all of them at once. If a process fails,
    the others are ended; but one that a signal killed, or that the run went on without, is started again first, after
    a second, then two, four, ..., as often as its command says.

    Args:
        commands: what to start, in this order.
        stops_run: name of the server to tell first.
        linger: servers may go on when the workers have ended, because other nodes need them.
        folder: a temporary folder of the processes, which is deleted at the end.
    """

    def __init__(self, commands: Sequence[Command], *, stops_run: str, linger: bool, folder: Path) -> None:
        self._commands = commands
        self._stops_run = stops_run
        self._linger = linger
        self._folder = folder
        self._screen = Screen()
        self._children: list[Child] = []
        self._failed: Child | None = None
        self._signalled: signal.Signals | None = None
        self._is_forced = False  # the end does not wait for the workers, or they have ended
        self._step: _Step | None = None
        self._steps: deque[_Step] = deque()
        self._deadline_s = 0.0
        self._deaths: dict[str, int] = {}
        self._due: dict[float, Child] = {}  # by time: what to start again

    def run(self) -> int:
        """Run it all; return the exit status.

        It is 0 if no process failed and all of them ended by themselves; else that of the first one that failed
        (128 + the number of the signal, if one killed it), or 128 + the number of the signal that we got.
        """
        guard = Guard(self._folder)
        try:
            with _signals() as signals, selectors.DefaultSelector() as selector:
                selector.register(signals, selectors.EVENT_READ)
                for number, command in enumerate(self._commands):
                    self._start(command, number, selector, guard)
                while (self._alive or self._due) and self._advance():
                    self._wait(selector, signals)
                    self._reap(selector)
                    self._start_again(selector, guard)
        finally:
            _send(signal.SIGKILL, self._alive)
            guard.close()
            self._screen.close()
        return self._status()

    @property
    def _alive(self) -> list[Child]:
        return [child for child in self._children if child.status is None]

    def _start(self, command: Command, number: int, selector: selectors.BaseSelector, guard: Guard) -> None:
        again = command.appends or command.name in self._deaths
        self._children.append(child := Child(command, number, self._screen, guard, again=again))
        selector.register(child.output, selectors.EVENT_READ, child)

    def _start_again(self, selector: selectors.BaseSelector, guard: Guard) -> None:
        """Start those again whose time has come."""
        for due_s in [due_s for due_s in self._due if due_s <= time.monotonic()]:
            dead = self._due.pop(due_s)
            self._children.remove(dead)
            self._start(dead.command, dead.number, selector, guard)

    def _bury(self, child: Child) -> bool:
        """Plan to start a process again that a signal has killed, or the run left out; return whether that may be."""
        deaths = self._deaths[child.name] = self._deaths.get(child.name, 0) + 1
        if not child.may_return or deaths > child.command.restarts or self._step:
            return False
        wait_s = 2.0 ** (deaths - 1)
        self._due[time.monotonic() + wait_s] = child
        left = child.command.restarts - deaths
        self._say(f"{child.name} {child.fate}; it is started again in {wait_s:g} s ({left} more times)")
        return True

    def _wait(self, selector: selectors.BaseSelector, signals: socket.socket) -> None:
        """Wait for output, a signal, the end of a process, or the time of the step; take output and signals."""
        times_s = [*self._due, *([self._deadline_s] if self._step else [])]
        timeout_s = max(0.0, min(times_s) - time.monotonic()) if times_s else None
        for key, _ in selector.select(timeout_s):
            if key.data is None:
                for number in signals.recv(64):
                    if number != signal.SIGCHLD:
                        self._stop(signal.Signals(number))
            elif not key.data.read():
                selector.unregister(key.fileobj)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        for child in self._alive:
            if not child.has_ended():
                continue
            if child.output in selector.get_map():
                selector.unregister(child.output)
            child.close()
            if child.status and not child.was_told and not self._bury(child):
                self._fail(child)

    def _fail(self, child: Child) -> None:
        self._say(f"{child.name} {child.fate}")
        if self._failed is None:
            self._failed = child
            self._force()

    def _stop(self, number: signal.Signals) -> None:
        if self._signalled:
            self._is_forced = True
            self._end([_Step(signal.SIGKILL, self._alive, KILL_PATIENCE_S)])
            return
        self._signalled = number
        self._say(
            f"{number.name}: the run is stopped, for which it has {STOP_PATIENCE_S:g} s; once more kills it at once"
        )
        server = [child for child in self._children if child.name == self._stops_run]
        self._end([_Step(signal.SIGTERM, server, STOP_PATIENCE_S), *self._forced()])

    def _force(self, *before: _Step) -> None:
        """End all processes, after these steps."""
        self._is_forced = True
        self._end([*before, *self._forced()])

    def _forced(self) -> list[_Step]:
        """Return the steps that end all processes, workers first."""
        workers = [child for child in self._alive if not child.command.is_server]
        servers = [child for child in self._alive if child.command.is_server]
        terminate = [
            _Step(signal.SIGTERM, targets, TERM_PATIENCE_S) for targets in (workers, servers) if targets
        ]
        return [*terminate, _Step(signal.SIGKILL, workers + servers, KILL_PATIENCE_S)]

    def _end(self, steps: Sequence[_Step]) -> None:
        self._steps = deque(steps)
        self._due.clear()
        self._take_step()

    def _take_step(self) -> None:
        if self._step and not self._step.number:
            self._say("the workers have ended without the end of the run")
        self._step = self._steps.popleft()
        self._deadline_s = time.monotonic() + self._step.patience_s
        targets = [child for child in self._step.targets if child.status is None]
        if self._step.number and targets:
            self._say(f"{self._step.number.name} to {', '.join(child.name for child in targets)}")
            _send(self._step.number, targets)

    def _advance(self) -> bool:
        """Go on to the next step if it is time to; return whether there is anything left to wait for."""
        alive = self._alive
        only_servers = not self._due and all(child.command.is_server for child in alive)
        if not self._is_forced and not self._linger and only_servers:
            self._force(_Step(None, alive, LINGER_S))
        if self._step is None:
            return True
        targets = self._step.targets
        in_vain = all(child.status is not None for child in targets) and any(
            child.status for child in targets
        )
        if not in_vain and time.monotonic() < self._deadline_s:
            return True
        if not self._steps:
            self._say(
                f"these do not end: {', '.join(f'{child.name} (process {child.pid})' for child in alive)}"
            )
            return False
        self._take_step()
        return True

    def _say(self, text: str) -> None:
        self._screen.line("[launch] ", text, colour=1)

    def _status(self) -> int:
        if self._failed:
            self._failed.report()
            status = self._failed.status
            assert status is not None
            return status if status > 0 else 128 - status
        if self._signalled and any(child.status != 0 for child in self._children):
            return 128 + self._signalled
        return int(bool(self._alive))


def _send(number: signal.Signals, children: Sequence[Child]) -> None:
    for child in children:
        child.send(number)


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Collect signals, those of children that end too, as bytes on a socket; one ignored from the start stays so."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    numbers = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        reading.close()
        writing.close()
