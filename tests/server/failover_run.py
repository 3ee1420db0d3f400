"""Runs on hosts that die, freeze and lose each other, in virtual time: real servers, real nodes' ends, played workers.

Each host has its local server (:class:`LocalServer`), the launcher's part of a take-over, perhaps a global server
(:class:`GlobalDaemon`), and workers. Instead of tensors, a model is how many iterations of whom it has learned from.
"""

import heapq
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from lsgd.node.elsewhere import Elsewhere, Link
from lsgd.node.local_server import LocalServer
from lsgd.node.node import DEPOSED_S
from lsgd.plan.plan import Plan
from lsgd.protocol.events import RoundOrdered
from lsgd.protocol.messages import Evicted, Go, Over, Place, Refused, Round, Stop, Term, Upward, Welcome, decode, encode
from lsgd.protocol.sockets import Connector, Listener
from lsgd.server.coordinator import Coordinator
from lsgd.server.course import Course
from lsgd.server.global_daemon import GIVE_WAY_S, GlobalDaemon
from lsgd.server.journal import restore, taken_over
from lsgd.server.next_step import waits_for
from lsgd.server.standbys import Standbys
from lsgd.server.state import Decision, RunState

from .helpers import check_invariants
from .served_run import MemoryJournal
from .simulated_run import Faults, SimulatedWorker

TICK_S = 0.25
START_S = (0.5, 2.5)
"""How long a server takes to start."""

KEPT_S = 10.0
"""How long a connection keeps what it cannot deliver."""


class BrokenError(AssertionError):
    """A promise was broken."""


class MemoryLink:
    """A connection from a host to a place."""

    def __init__(self, host: "Host", place: Place, name: str) -> None:
        self.host, self.address, self.name = host, place.address, name
        self.arrived: deque[list[bytes]] = deque()
        self.open = True
        self.target = host.world.hosts[place.node]
        self.last_s = {True: 0.0, False: 0.0}  # when the last message arrives, by direction
        self.waiting: dict[bool, deque[tuple[float, Callable[[], None]]]] = {True: deque(), False: deque()}

    def send(self, frames: Sequence[bytes]) -> bool:
        world, target, kept = self.host.world, self.target, list(frames)
        if not target.alive or (target.server is None and not target.frozen and world.reaches(self.host, target)):
            return False
        world.carry(self, True, lambda: self._arrives(kept))
        return True

    def _arrives(self, frames: list[bytes]) -> None:
        if self.target.server is not None:
            self.target.links[self.name] = self
            self.target.inbox.append((self.name.encode(), frames))

    def answer(self, frames: Sequence[bytes]) -> None:
        kept = list(frames)
        self.host.world.carry(self, False, lambda: self.arrived.append(kept))

    def receive(self) -> Iterator[list[bytes]]:
        while self.arrived:
            yield self.arrived.popleft()

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        self.open = False


class ServerListener:
    """Where a global server hears its peers."""

    secured = False

    def __init__(self, host: "Host") -> None:
        self._host = host

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        while self._host.inbox:
            yield self._host.inbox.popleft()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        link = self._host.links.get(peer.decode())
        if link is None or not link.open:
            return False
        link.answer(frames)
        return True

    def refusals(self) -> Iterator[str]:
        yield from ()


class WorkerListener:
    """Where a local server hears its workers."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self.arrived: deque[tuple[bytes, list[bytes]]] = deque()

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        while self.arrived:
            yield self.arrived.popleft()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> bool:
        worker = self._host.by_incarnation.get(int(peer))
        if worker is None or worker.state == "gone":
            return False
        terms = self._host.terms
        for frame in frames:
            self._host.after(0.001, lambda frame=frame: worker.hears(frame, terms))  # type: ignore[misc]
        return True

    def refusals(self) -> Iterator[str]:
        yield from ()


class Host:
    """A machine; also what its workers see of the world.

    Attributes:
        server: its global server; None: none runs. journal: what that one keeps.
        frozen: whether nothing happens on it.
        cannot_serve: whether no server starts on it; failed: how often none has.
    """

    own_steps = meet_every = 0

    def __init__(self, world: "World", index: int, workers: int) -> None:
        self.world, self.index, self.size = world, index, workers
        self.alive, self.frozen = True, False
        self.cannot_serve, self.failed = False, 0
        self.place = Place(index, f"tcp://10.0.0.{index + 1}:1")
        self.server: GlobalDaemon | None = None
        self.journal = MemoryJournal()
        self.inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self.links: dict[str, MemoryLink] = {}
        self.by_incarnation: dict[int, Worker] = {}
        self._later: list[Callable[[], None]] = []  # what happens when it thaws
        self.plan, self.random, self.faults = world.plan, world.random, world.faults
        self.let_go: set[Any] = set()
        self.steps = 0

    @property
    def terms(self) -> tuple[Term, ...]:
        """Those of the server that it follows."""
        return self.local.elsewhere.terms

    # -- what workers see --------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        return self.world

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen on this host, unless it dies first."""
        life = self.life

        def happens() -> None:
            if not self.alive or self.life != life:
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
        if not worker.severed:  # type: ignore[attr-defined]
            self.listener.arrived.append((str(worker.incarnation).encode(), [encode(message)]))

    def arrive(self, worker: SimulatedWorker) -> None:
        self.world.arrive(cast(Worker, worker))

    def completed(self, worker: SimulatedWorker) -> None:
        """The world has changed the model already."""

    # -- its life ----------------------------------------------------------------------------------------------

    life = 0

    def boot(self) -> None:
        """Start the launcher and its workers; it follows the server of host 0."""
        self.alive, self.frozen, self.life = True, False, self.life + 1
        self._later, self.links = [], {}
        self.inbox.clear()
        self.by_incarnation, self._starting, self._deposed_at = {}, False, 0.0
        self.listener = WorkerListener(self)
        name = f"node{self.index}#{next(self.world.numbers)}"
        first = self.world.hosts[0].place
        elsewhere = Elsewhere(
            self.index, lambda place: self.dial(place, name), self.world.knock(self), self.place, [first]
        )
        self.local = LocalServer(
            self.index,
            int(name.partition("#")[2]),
            cast(Listener, self.listener),
            cast(Connector, self.dial(first, name)),
            self.size,
            say=lambda text: self.world.say(f"node{self.index}: {text}"),
            complain=lambda text: self.world.say(f"node{self.index}: {text}"),
            place=self.place.address,
            elsewhere=elsewhere,
            clock=lambda: self.world.now,
        )
        for index in range(self.size):
            self.start_worker(index)
        self.after(self.random.uniform(0, TICK_S), self._tick)

    def dial(self, place: Place, name: str) -> Link:
        return cast(Link, MemoryLink(self, place, name))

    def start_worker(self, index: int) -> None:
        worker = Worker(self, index, next(self.world.numbers))
        self.by_incarnation[worker.incarnation] = worker
        self.world.workers.append(worker)

    def serve(self, state: RunState) -> None:
        """Start a global server."""
        self.inbox.clear()
        self.links = {}
        self.journal.open()
        standbys = Standbys(self.place)
        listener = cast(Listener, ServerListener(self))
        self.server = server = GlobalDaemon(
            Coordinator(state), listener, self.journal, standbys=standbys, watches_memory=False
        )
        self._gave_way_at = 0.0
        decide = server._act

        def act(decision: Decision) -> None:
            check_invariants(server._state)
            for member in server._state.roster.members.values():
                member.met = 0  # answers are whole
            self.world.notes += [(self.index, note) for note in decision.notes]
            decide(decision)

        server._act = act  # type: ignore[method-assign]

    def kill_server(self) -> None:
        """Kill the global server's process; the launcher starts it again from its journal."""
        if self.server is None or self.server._state.gives_way or self.server._state.over:
            return
        self.server = None
        self.after(self.random.uniform(*START_S), self._restart)

    def _restart(self) -> None:
        if self.server is not None:
            return
        if self.journal.state is None:  # it gave up before it died: the launcher begins a new run
            self.serve(RunState(self.plan, f"run{next(self.world.numbers)}", now=self.world.now))
        else:
            state = restore(json.loads(self.journal.state), self.world.now)
            state.book.elections.extend(self.journal.elections)
            self.serve(state)

    def die(self) -> None:
        """Lose the machine, with all that is on it but its disk."""
        self.alive = False
        self.server = None
        for worker in self.by_incarnation.values():
            worker.end()

    def reboot(self) -> None:
        """Start the machine again, and what it had, from its disk."""
        self.boot()
        self.after(self.random.uniform(*START_S), self._restart)

    def thaw(self) -> None:
        self.frozen = False
        later, self._later = self._later, []
        for event in later:
            event()

    def _tick(self) -> None:
        if self.server is not None and not self.server._state.over:
            self.server.turn(self.world.now)
            if self.server._state.gives_way:
                self._gave_way_at = self._gave_way_at or self.world.now
                if self.world.now - self._gave_way_at > GIVE_WAY_S:
                    self._end_server()
        self.local.turn()
        if self.local.takes_over and self.cannot_serve:
            self.failed += 1
            self.local.cannot_serve()
        elif self.local.takes_over and not self._starting and self.server is None:
            self._starting = True
            self.world.takeovers += 1
            copy, terms = self.local.copy.load(), self.local.next_terms()
            self.after(self.random.uniform(*START_S), lambda: self._take_over(*copy, terms))
        if self.local.deposed and (self.server is not None or self._starting):
            self._deposed_at = self._deposed_at or self.world.now
            if self.world.now - self._deposed_at > DEPOSED_S:
                self._end_server()
        else:
            self._deposed_at = 0.0
        self.after(TICK_S, self._tick)

    def _end_server(self) -> None:
        self.server, self._starting, self.journal.state = None, False, None

    def _take_over(self, saved: dict[str, Any], rounds: list[RoundOrdered], terms: tuple[Term, ...]) -> None:
        if not self._starting or self.server is not None:
            return
        state = restore(taken_over(saved, terms), self.world.now)
        state.book.elections.extend(rounds)
        self.serve(state)


class Worker(SimulatedWorker):
    """A worker with a model: how many iterations of each incarnation are in it."""

    def __init__(self, host: Host, index: int, incarnation: int) -> None:
        self.host = host
        self.severed, self.of_run = False, ""
        self.model: Counter[int] = Counter()
        self.term: Term | None = None
        self.index = index
        super().__init__(cast(Any, host), host.index, index, incarnation, 0.5)
        host.world.names[incarnation] = self.name

    def hears(self, frame: bytes, terms: tuple[Term, ...]) -> None:
        """Take what the local server sent while it followed a server with these terms."""
        message: Any = decode(frame)
        if self.state == "gone":
            return
        if isinstance(message, Welcome):
            self.of_run = message.run
        if isinstance(message, Evicted) and self.of_run not in ("", message.run):
            return  # a server has begun another run
        if isinstance(message, Evicted):
            self.end()
            self.host.after(1.0, lambda: self.host.start_worker(self.index))
            return
        if isinstance(message, Go | Stop):
            self._check_term(terms)
        if isinstance(message, Refused) or (isinstance(message, Over) and not self.host.world.is_over):
            self.host.after(1.0, lambda: self.host.start_worker(self.index))
        self.receive(message)

    def _check_term(self, terms: tuple[Term, ...]) -> None:
        """A process trains along one lineage of terms only."""
        if self.term is not None and self.term not in terms:
            raise BrokenError(f"{self.name} trained in {self.term}, and gets answers in {terms}")
        self.term = terms[-1]

    def step(self) -> None:
        if self.state == "training":
            self.model[self.incarnation] += 1
        super().step()


@dataclass
class Meeting:
    """The members of a round that have come to exchange."""

    round: Round
    names: set[str]
    arrived: dict[str, Worker] = field(default_factory=dict)


class World:
    """Hosts, the network between them, and time.

    Args:
        sizes: number of workers on each host.
    """

    def __init__(self, plan: Plan, sizes: Sequence[int], seed: int, delay_s: float = 0.05) -> None:
        self.plan, self.random, self.delay_s = plan, random.Random(seed), delay_s
        self.faults = Faults(exchange_timeout_s=6.0)
        self.now = 0.0
        self.notes: list[tuple[int, Any]] = []
        self.lines: list[str] = []
        self.numbers = itertools.count(1)
        self.names: dict[int, str] = {}
        self.workers: list[Worker] = []
        self.takeovers = 0
        self._course = Course(plan.phases)
        self.cuts: set[frozenset[int]] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._meetings: dict[Round, Meeting] = {}
        self.hosts = [Host(self, index, size) for index, size in enumerate(sizes)]
        for host in self.hosts:
            host.boot()
        self.hosts[0].serve(RunState(plan, "run"))

    @property
    def course(self) -> Any:
        """Of the servers: it is the plan's all the time."""
        return self._course

    @property
    def is_over(self) -> bool:
        return any(host.server is not None and host.server._state.stage == "over" for host in self.hosts)

    def say(self, text: str) -> None:
        self.lines.append(f"{self.now:7.2f} {text}")

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    # -- network -----------------------------------------------------------------------------------------------

    def reaches(self, one: Host, other: Host) -> bool:
        return one is other or frozenset((one.index, other.index)) not in self.cuts

    def knock(self, host: Host) -> Callable[[str, float], bool | None]:
        def answers(address: str, now: float) -> bool | None:
            other = next(each for each in self.hosts if each.place.address == address)
            return other.alive and not other.frozen and self.reaches(host, other)

        return answers

    def carry(self, link: MemoryLink, upward: bool, deliver: Callable[[], None]) -> None:
        """Deliver a message of a connection after those before it; late, or never, if its hosts lose each other."""
        arrives = max(link.last_s[upward], self.now + self.random.uniform(0.001, self.delay_s))
        link.last_s[upward] = arrives
        link.waiting[upward].append((arrives, deliver))
        self.after(arrives - self.now, lambda: self._deliver(link, upward))

    def _deliver(self, link: MemoryLink, upward: bool) -> None:
        """Deliver what is due, in its order."""
        source, target = (link.host, link.target) if upward else (link.target, link.host)
        waiting = link.waiting[upward]
        while waiting and (not link.open or not target.alive or self.now - waiting[0][0] > KEPT_S):
            waiting.popleft()
        if waiting and (target.frozen or not self.reaches(source, target)):
            self.after(0.5, lambda: self._deliver(link, upward))
            return
        while waiting and waiting[0][0] <= self.now:
            waiting.popleft()[1]()

    # -- data plane --------------------------------------------------------------------------------------------

    def arrive(self, worker: Worker) -> None:
        order, answer = worker.round, worker.current
        meeting = self._meetings.setdefault(order, Meeting(order, set(members_of(order))))
        meeting.arrived[worker.name] = worker
        if set(meeting.arrived) == meeting.names:
            self._exchange(meeting)
        worker.run.after(self.faults.exchange_timeout_s, lambda: worker.current is answer and worker.drop())

    def _exchange(self, meeting: Meeting) -> None:
        workers = list(meeting.arrived.values())
        del self._meetings[meeting.round]
        hosts = [worker.host for worker in workers]
        here = all(each.state == "exchanging" and each.round == meeting.round for each in workers)
        if not here or not all(self.reaches(one, other) for one in hosts for other in hosts):
            return
        order = meeting.round
        new = {order.generation.members[rank] for rank in order.new}
        model: Counter[int] = Counter()
        for worker in workers:
            if worker.name not in new:
                model |= worker.model
        for worker in workers:
            worker.run.after(self.random.uniform(0.01, 0.3), lambda worker=worker: self._commit(worker, order, model))  # type: ignore[misc]

    def _commit(self, worker: Worker, order: Round, model: Counter[int]) -> None:
        if worker.state == "exchanging" and worker.round == order:
            worker.model = Counter(model)
            worker.commit()

    # -- the run -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        event()

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end and not self.is_over:
            self.step()
        self.now = max(self.now, end)

    def until(self, condition: Callable[[], Any], within_s: float = 600.0) -> None:
        """Let time pass until a condition holds."""
        end = self.now + within_s
        while not condition():
            if self.now > end:
                raise BrokenError(f"not within {within_s:g} s:\n{self.story()}")
            self.step()

    def serving(self) -> list[GlobalDaemon]:
        """Return the servers that have not given up."""
        return [h.server for h in self.hosts if h.alive and h.server is not None and not h.server._state.gives_way]

    def heal(self) -> None:
        """Mend all links, and thaw all hosts."""
        self.cuts.clear()
        for host in self.hosts:
            if host.alive and host.frozen:
                host.thaw()

    def finish(self) -> RunState:
        """Heal, let the parts of the run meet, and end it; check what it promises, and return its last state."""
        self.heal()
        self.until(lambda: len(self.serving()) == 1 and self._all_follow())
        (server,) = self.serving()
        begun = server._state.ledger.count
        self.until(lambda: len(self.serving()) == 1 and self.serving()[0]._state.ledger.count >= begun + 20)
        (server,) = self.serving()
        limit = server._state.ledger.count + 250  # more than has been granted
        server._act(server.coordinator.tick(self.now))
        server.coordinator.change({"iterations": str(limit)})
        self.until(lambda: server._state.closed)
        state = server._state
        if state.ledger.count != limit or state.in_vain:
            raise BrokenError(f"{state.ledger.count} of {limit} iterations\n{self.story()}")
        self._check_models(state)
        return state

    def _all_follow(self) -> bool:
        term = self.serving()[0]._state.terms[-1]
        return all(h.local.elsewhere.term == term for h in self.hosts if h.alive)

    def _check_models(self, state: RunState) -> None:
        """One model; what is in it was counted, and nothing was counted that nobody has made."""
        stopped = [w for w in self.workers if isinstance(w.current, Stop) and w.current.round is not None]
        final = max((w.round for w in stopped), key=lambda order: order.id)
        ends = [w for w in stopped if w.round == final]
        if {w.name for w in ends} != set(members_of(final)):
            raise BrokenError("not all members have made the last round")
        if any(w.model != ends[0].model for w in ends):
            raise BrokenError("several models at the end")
        learned: Counter[str] = Counter()
        made: Counter[str] = Counter()
        counted: Counter[str] = Counter(state.roster.made)
        for incarnation, count in ends[0].model.items():
            learned[self.names[incarnation]] += count
        for worker in self.workers:
            made[worker.name] += worker.done
        for member in state.roster.members.values():
            counted[member.worker] += member.done
        for name in made | counted | learned:
            if not learned[name] <= counted[name] <= made[name]:
                raise BrokenError(
                    f"{name}: {learned[name]} learned, {counted[name]} counted, {made[name]} made\n{self.story()}"
                )

    def story(self) -> str:
        states = {w.name: (w.host.alive, w.state, w.seq, w.done) for w in self.workers if w.state != "gone"}
        servers = {h.index: (h.server._state.terms, h.server._state.ledger.count) for h in self.hosts if h.server}
        waits = [waits_for(s._state, self.now) for s in self.serving()]
        follows = {h.index: h.local.elsewhere.term for h in self.hosts if h.alive}
        lines = [line for line in self.lines if "been silent" not in line and "answers at" not in line]
        notes = [f"{index}: {note}" for index, note in self.notes[-25:]]
        return "\n".join([f"{self.now:.1f}", *map(str, (states, servers, waits, follows)), *lines[-60:], *notes])


def members_of(order: Round) -> tuple[str, ...]:
    """Return the names of those who take part in a round."""
    names = order.generation.members
    if order.scope == "global":
        return names
    node = names[order.leader].split("/")[0]
    return tuple(name for name in names if name.split("/")[0] == node)
