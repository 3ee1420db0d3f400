"""A process that the launcher starts in its own session, reads the output of, and waits for."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lsgd.errors import EvictedError, ServerLostError
from lsgd.node.guard import Guard
from lsgd.node.screen import Screen, Transcript
from lsgd.run_folder import runs

NOT_TRAINED = 78  # EX_CONFIG
"""Exit code of a script that ended without an error but never joined the run, or left it before its end."""

LSGD = (sys.executable, "-P", "-m", "lsgd.client")
"""The command ``lsgd`` of this environment."""

_TERMINAL_ROWS = 24
_READ_NBYTES = 1 << 16
_READS = 16  # at a time, so that a process that prints much does not starve the others


@dataclass(frozen=True)
class Command:
    """A process to start.

    Args:
        name: for people; the prefix of its output.
        arguments: the program and its arguments.
        environment: all of its variables.
        log: file for its output.
        is_server: it serves the workers, and is useless without them.
        on_terminal: its output is a terminal if ours is, so that it can draw a progress bar.
        restarts: how many times to restart it after a signal has killed it.
        appends: append to the log.
        holds_signals: start it with SIGINT and SIGTERM blocked; they wait until it unblocks them.
        checkpoints: folder of checkpoints; a restart resumes from its own there, if there is one.
        more_again: further arguments for a restart.
        joins: it must join the run.
        ignores_term: it ignores SIGTERM, which a scheduler sends to all processes of a job; the launcher ends it with
            SIGINT instead.
        observes: the run does not need it: its end is no failure, and it ends after all others.
        helps: its end is no failure either, but it is restarted; it ends after the servers.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    is_server: bool = False
    on_terminal: bool = False
    restarts: int = 0
    appends: bool = False
    holds_signals: bool = False
    checkpoints: Path | None = None
    more_again: Sequence[str] = ()
    joins: bool = False
    ignores_term: bool = False
    observes: bool = False
    helps: bool = False

    @property
    def serves(self) -> bool:
        """Whether the workers need it as long as they run."""
        return self.is_server or self.helps

    @property
    def aside(self) -> bool:
        """Whether the run continues and ends regardless of it."""
        return self.observes or self.helps


class Child:
    """The running process of a :class:`Command`. It leads a process group, which gets its signals and ends with it.

    Attributes:
        command: what it runs.
        output: file descriptor that :meth:`read` reads.
        status: exit code, or minus the number of the signal that killed it; None while it runs.
        number: position in the launch, which picks its color.
        was_told: it was told to end, so no exit status is a failure.

    Args:
        command: what to run.
        number: position in the launch.
        screen: shows its output.
        guard: ends it if the launcher is killed.
        again: this is a restart.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Command, number: int, screen: Screen, guard: Guard, *, again: bool = False) -> None:
        self.command = command
        self.number = number
        self.status: int | None = None
        self.was_told = False
        self._sent: set[signal.Signals] = set()
        self._guard = guard
        on_terminal = command.on_terminal and screen.is_terminal
        width = len(f"[{command.name}] ")
        self.output, writing = _open_terminal(screen.columns() - width) if on_terminal else os.pipe()
        os.set_blocking(self.output, False)
        try:
            self._process = subprocess.Popen(
                [*command.arguments, *(command.more_again if again else ())],
                env=_environment(command) if again else command.environment,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,  # Ctrl-C at the terminal reaches the launcher alone
                preexec_fn=self._prepare,
            )
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(writing)
        guard.add(self.pid)
        self._transcript = Transcript(
            screen, command.name, command.log, number, on_terminal, again=again or command.appends
        )

    def _prepare(self) -> None:
        """Prepare the new process, in it, before it runs the command."""
        self._guard.add_self()
        if self.command.holds_signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        if self.command.ignores_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @property
    def name(self) -> str:
        """Name of the command."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Number of the process, and of the group that it leads."""
        return self._process.pid

    @property
    def may_return(self) -> bool:
        """Whether it ended through no fault of its own: a signal killed it, or the run evicted it."""
        return self.status is not None and (self.status < 0 or self.status == EvictedError.exit_code)

    @property
    def was_struck(self) -> bool:
        """Whether a signal killed it that we did not send."""
        return self.status is not None and self.status < 0 and -self.status not in self._sent

    @property
    def fate(self) -> str:
        """How it ended, for people."""
        assert self.status is not None
        if self.status == EvictedError.exit_code:
            return "was evicted from the run"
        if self.status == ServerLostError.exit_code:
            return f"gave up waiting for its servers (exit code {self.status})"
        if self.status == NOT_TRAINED:
            return (
                f"ended without joining the run (exit code {self.status}): its script has to call Worker.join and to "
                f"train with worker.batches (docs/guides/client.md)"
            )
        if self.status >= 0:
            return f"failed with exit code {self.status}"
        name = signal.Signals(-self.status).name
        return f"was killed by {name}" + (" (was memory short?)" if name == "SIGKILL" else "")

    def read(self) -> bool:
        """Read the available output, or part of it; return False at its end."""
        for _ in range(_READS):
            try:
                data = os.read(self.output, _READ_NBYTES)
            except BlockingIOError:
                return True
            except OSError:  # the end of a terminal
                return False
            if not data:
                return False
            self._transcript.feed(data)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send its group a signal; SIGINT instead of SIGTERM if it ignores that."""
        if number == signal.SIGTERM and self.command.ignores_term:
            number = signal.SIGINT
        self.was_told = True
        self._sent.add(number)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def has_ended(self) -> bool:
        """Whether it has ended; if so, set ``status`` and kill the rest of its group."""
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        with suppress(ProcessLookupError):  # while the number is still ours
            os.killpg(self.pid, signal.SIGKILL)
        self.status = self._process.wait()
        self._guard.remove(self.pid)
        return True

    def close(self) -> None:
        """Read the rest of its output."""
        self.read()
        self._transcript.close()
        os.close(self.output)

    def report(self) -> str:
        """Return how it ended and its last lines, for people."""
        lines = [f"    {line}" for line in self._transcript.tail] or ["    (nothing)"]
        header = f"\nlsgd launch: {self.name} {self.fate}. Its last lines (all are in {self.command.log}):"
        return "\n".join([header, *lines, ""])


def first_words(process: subprocess.Popen[bytes], within_s: float) -> str:
    """Return the first output of a process; empty if there is none in time."""
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], within_s)
    return os.read(process.stdout.fileno(), 4096).decode(errors="replace").strip() if ready else ""


def _environment(command: Command) -> Mapping[str, str]:
    """Return the variables for a restart."""
    names = (command.name, f"{command.name}.*")  # of one process, and of several
    if command.checkpoints is None or not any(runs(command.checkpoints, name) for name in names):
        return command.environment
    return {**command.environment, "LSGD_RESUME": str(command.checkpoints), "LSGD_RESTARTED": "1"}


def _open_terminal(columns: int) -> tuple[int, int]:
    """Return both ends of a new terminal of this width: the one to read from, and the one to write to."""
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (_TERMINAL_ROWS, max(20, columns)))
    return reading, writing
