"""Starts, watches and ends several processes as one."""

import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lsgd.client.control.notices import Notice, give, is_given
from lsgd.errors import EvictedError, ServerLostError
from lsgd.node.guard import Guard
from lsgd.node.panel import Panel
from lsgd.node.process import NOT_TRAINED, Child, Command
from lsgd.node.screen import FLUSH_WITHIN_S, FLUSHES, Screen
from lsgd.node.signals import received
from lsgd.output import Output

STOP_PATIENCE_S = 120.0
"""How long a stopping run may take for its last round and for saving."""

SAVE_PATIENCE_S = 30.0
"""How long workers may take to save when no server will answer them."""

TERM_PATIENCE_S = 5.0
"""How long a process may take to end after SIGTERM."""

KILL_PATIENCE_S = 10.0
"""How long the system may take to kill a process after SIGKILL."""

OBSERVE_PATIENCE_S = 15.0
"""How long observing processes may keep writing after the run's end."""

LINGER_S = 5.0
"""How long servers may run after the workers end, if nobody else needs them."""

RESTART_WINDOW_S = 600.0
"""Deaths longer ago than this do not count toward a process's restarts."""

EVICTED_WAIT_S = 1.0
"""Wait before an evicted worker is restarted; evictions do not count toward its restarts."""

SERVER_BACKOFF_S = 4.0
"""Longest wait before a server is restarted: the workers' leases keep running."""


@dataclass(frozen=True)
class _Step:
    """A step toward the end.

    Args:
        names: of the processes to end.
        patience_s: how long they have to end.
        number: signal to send them.
        notice: what to tell the workers when no server can.
        is_clean: the run ends as it should: the workers complete their last round and save.
        overdue: what to print if they do not end in time.
    """

    names: Sequence[str]
    patience_s: float
    number: signal.Signals | None = None
    notice: Notice | None = None
    is_clean: bool = False
    overdue: str = ""


class Supervisor:
    """Runs processes until all have ended, or ends them.

    The first SIGINT, SIGTERM or SIGHUP (as SIGTERM) goes to ``stops_run``, which makes the others end by themselves. A
    second one kills all of them at once. If a process fails, the run is stopped the same way. But a process that was
    killed by a signal or evicted is restarted first: after one second, then two, four, ..., as often as its command
    allows within :data:`RESTART_WINDOW_S`. Workers that do not end, or that no server can tell, are told to save
    and leave; then they are ended.

    Args:
        commands: what to start, in this order.
        stops_run: name of the server to tell first.
        linger: servers may outlive the workers, because other nodes need them.
        folder: temporary folder of the processes, deleted at the end.
        local: address of the local server, where the workers look for notices.
        follow: command that prints the run's progress for a terminal; empty: none.
        plain: print lines only, even on a terminal.

    Attributes:
        end: how the run ended for this node, ``failed`` or ``stopped``, and why; empty: what its servers say.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        stops_run: str,
        linger: bool,
        folder: Path,
        local: str = "",
        follow: Sequence[str] = (),
        plain: bool = False,
    ) -> None:
        self._commands = commands
        self._servers = [command.name for command in commands if command.is_server]
        self._aside = [command.name for command in commands if command.aside]
        self._workers = [c.name for c in commands if not c.is_server and not c.aside]
        self._stops_run = stops_run
        self._linger = linger
        self._folder = folder
        self._local = local
        self._screen = Screen(plain=plain)
        self._panel = Panel(self._screen, follow)
        self.end = ["", ""]
        self._children: list[Child] = []
        self._failed: Child | None = None
        self._early: set[str] = set()  # workers that left before the end of the run
        self._signalled: signal.Signals | None = None
        self._step: _Step | None = None
        self._steps: deque[_Step] = deque()
        self._deadline_s = 0.0
        self._deaths: dict[str, list[float]] = {}  # times, by name
        self._due: dict[str, float] = {}  # when to restart it, by name

    def run(self) -> int:
        """Run all processes; return the exit status.

        It is 0 if all processes ended by themselves without an error; else the status of the first that failed
        (128 + the signal's number, if a signal killed it), or 128 + the number of the signal that we got. It is
        :data:`NOT_TRAINED` if a worker never joined, or if all workers left before the end of the run.
        """
        self._guard = Guard(self._folder)
        try:
            with received() as signals, selectors.DefaultSelector() as self._selector:
                self._selector.register(signals, selectors.EVENT_READ)
                for number, command in enumerate(self._commands):
                    self._start(command, number)
                self._panel.start(self._guard, self._selector)
                while (self._alive or self._due) and self._advance():
                    self._wait(signals)
                    self._reap()
                    if said := self._guard.renew():
                        self._screen.say(said)
                    self._start_again()
        finally:
            _send(signal.SIGKILL, self._alive)
            self._panel.close()
            self._guard.close()
            self._screen.close()
        if self._failed:
            output = Output(lambda lines: "")
            output.put(sys.stderr.fileno(), self._failed.report())
            output.flush(FLUSH_WITHIN_S, FLUSHES)
        status, *self.end = self._outcome()
        return status

    @property
    def _alive(self) -> list[Child]:
        return [child for child in self._children if child.status is None]

    def _named(self, *names: str) -> list[Child]:
        return [child for child in self._children if child.name in names]

    # -- starting ----------------------------------------------------------------------------------------------

    def _start(self, command: Command, number: int) -> None:
        child = Child(command, number, self._screen, self._guard, again=command.name in self._deaths)
        self._children.append(child)
        self._selector.register(child.output, selectors.EVENT_READ, child)

    def _start_again(self) -> None:
        """Restart the processes that are due."""
        now = time.monotonic()
        for name in [name for name, due_s in self._due.items() if due_s <= now]:
            del self._due[name]
            (dead,) = self._named(name)
            try:
                self._start(dead.command, dead.number)
            except OSError as error:
                self._screen.say(f"{name} cannot be restarted: {error.strerror}")
                if not self._bury(dead):
                    self._fail(dead)
                continue
            self._children.remove(dead)
            if name == self._stops_run and self._step and self._step.is_clean:
                self._tell([self._children[-1]], self._gentle)  # its predecessor, which was told, is gone

    def _bury(self, child: Child) -> bool:
        """Schedule the restart of a process that was killed or evicted; return False if it may not restart."""
        if not child.may_return or not self._is_wanted(child):
            return False
        now = time.monotonic()
        if child.status == EvictedError.exit_code:  # the network's fault, and each eviction takes a whole lease
            self._deaths.setdefault(child.name, [])
            self._due[child.name] = now + EVICTED_WAIT_S
            self._screen.say(f"{child.name} {child.fate}; restarting it in {EVICTED_WAIT_S:g} s")
            return True
        deaths = [at_s for at_s in self._deaths.get(child.name, []) if now - at_s < RESTART_WINDOW_S] + [now]
        self._deaths[child.name] = deaths
        left = child.command.restarts - len(deaths)
        if left < 0:
            return False
        wait_s = min(2.0 ** (len(deaths) - 1), SERVER_BACKOFF_S if child.command.serves else RESTART_WINDOW_S)
        self._due[child.name] = now + wait_s
        self._screen.say(
            f"{child.name} {child.fate}; restarting it in {wait_s:g} s "
            f"({left} more restarts within {RESTART_WINDOW_S / 60:g} minutes)"
        )
        return True

    def _is_wanted(self, child: Child) -> bool:
        """Whether a restarted process would have anything to do."""
        if self._step is not None:
            return self._step.is_clean and child.command.serves
        evicted = child.status == EvictedError.exit_code  # on joining it learns that the run is over
        return evicted or child.command.is_server or not self._is_over

    @property
    def _is_over(self) -> bool:
        """Whether the run has ended: a server has ended without an error."""
        return any(child.command.is_server and child.status == 0 for child in self._children)

    # -- watching ----------------------------------------------------------------------------------------------

    def _wait(self, signals: socket.socket) -> None:
        """Wait for output, a signal, the end of a process, or the step's deadline; handle output and signals."""
        times_s = [*self._due.values(), *([self._deadline_s] if self._step else [])]
        timeout_s = max(0.0, min(times_s) - time.monotonic()) if times_s else None
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                for number in signals.recv(64):
                    if number != signal.SIGCHLD:
                        self._stop(signal.Signals(number))
            elif not key.data.read():
                self._selector.unregister(key.fileobj)

    def _reap(self) -> None:
        for child in self._alive:
            if not child.has_ended():
                continue
            if child.output in self._selector.get_map():
                self._selector.unregister(child.output)
            child.close()
            if child.command.aside:
                if child.status and not child.was_told and not (child.command.helps and self._bury(child)):
                    log = child.command.log
                    self._screen.say(f"{child.name} {child.fate}; the run continues without it (see {log})")
                continue
            if child.status == 0 and child.command.is_server:
                give(self._local, Notice.OVER)
            if child.status == 0 and child.command.joins and not child.was_told:
                self._judge(child)
            is_news = not child.was_told or (child.was_struck and self._is_wanted(child))
            if child.status and is_news and not self._bury(child):
                self._fail(child)

    def _judge(self, child: Child) -> None:
        """Check whether a worker whose script ended without an error has trained to the end of the run."""
        self._early.discard(child.name)
        if self._is_over or is_given(self._local, Notice.ENDED, child.name):
            return
        if not is_given(self._local, Notice.JOINED, child.name):
            child.status = NOT_TRAINED
            return
        self._early.add(child.name)
        self._screen.say(
            f"{child.name} left before the end of the run and has no consensus model: the plan (iterations, seconds) "
            f"ends the run, so train until worker.stopped, or call worker.leave() after the loop to form the consensus "
            f"of all workers that leave"
        )

    def _fail(self, child: Child) -> None:
        self._screen.say(f"{child.name} {child.fate}")
        self._failed = self._failed or child
        if child.command.is_server or child.status == ServerLostError.exit_code:
            give(self._local, Notice.GIVEN_UP)  # the others would wait for an answer that will not come
        if self._step is None:
            self._end_cleanly()

    def _stop(self, number: signal.Signals) -> None:
        if self._signalled:
            self._end([_Step([command.name for command in self._commands], KILL_PATIENCE_S, signal.SIGKILL)])
            return
        self._signalled = number
        if self._step:
            self._screen.say(f"{number.name}: the run is already ending; a second signal kills it at once")
            return
        self._screen.say(
            f"{number.name}: stopping the run, within {STOP_PATIENCE_S:g} s; a second signal kills it at once"
        )
        self._end_cleanly()

    # -- ending ------------------------------------------------------------------------------------------------

    @property
    def _gentle(self) -> signal.Signals:
        """The signal that asks a server to end the run: what the user sent, so the server's log shows it."""
        return signal.SIGINT if self._signalled == signal.SIGINT else signal.SIGTERM

    def _end_cleanly(self) -> None:
        """Let the workers complete their last round and save; then end all processes."""
        if any(child.status == 0 for child in self._named(self._stops_run)):
            clean = _Step(self._workers, STOP_PATIENCE_S, is_clean=True)  # it is over: workers still running are saving
        else:
            clean = _Step([self._stops_run], STOP_PATIENCE_S, self._gentle, is_clean=True)
        for name in [name for name in self._due if name in self._servers]:
            self._screen.say(f"restarting {name} now, to tell it that the run ends")
        self._due = {name: 0.0 for name in self._due if name not in self._workers}
        self._end([clean, *self._ends()])

    def _ends(self) -> list[_Step]:
        """Return the steps that end all processes, workers first."""
        return [
            _Step(self._workers, SAVE_PATIENCE_S, notice=Notice.GIVEN_UP),
            _Step(self._workers, TERM_PATIENCE_S, signal.SIGTERM),
            _Step(self._servers, TERM_PATIENCE_S, signal.SIGTERM),
            _Step(self._workers + self._servers, KILL_PATIENCE_S, signal.SIGKILL),
            _Step([c.name for c in self._commands if c.helps], TERM_PATIENCE_S, signal.SIGTERM),
            _Step([c.name for c in self._commands if c.observes], OBSERVE_PATIENCE_S),
            _Step(self._aside, TERM_PATIENCE_S, signal.SIGTERM),
            _Step(self._aside, KILL_PATIENCE_S, signal.SIGKILL),
        ]

    def _end(self, steps: Sequence[_Step]) -> None:
        self._steps = deque(steps)
        self._take_step()

    def _take_step(self) -> bool:
        """Take the next step that applies to a process; return False if there is none."""
        while self._steps:
            self._step = self._steps.popleft()
            if not self._step.is_clean:
                self._due.clear()
            targets = [child for child in self._named(*self._step.names) if child.status is None]
            if not targets and not any(name in self._due for name in self._step.names):
                continue
            self._deadline_s = time.monotonic() + self._step.patience_s
            if self._step.notice:
                self._give(self._step.notice, targets)
            if self._step.number and targets:
                self._tell(targets, self._step.number)
            return True
        return False

    def _give(self, notice: Notice, targets: Sequence[Child]) -> None:
        self._screen.say(
            f"{', '.join(child.name for child in targets)}: told to save a checkpoint and leave within "
            f"{SAVE_PATIENCE_S:g} s"
        )
        give(self._local, notice)
        for child in targets:
            child.was_told = True

    def _tell(self, targets: Sequence[Child], number: signal.Signals) -> None:
        self._screen.say(f"{number.name} to {', '.join(child.name for child in targets)}")
        _send(number, targets)

    def _advance(self) -> bool:
        """Take the next step if this one is done; return whether there is anything left to wait for."""
        there = {*self._due, *(child.name for child in self._alive)}.difference(self._aside)
        needed = there.difference(self._servers) or (self._linger and there)
        if not needed and (self._step is None or self._step.is_clean):
            overdue = "the workers have ended before the end of the run"
            self._end([_Step(self._servers, LINGER_S, overdue=overdue), *self._ends()])
        if self._step is None or not self._is_done(self._step):
            return True
        if self._step.overdue:
            self._screen.say(self._step.overdue)
        if self._take_step():
            return True
        left = ", ".join(f"{child.name} (process {child.pid})" for child in self._alive)
        self._screen.say(f"still running after SIGKILL: {left}")
        return False

    def _is_done(self, step: _Step) -> bool:
        """Whether its time is up, or it has nothing left to wait for."""
        if time.monotonic() >= self._deadline_s:
            return True
        targets = self._named(*step.names)
        if any(child.status is None or child.name in self._due for child in targets):
            return False
        return not step.is_clean or any(child.status for child in targets)

    def _outcome(self) -> tuple[int, str, str]:
        """Return the exit status, and how the run ended (:attr:`end`)."""
        if self._failed:
            status = self._failed.status
            assert status is not None
            return status if status > 0 else 128 - status, "failed", f"{self._failed.name} {self._failed.fate}"
        if self._signalled and any(child.status != 0 for child in self._children if not child.command.aside):
            return 128 + self._signalled, "stopped", f"{self._signalled.name}; not all processes ended in time"
        if self._early and self._early == {command.name for command in self._commands if command.joins}:
            return NOT_TRAINED, "failed", "all workers left before the end of the run, so there is no consensus"
        return (1, "failed", "some processes did not end") if self._alive else (0, "", "")


def _send(number: signal.Signals, children: Sequence[Child]) -> None:
    for child in children:
        child.send(number)
