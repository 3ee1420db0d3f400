"""A node whose processes, local server and clock a test plays: an hour takes no time."""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, Signals
from types import SimpleNamespace

from lsgd.errors import ConfigError
from lsgd.node.allegiance import Allegiance, Event, State
from lsgd.node.following import SERVE_AGAIN_S
from lsgd.node.node import Node, Stage
from lsgd.node.panel import Panel
from lsgd.node.process import Command, Role
from lsgd.server.daemon import TICK_S, Ending

ROLES = {"server": Role.SERVER, "logger": Role.OBSERVER, "relay": Role.RELAY}

Life = Generator[None, None, int]
"""Each ``yield`` takes a turn of the node; the value at the end is the exit code."""

Script = Callable[["Process"], Life]


class Process:
    """A process: its script lives until it returns, or a signal kills it.

    Attributes:
        lives: how many processes of this name there have been, with this one.
        handled: signals that it has got; None: any signal kills it.
    """

    def __init__(self, world: "World", name: str, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.lives = world.lives[name] = world.lives.get(name, 0) + 1
        self.handled: list[Signals] | None = None
        self.tail: list[str] = []
        self.mistake = ""
        self._life = world.scripts[name](self)
        self._code: int | None = None

    def say(self, text: str) -> None:
        """Print a line."""
        self.tail.append(text)
        self.world.lines.append(f"[{self.name}] {text}")

    def dies(self) -> None:
        """Be killed from outside."""
        self._code = -SIGKILL

    def send(self, number: Signals) -> None:
        """Handle a signal, or be killed by it."""
        if self.handled is None or number == SIGKILL:
            self._code = -number
        else:
            self.handled.append(number)

    def status(self, now: float) -> int | None:
        """Live for a turn, and return how it ended."""
        if self._code is None:
            try:
                next(self._life)
            except StopIteration as end:
                self._code = end.value
        return self._code


class World:
    """A node, what its local server knows, and the time.

    Args:
        scripts: what each process does, by name: ``server``, ``logger...``, ``relay``, else a worker.
        serve: names of those with which the node takes over the run.
        panel: what it shows on its terminal.

    Attributes:
        lines: what was printed.
        lives: number of processes started, by name.
        stopping: whether the run is to stop; over: whether it is over; given_up: whether workers are given up.
        silent: whether nobody serves the run, so that this node has to.
        disk_is_full: whether it cannot serve.
        finished: whether the local server has left the run.
        rounds_at: when each worker last completed a round.
        next_is_due: whether the next stage is to begin; staff: how many workers it has.
        joined: names of the workers that have joined; ended: those that have heard of the run's end.
    """

    failure = outcome = ""
    sources = ()
    heard_at = None
    silent = disk_is_full = next_is_due = wanted = False
    stage = 1

    def _serve(self, commands: list[Command]) -> list[Command]:
        if self.disk_is_full:
            raise ConfigError("the journal cannot be written: the disk is full")
        return commands

    def __init__(
        self,
        scripts: Mapping[str, Script],
        *,
        restarts: int = 0,
        shared: bool = False,
        serve: Sequence[str] = (),
        panel: Panel | None = None,
    ) -> None:
        self.now = 1000.0
        self.scripts, self.lines = scripts, list[str]()
        self.lives: dict[str, int] = {}
        self.stopping = self.over = self.given_up = False
        self.finished = "server" not in scripts or "server" in serve
        self.rounds_at: dict[str, float] = {}
        self.joined = self.ended = set(scripts)
        self.processes = SimpleNamespace(watch=lambda name, pid: None)
        self.ending = Ending()
        serves = "server" in scripts and "server" not in serve
        self.allegiance = Allegiance(State.SERVING if serves else State.FOLLOWING, self.now)
        commands = [_command(name, restarts) for name in scripts if name not in serve]
        self.node = Node(
            "node0",
            commands,
            self,  # type: ignore[arg-type]
            lambda command, number, again: Process(self, command.name, 100 + number),
            lambda text: self.lines.append(f"[launch] {text}"),
            panel=panel,
            shared=shared,
            serve=lambda: self._serve([_command(name, restarts) for name in serve]),
            following=self._following,
            clock=lambda: self.now,
        )
        self.node.begin()

    def _following(self, workers: int) -> Stage:
        """Begin the next stage of the run, as its local server."""
        if self.disk_is_full:
            raise ConfigError("the results cannot be moved: the disk is full")
        self.stage, self.next_is_due, self.over, self.finished = self.stage + 1, False, False, False
        self.staff = workers
        commands = [_command(name, 0) for name in self.scripts if name.rstrip("01") in ROLES]
        return Stage(self, commands, None, tuple)  # type: ignore[arg-type]

    @property
    def workers(self) -> "World":
        """What its local server knows of the workers; likewise of whom it follows, how, and of the run's stage."""
        return self

    following = uplink = of_run = workers

    @property
    def out(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    def passes(self, seconds: float) -> bool:
        """Let time pass; return whether the node still has something to wait for."""
        end = self.now + seconds
        while self.now < end:
            if not self.node.turn(self.ending):
                return False
            self.now += TICK_S
        return True

    def finish(self, within_s: float = 3600.0) -> int:
        """Return the exit status, when all has ended."""
        assert not self.passes(within_s), f"it still runs after {within_s:g} s:\n{self.out}"
        return self.node.conclude()[0]

    # -- the local server --------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Notice that this node has to serve, or that time is over."""
        waits = self.allegiance.state is State.UNABLE and self.now - self.allegiance.since < SERVE_AGAIN_S
        self.allegiance = self.allegiance.at(self.now, float(self.silent), 1.0)
        if self.silent and not waits:
            self.upon(Event.DUE)

    def upon(self, event: Event) -> None:
        """Let something happen to whom this node follows."""
        self.allegiance = self.allegiance.upon(event, self.now)

    def stop_run(self, reason: str) -> None:
        """Note that the run is to stop."""
        self.stopping = True

    def end(self, reason: str) -> None:
        """Leave the run."""
        self.finished = True
        self.upon(Event.END)

    def give_up(self) -> None:
        """Note that no server will answer."""
        self.given_up = True


def _command(name: str, restarts: int) -> Command:
    role = ROLES.get(name.rstrip("01"), Role.WORKER)
    return Command(name, (name,), {}, Path(f"{name}.log"), role, restarts=restarts)


# -- scripts ---------------------------------------------------------------------------------------------------


def forever(process: Process) -> Life:
    """Run until a signal ends it."""
    while True:
        yield


def stubborn(process: Process) -> Life:
    """Run until SIGKILL."""
    process.handled = []
    while True:
        yield


def server(process: Process) -> Life:
    """Serve until the run is to stop; then the run is over."""
    process.handled = []
    while not (process.world.stopping or process.handled):
        yield
    process.say("stopped")
    process.world.over = True
    return 0


def worker(process: Process) -> Life:
    """Train until the run is over, and save."""
    while not process.world.over:
        yield
    process.say("saved")
    return 0


def leaver(process: Process) -> Life:
    """Train until no server will answer, and save."""
    while not process.world.given_up:
        yield
    process.say("saved")
    return 75


def after(seconds: float, code: int = 0, text: str = "") -> Script:
    """Return a script that ends after some time, with a code and a line."""

    def script(process: Process) -> Life:
        end = process.world.now + seconds
        while process.world.now < end:
            yield
        process.say(text)
        return code

    return script


def killed(after_s: float = 0.0, *, times: int = 1, then: Script = worker, code: int | None = None) -> Script:
    """Return a script that a signal kills the first so many times (or that ends with a code), and then another."""

    def script(process: Process) -> Life:
        process.say(f"life {process.lives}")
        if process.lives > times:
            return (yield from then(process))
        yield from after(after_s)(process)
        if code is None:
            process.dies()
            yield
        return code or 0

    return script


def all_of(lines: Sequence[str], text: str) -> int:
    """Return how many lines contain a text."""
    return sum(text in line for line in lines)
