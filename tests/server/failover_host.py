"""A machine of a run in virtual time: a real :class:`Node` and :class:`LocalServer`, and the processes it starts.

Its global servers are :class:`GlobalDaemon`, its workers are :class:`SimulatedWorker`. Instead of tensors, a
model is how many iterations of whom it has learned from.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGKILL, Signals
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from lsgd.errors import ConfigError, JoinError, RunOverError, ServerLostError
from lsgd.node.allegiance import State
from lsgd.node.candidates import Candidates, Link
from lsgd.node.local_server import LocalServer
from lsgd.node.node import Node
from lsgd.node.process import Command, Role, Running
from lsgd.protocol.messages import (
    Endpoint,
    Go,
    Stop,
    Term,
    Upward,
    encode,
    kind_of,
)
from lsgd.protocol.sockets import Connector, Listener
from lsgd.server.coordinator import Coordinator
from lsgd.server.daemon import EXIT_AT_ONCE
from lsgd.server.global_daemon import GlobalDaemon
from lsgd.server.journal import restore, taken_over
from lsgd.server.standbys import Standbys
from lsgd.server.state import Decision, RunState

from .failover_network import MemoryKnock, MemoryLink, ServerListener, WorkerListener
from .helpers import check_invariants
from .served_run import MemoryJournal
from .simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from .failover_run import World

RESTARTS = 5


class BrokenError(AssertionError):
    """A promise was broken."""


class Task:
    """A process that a node has started: a relay, which runs until a signal ends it."""

    def __init__(self, host: Host, command: Command) -> None:
        self.host, self.command = host, command
        self.pid = next(host.world.numbers)
        self.tail: list[str] = []
        self.mistake = ""
        self.code: int | None = None

    def send(self, number: Signals) -> None:
        self.ends(-number)

    def ends(self, code: int) -> None:
        if self.code is None:
            self.code = code

    def status(self, now: float) -> int | None:
        return self.code


class ServerTask(Task):
    """A global server's process, which takes a while to start."""

    def __init__(self, host: Host, command: Command, again: bool) -> None:
        super().__init__(host, command)
        self.got: list[str] = []
        self.server: GlobalDaemon | None = None
        self._continues = again or "--continue" in command.arguments
        host.after(host.world.random.uniform(*host.world.start_s), self._begin)

    def _begin(self) -> None:
        if self.code is not None:
            return
        host, journal = self.host, self.host.journals[self.command.arguments[0]]
        if journal.state is not None:
            state = restore(json.loads(journal.state), host.world.now)
            state.book.elections.extend(journal.elections)
        elif self._continues:
            self.ends(1)
            return
        else:
            state = host.world.new_run()
        self.server = host.serve(state, journal)
        self._tick()

    def _tick(self) -> None:
        if self.code is None and self.server is not None:
            self.server.turn(self.host.world.now, "".join(self.got[:1]))
            if self.server.exit_code is not None:
                self.ends(self.server.exit_code)
            self.host.after(self.host.world.tick_s, self._tick)

    def send(self, number: Signals) -> None:
        if self.server is None or number is SIGKILL:
            self.ends(-number)
        else:
            self.got.append(number.name)
            if len(self.got) > 1:
                self.ends(EXIT_AT_ONCE)

    def ends(self, code: int) -> None:
        super().ends(code)
        if self.host.server is self.server:
            self.host.server = None


class WorkerTask(Task):
    """A worker's process, which first imports torch."""

    def __init__(self, host: Host, command: Command) -> None:
        super().__init__(host, command)
        self.worker: Worker | None = None
        if host.world.imports_s:
            host.after(host.world.imports_s, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        if self.code is None:
            host, index = self.host, int(self.command.name.partition("worker")[2])
            self.worker = host.by_incarnation[self.pid] = Worker(host, index, self.pid)
            host.world.workers.append(self.worker)

    def status(self, now: float) -> int | None:
        return self.worker.code if self.worker else self.code

    def send(self, number: Signals) -> None:
        if self.worker:
            self.worker.end(-number)
        else:
            self.ends(-number)


class Host:
    """A machine; also what its workers see of the world.

    Attributes:
        server: its global server, once it listens; None: none does.
        frozen: whether nothing happens on it.
        ended_at: when its launcher ended; infinite while it runs.
        cannot_serve: whether no server starts on it; failed: how often none has.
    """

    own_steps = meet_every = 0

    def __init__(self, world: World, index: int, workers: int) -> None:
        self.world, self.index, self.size = world, index, workers
        self.alive, self.frozen = True, False
        self.cannot_serve, self.failed = False, 0
        self.refuses = False  # while it is not alive: whether its system says that nobody listens
        self.closed: list[bytes] = []  # connections to its global server
        self.place = Endpoint(index, f"tcp://10.0.0.{index + 1}:1")
        self.server: GlobalDaemon | None = None
        self.journals = {"journal": MemoryJournal(), "of others": MemoryJournal()}
        self.inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self.links: dict[str, MemoryLink] = {}
        self.by_incarnation: dict[int, Worker] = {}
        self._later: list[Callable[[], None]] = []  # what happens when it thaws
        self.plan, self.random, self.faults = world.plan, world.random, world.faults
        self.steps = 0

    @property
    def terms(self) -> tuple[Term, ...]:
        """Those of the server that it follows."""
        return self.local.following.candidates.terms

    @property
    def serves(self) -> bool:
        """Whether a process of a global server, or a relay, runs on it."""
        return any(task.code is None for task in self.tasks if task.command.role.serves)

    @property
    def claims(self) -> bool:
        """Whether it takes over."""
        return self.local.allegiance.state is State.CLAIMING

    @property
    def now(self) -> float:
        return self.world.now

    # -- what workers see --------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        return self.world

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen on this host, unless it dies or its launcher ends first."""
        life = self.life

        def happens() -> None:
            if not self.alive or self.life != life or self.ended_at < math.inf:
                return
            if self.frozen:
                self._later.append(happens)
            else:
                event()

        self.world.after(delay_s, happens)

    def happens(self, probability: float) -> bool:
        return self.world.happens(probability)

    def slowness_s(self, worker: SimulatedWorker) -> float:
        return 0.0

    def upward(self, worker: SimulatedWorker, message: Upward) -> None:
        self.listener.arrived.append((str(worker.incarnation).encode(), [encode(message)]))

    def arrive(self, worker: SimulatedWorker) -> None:
        self.world.arrive(cast(Worker, worker))

    def completed(self, worker: SimulatedWorker) -> set[tuple[int, int]]:
        """The world has changed the model already."""
        return set()

    # -- its life ----------------------------------------------------------------------------------------------

    life = 0

    def boot(self) -> None:
        """Start the launcher, its workers and, on host 0, the global server."""
        world, name = self.world, f"node{self.index}"
        self.alive, self.frozen, self.life, self.ended_at = True, False, self.life + 1, math.inf
        self._later, self.links, self.tasks = [], {}, list[Task]()
        self.inbox.clear()
        self.by_incarnation = {}
        self.listener = WorkerListener(self)
        self.signals = SimpleNamespace(received=[])
        incarnation, first, self.knock = next(world.numbers), world.hosts[0].place, MemoryKnock(self)
        dial = lambda place: cast(Link, MemoryLink(self, place, f"{name}#{incarnation}"))  # noqa: E731
        self.local = LocalServer(
            self.index,
            incarnation,
            cast(Listener, self.listener),
            cast(Connector, dial(first)),
            self.size,
            say=self.says,
            complain=self.says,
            place=self.place.address,
            serves=self.index == 0,
            candidates=Candidates(self.index, dial, self.knock, self.place, [first]),
            clock=lambda: world.now,
        )
        self.local.workers.processes = cast(Any, self.listener)
        again = self.journals["journal"].state is not None
        servers = list(self._servers("journal", *["--continue"] * again)) if self.index == 0 else []
        workers = [self._command(f"{name}/worker{index}", Role.WORKER) for index in range(self.size)]
        self.node = Node(
            name,
            [*servers, *workers],
            self.local,
            self._start,
            self.says,
            shared=len(world.hosts) > 1,
            serve=self._take_over,
            clock=lambda: world.now,
        )
        self.node.begin()
        self.after(self.random.uniform(0, world.tick_s), self._tick)

    def says(self, text: str) -> None:
        """Note a line of its launcher."""
        self.world.say(f"node{self.index}: {text}")

    def _command(self, name: str, role: Role, *arguments: str) -> Command:
        return Command(name, arguments, {}, Path(f"{name}.log"), role, restarts=RESTARTS)

    def _servers(self, journal: str, *arguments: str) -> Iterator[Command]:
        yield self._command("global", Role.SERVER, journal, *arguments)
        yield self._command("relay", Role.RELAY)

    def _start(self, command: Command, number: int, again: bool) -> Running:
        if command.role is Role.SERVER and any(t.code is None and isinstance(t, ServerTask) for t in self.tasks):
            raise BrokenError(f"two servers on host {self.index}\n{self.world.story()}")
        task = WorkerTask(self, command) if command.role is Role.WORKER else Task(self, command)
        if command.role is Role.SERVER:
            task = ServerTask(self, command, again)
        self.tasks.append(task)
        return task

    def _take_over(self) -> Sequence[Command]:
        """Return the servers with which this host serves the run, as ``lsgd launch`` does."""
        if self.cannot_serve:
            self.failed += 1
            raise ConfigError("its disk is full")
        self.world.takeovers += 1
        state, rounds = self.local.following.copy.load()
        self.journals["of others"].save(taken_over(state, self.local.following.next_terms()), rounds)
        return list(self._servers("of others", "--continue"))

    def _tick(self) -> None:
        if self.node.turn(cast(Any, self.signals)):
            self.after(self.world.tick_s, self._tick)
        else:
            self.end()

    def end(self) -> None:
        """End the launcher, and with it all that it has started."""
        self.local.following.close()
        for task in self.tasks:
            task.send(SIGKILL)
        self.ended_at = self.world.now
        self.says("the launcher has ended")

    def serve(self, state: RunState, journal: MemoryJournal) -> GlobalDaemon:
        """Let a global server listen."""
        self.inbox.clear()
        self.links, self.closed = {}, []
        journal.open()
        standbys = Standbys(self.place)
        listener = cast(Listener, ServerListener(self))
        server = GlobalDaemon(Coordinator(state), listener, journal, standbys=standbys, watches_memory=False)
        decide = server._act

        def act(decision: Decision) -> None:
            check_invariants(server._state)
            for member in server._state.roster.members.values():
                member.record.met = 0  # answers are whole
            self.world.notes += [(self.index, note) for note in decision.notes]
            decide(decision)

        server._act = act  # type: ignore[method-assign]
        self.server = server
        return server

    def kill_server(self) -> None:
        """Kill the global server's process; the launcher starts it again from its journal."""
        for task in self.tasks:
            if isinstance(task, ServerTask):
                task.send(SIGKILL)

    def die(self, *, closes: bool = False) -> None:
        """Lose the machine, with all that is on it but its disk.

        ``closes``: it loses its launcher, and with it all processes, and the system closes their connections.
        """
        for task in self.tasks:
            task.send(SIGKILL)
        self.alive, self.refuses = False, closes
        if closes:
            self.world.close_connections(self)

    def reboot(self) -> None:
        """Start the machine again, and what it had, from its disk."""
        self.boot()

    def thaw(self) -> None:
        self.frozen = False
        later, self._later = self._later, []
        for event in later:
            event()


class Worker(SimulatedWorker):
    """A worker with a model: how many iterations of each incarnation are in it.

    Attributes:
        code: with which its process has ended; None while it runs. ended_at: when.
    """

    def __init__(self, host: Host, index: int, incarnation: int) -> None:
        self.host, self.index = host, index
        self.model: Counter[int] = Counter()
        self.term: Term | None = None
        self.code: int | None = None
        self.ended_at = math.inf
        super().__init__(cast(Any, host), host.index, index, incarnation, host.world.step_s)
        host.world.names[incarnation] = self.name

    def hears(self, frame: bytes, terms: tuple[Term, ...] = ()) -> None:
        """Take what the local server sent while it followed a server with these terms."""
        if self.state != "gone" and kind_of(frame) in (Go, Stop):
            self._check_term(terms)
        super().hears(frame)

    def _check_term(self, terms: tuple[Term, ...]) -> None:
        """A process trains along one lineage of terms only."""
        if self.term is not None and self.term not in terms:
            raise BrokenError(f"{self.name} trained in {self.term}, and gets answers in {terms}")
        self.term = terms[-1]

    def has_stepped(self) -> None:
        self.model[self.incarnation] += 1

    def fails(self, error: JoinError | ServerLostError) -> None:
        if not isinstance(error, RunOverError):
            self.host.says(f"{self.name}: {error}")
            self.code = error.exit_code

    def end(self, code: int = 0) -> None:
        if self.ended_at == math.inf:
            self.code, self.ended_at = self.code or code, self.host.world.now
        super().end()
