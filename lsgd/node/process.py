"""A process that a node starts in its own session, and that ends with the node's."""

import enum
import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from lsgd.errors import EvictedError, JoinError, NotTrainedError, RunOverError, ServerLostError
from lsgd.node.screen import Screen
from lsgd.node.transcript import Reading, Transcript
from lsgd.output import MARKS_DETAILS
from lsgd.run_folder import runs
from lsgd.server.daemon import CRASHED

LSGD = (sys.executable, "-P", "-m", "lsgd.client")
"""The command ``lsgd`` of this environment."""

DRAIN_S = 1.0
"""How long the end of a process waits for its last lines to be shown, before anything is said about it."""

_TERMINAL_ROWS = 24


class Role(enum.Enum):
    """What a process is there for. At the end of a run, the processes end in this order."""

    WORKER = "worker"
    SERVER = "server"
    """The workers are useless without it."""
    RELAY = "relay"
    """Restarted as a server is, but the run continues without it."""
    OBSERVER = "observer"
    """It may write what is left when the run is over; its end is no failure."""
    PAGE = "page"
    """The same, but it shows the run as long as there is one."""

    @property
    def auxiliary(self) -> bool:
        """Whether the run continues and ends regardless of it."""
        return self not in (Role.WORKER, Role.SERVER)

    @property
    def serves(self) -> bool:
        """Whether the workers need it as long as they run."""
        return self in (Role.SERVER, Role.RELAY)


@dataclass(frozen=True)
class Command:
    """A process to start.

    Args:
        name: prefix of its output.
        log: file for its output.
        on_terminal: whether its output is a terminal if ours is, so that it can draw a progress bar.
        restarts: number of restarts after a signal has killed it.
        appends: whether it appends to the log.
        checkpoints: folder of checkpoints; a restart resumes from its own there, if there is one.
        ignores_term: whether it ignores SIGTERM, which a scheduler sends to all of a job; SIGINT ends it instead.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    role: Role = Role.WORKER
    on_terminal: bool = False
    restarts: int = 0
    appends: bool = False
    checkpoints: Path | None = None
    restart_arguments: Sequence[str] = ()
    ignores_term: bool = False


class Lifeline:
    """A pipe that only this process holds the other end of: when that closes, the kernel kills a process group.

    A parent-death signal (``PR_SET_PDEATHSIG``) would reach only the child, not what the child started.
    """

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()

    def hold(self) -> None:
        """Let the group of the calling process depend on it. Called by the child before it runs its command."""
        with suppress(OSError):  # a kernel without it
            fcntl.fcntl(self.reading, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(self.reading, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self.reading, fcntl.F_SETFL, fcntl.fcntl(self.reading, fcntl.F_GETFL) | os.O_ASYNC)

    def close(self) -> None:
        """Close it, which kills what is left of the group."""
        os.close(self._writing)
        os.close(self.reading)


class Running(Protocol):
    """A process that was started."""

    pid: int

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""

    def status(self, now: float) -> int | None:
        """Return its exit code, or minus the number of the signal that killed it; None while it runs."""

    @property
    def tail(self) -> Sequence[str]:
        """Its last lines."""

    @property
    def mistake(self) -> str:
        """The error that the screen has shown as its last one; empty: none."""


class Process:
    """A process of the system. It leads a process group, which gets its signals and ends with it.

    Attributes:
        pid: number of the process, and of the group that it leads.

    Args:
        number: position in the launch, which picks its color.
        again: whether this is a restart.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Command, number: int, again: bool, *, screen: Screen, reading: Reading) -> None:
        self._reading = reading
        self._ended_at = 0.0
        self._lifeline = Lifeline()
        on_terminal = command.on_terminal and screen.is_terminal
        width = len(f"[{command.name}] ")
        try:
            output, writing = _open_terminal(screen.size()[0] - width) if on_terminal else os.pipe()
        except OSError:
            self._lifeline.close()
            raise
        try:
            self._process = subprocess.Popen(
                [*command.arguments, *(command.restart_arguments if again else ())],
                env={**(_environment(command) if again else command.environment), MARKS_DETAILS: "1"},
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,  # Ctrl-C at the terminal reaches the node's process alone
                pass_fds=(self._lifeline.reading,),  # open in the group, so that the pipe's ends close in this order
                preexec_fn=partial(self._prepare, command),
            )
        except BaseException:
            os.close(output)
            self._lifeline.close()
            raise
        finally:
            os.close(writing)
        self.pid = self._process.pid
        again = again or command.appends
        self._transcript = Transcript(screen, command.name, command.log, number, on_terminal, again=again)
        reading.add(output, self._transcript)

    def _prepare(self, command: Command) -> None:
        """Prepare the new process, in it, before it runs the command."""
        self._lifeline.hold()
        if command.ignores_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @property
    def tail(self) -> Sequence[str]:
        """Its last lines."""
        return list(self._transcript.tail)

    @property
    def mistake(self) -> str:
        """The error that the screen has shown as its last one; empty: none."""
        return self._transcript.mistake

    def send(self, number: signal.Signals) -> None:
        """Send its group a signal."""
        if self._process.returncode is None:  # else the number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def status(self, now: float) -> int | None:
        """Return how it ended, once its last lines are shown; None until then. The rest of its group is killed."""
        if self._process.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            with suppress(ProcessLookupError):  # while the number is still ours
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._lifeline.close()
            self._reading.end(self._transcript)
            self._ended_at = now
        shown = self._transcript.closed.is_set() or now - self._ended_at > DRAIN_S
        return self._process.returncode if shown else None


class Child:
    """What a node knows of the process of a :class:`Command`.

    Attributes:
        status: as :meth:`Running.status`.
        started_at: when it was started, in seconds of the node's clock.
        is_ending: whether it was asked to end, so that no exit status is a failure.

    Args:
        number: position in the launch.
    """

    def __init__(self, command: Command, number: int, process: Running, started_at: float) -> None:
        self.command = command
        self.name, self.role = command.name, command.role
        self.number = number
        self.process, self.started_at = process, started_at
        self.status: int | None = None
        self.is_ending = False
        self._sent: set[signal.Signals] = set()

    @property
    def restartable(self) -> bool:
        """Whether it may do better another time: a signal killed it, the run evicted it, or a server crashed."""
        return self.status is not None and (
            self.status < 0 or self.status == EvictedError.exit_code or self._has_crashed
        )

    @property
    def fails_by_itself(self) -> bool:
        """Whether a signal killed it that we did not send, or it is a server that has crashed."""
        killed = self.status is not None and self.status < 0 and -self.status not in self._sent
        return killed or self._has_crashed

    @property
    def _has_crashed(self) -> bool:
        return self.role.serves and self.status == CRASHED

    @property
    def how_it_ended(self) -> str:
        """What became of it, to print after its name."""
        assert self.status is not None
        if self.status == EvictedError.exit_code:
            return "was evicted from the run"
        if self.status == ServerLostError.exit_code:
            return f"gave up waiting for its servers (exit code {self.status})"
        if self.role is Role.WORKER and self.status == JoinError.exit_code:
            return f"was refused by the run (exit code {self.status})"
        if self.role is Role.WORKER and self.status == RunOverError.exit_code:
            return f"joined too late, and has not trained since (exit code {self.status})"
        if self.status == NotTrainedError.exit_code:
            return (
                f"ended without training in the run (exit code {self.status}): its script has to call "
                f"lsgd.wrap(model, optimizer), or Worker.join and worker.batches (docs/start/from-ddp.md, own-run.md); "
                f"type lsgd check in place of lsgd launch to see the line"
            )
        if self.status >= 0:
            return f"failed with exit code {self.status}"
        name = signal.Signals(-self.status).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def send(self, number: signal.Signals) -> None:
        """Send a signal; SIGINT instead of SIGTERM if it ignores that."""
        if number == signal.SIGTERM and self.command.ignores_term:
            number = signal.SIGINT
        self.is_ending = True
        self._sent.add(number)
        self.process.send(number)

    def has_ended(self, now: float) -> bool:
        """Whether it has ended; if so, set ``status``."""
        self.status = self.process.status(now)
        return self.status is not None

    def report(self) -> str:
        """Return how it ended and its last lines, to print; an empty text if the screen has shown its mistake."""
        if self.process.mistake:
            return ""
        lines = [f"    {line}" for line in self.process.tail] or ["    (nothing)"]
        header = f"\nlsgd launch: {self.name} {self.how_it_ended}. Its last lines (all are in {self.command.log}):"
        return "\n".join([header, *lines, ""])


def cannot_start(program: str, error: OSError) -> str:
    """Return why a program cannot be started, and what to do."""
    remedy = "; begin it with #!/usr/bin/env python3, or type python before its name"
    return f"{program} cannot be started: {error.strerror}{remedy * (error.errno == errno.ENOEXEC)}"


def _environment(command: Command) -> Mapping[str, str]:
    names = (command.name, f"{command.name}.*")  # of one process, and of several
    if command.checkpoints is None or not any(runs(command.checkpoints, name) for name in names):
        return command.environment
    return {**command.environment, "LSGD_RESUME": str(command.checkpoints), "LSGD_RESTARTED": "1"}


def _open_terminal(columns: int) -> tuple[int, int]:
    """Return both ends of a new terminal: the one to read from, and the one to write to."""
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (_TERMINAL_ROWS, max(20, columns)))
    return reading, writing
