"""Runs on hosts that die, freeze and lose each other, in virtual time: see :mod:`tests.server.failover_host`."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lsgd.plan.plan import Plan
from lsgd.protocol.messages import Round, Stop
from lsgd.server.coordinator import LINGER_S
from lsgd.server.global_daemon import GlobalDaemon
from lsgd.server.next_step import waits_for
from lsgd.server.phases import Phases
from lsgd.server.state import RunState

from .failover_host import BrokenError, Host, Worker
from .failover_network import MemoryLink
from .simulated_run import Faults

START_S = (0.5, 2.5)
"""How long a server takes to start."""

KEPT_S = 10.0
"""How long a connection keeps what it cannot deliver."""

AGAIN_S = 0.2
"""After how long what was lost is sent again; twice as long each time, as TCP does."""

OUTLIVES_S = LINGER_S + 3.0
"""How long a launcher may live after the last worker of the run: its server waits for one whose machine has died."""


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
        delay_s: how late messages are at most.
        start_s: how long servers take to start, at least and at most.
        connects_s: how long it takes to make a connection, besides the time that messages take.
        step_s: how long a worker's step takes, about.
        tick_s: how often the loops of servers and launchers turn.
        imports_s: how long a worker's process takes until it joins.
    """

    def __init__(
        self,
        plan: Plan,
        sizes: Sequence[int],
        seed: int,
        delay_s: float = 0.05,
        start_s: tuple[float, float] = START_S,
        connects_s: float = 0.0,
        step_s: float = 0.5,
        tick_s: float = 0.25,
        imports_s: float = 0.0,
    ) -> None:
        self.plan, self.random, self.delay_s = plan, random.Random(seed), delay_s
        self.start_s, self.connects_s = start_s, connects_s
        self.step_s, self.tick_s, self.imports_s = step_s, tick_s, imports_s
        self.faults = Faults(exchange_timeout_s=6.0)
        self.now = 0.0
        self.notes: list[tuple[int, Any]] = []
        self.lines: list[str] = []
        self.numbers = itertools.count(1)
        self.names: dict[int, str] = {}
        self.workers: list[Worker] = []
        self.takeovers = 0
        self._phases = Phases(plan.phases)
        self.cuts: set[frozenset[int]] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._runs = itertools.count(), itertools.count()
        self._meetings: dict[Round, Meeting] = {}
        self.hosts = [Host(self, index, size) for index, size in enumerate(sizes)]
        for host in self.hosts:
            host.boot()

    @property
    def phases(self) -> Any:
        """Of the servers: it is the plan's all the time."""
        return self._phases

    @property
    def is_over(self) -> bool:
        """Whether all launchers have ended."""
        return all(not host.alive or host.ended_at < math.inf for host in self.hosts)

    def new_run(self) -> RunState:
        """Return the state of a run that begins."""
        number = next(self._runs)
        return RunState(self.plan, f"run{number}" if number else "run", now=self.now)

    def say(self, text: str) -> None:
        self.lines.append(f"{self.now:7.2f} {text}")

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def close(self) -> None:
        """End what is left of its processes."""
        for worker in self.workers:
            worker.end()

    # -- network -----------------------------------------------------------------------------------------------

    def reaches(self, one: Host, other: Host) -> bool:
        return one is other or frozenset((one.index, other.index)) not in self.cuts

    def carry(self, link: MemoryLink, upward: bool, deliver: Callable[[], None]) -> None:
        """Deliver a message of a connection after those before it; late, or never, if its hosts lose each other."""
        arrives = max(link.last_s[upward], self.now + self.random.uniform(0.001, self.delay_s))
        link.last_s[upward] = arrives
        link.waiting[upward].append((arrives, deliver))
        self.after(arrives - self.now, lambda: self._deliver(link, upward))

    def _deliver(self, link: MemoryLink, upward: bool) -> None:
        """Deliver what is due, in its order; what was lost is sent again later and later."""
        source, target = (link.host, link.target) if upward else (link.target, link.host)
        waiting = link.waiting[upward]
        while waiting and (not link.open or not target.alive or self.now - waiting[0][0] > KEPT_S):
            waiting.popleft()
        if not waiting or self.now < link.again_s[upward]:
            return
        if target.frozen or not self.reaches(source, target):
            again_s = 0.5 if target.frozen else AGAIN_S * 2 ** link.tries[upward]
            link.tries[upward] += 1
            link.again_s[upward] = self.now + again_s
            self.after(again_s, lambda: self._deliver(link, upward))
            return
        link.tries[upward] = 0
        while waiting and waiting[0][0] <= self.now:
            waiting.popleft()[1]()

    def close_connections(self, host: Host) -> None:
        """Let those at the other ends of a host's connections see that they are closed."""
        for other in self.hosts:
            for name in [name for name, link in other.links.items() if link.host is host]:
                other.links.pop(name).close()
                other.closed.append(name.encode())
        for meeting in list(self._meetings.values()):
            self._breaks(meeting)

    # -- data plane --------------------------------------------------------------------------------------------

    def arrive(self, worker: Worker) -> None:
        order, answer = worker.round, worker.current
        meeting = self._meetings.setdefault(order, Meeting(order, set(members_of(order))))
        meeting.arrived[worker.name] = worker
        if set(meeting.arrived) == meeting.names:
            self._exchange(meeting)
        self._breaks(meeting)
        worker.run.after(self.faults.exchange_timeout_s, lambda: worker.current is answer and worker.drop())

    def _breaks(self, meeting: Meeting) -> None:
        """Let those who have come drop a round if the system of another one's host says that it is gone."""
        refuse = {f"node{host.index}" for host in self.hosts if host.refuses and not host.alive}
        if refuse.isdisjoint(name.partition("/")[0] for name in meeting.names):
            return
        for worker in meeting.arrived.values():
            worker.run.after(self.delay_s, lambda worker=worker: worker.round == meeting.round and worker.drop())  # type: ignore[misc]

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
        servers = [h.server for h in self.hosts if h.alive and h.server is not None]
        return [server for server in servers if not server._state.tenure.gives_way]

    def heal(self) -> None:
        """Mend all links, and thaw all hosts."""
        self.cuts.clear()
        for host in self.hosts:
            if host.alive and host.frozen:
                host.thaw()

    def finish(self) -> RunState:
        """Heal, let the parts of the run meet, and end it; check what it promises, and return its last state."""
        self.heal()
        self.until(self._is_whole)
        (server,) = self.serving()
        begun = server._state.ledger.count
        self.until(lambda: self._is_whole() and self.serving()[0]._state.ledger.count >= begun + 20)
        (server,) = self.serving()
        limit = self.shorten(server, 250)  # more than has been granted
        self.until(lambda: server._state.closed)
        state = server._state
        if state.ledger.count != limit or state.in_vain:
            raise BrokenError(f"{state.ledger.count} of {limit} iterations\n{self.story()}")
        self.ends()
        self._check_models(state)
        return state

    def shorten(self, server: GlobalDaemon, iterations: int) -> int:
        """Let a run end after so many more iterations; return its length."""
        limit = server._state.ledger.count + iterations
        server._act(server.coordinator.tick(self.now))
        server.coordinator.change({"iterations": str(limit)})
        return limit

    def ends(self) -> None:
        """Let each part of the run end, and wait for the end of every launcher; none outlives the workers."""
        within_s = self.now + 900.0
        while not self.is_over and not self._outlived():
            if self.now > within_s:
                raise BrokenError(f"the launchers do not end\n{self.story()}")
            for server in self.serving():
                if not server._state.plan.run.iterations:
                    self.shorten(server, 100)
            self.passes(1.0)
        if late := self._outlived():
            raise BrokenError(f"the launchers of hosts {late} outlive the run\n{self.story()}")

    def _outlived(self) -> list[int]:
        """Return hosts whose launcher lives, or has lived, for longer than it should."""
        last = max(worker.ended_at for worker in self.workers)
        return [h.index for h in self.hosts if h.alive and min(h.ended_at, self.now) > last + OUTLIVES_S]

    def _is_whole(self) -> bool:
        """Whether one server serves all hosts that live, and no other one is there, or about to be."""
        servers = self.serving()
        if len(servers) != 1 or any(h.alive and h.ended_at < math.inf for h in self.hosts):
            return False
        term, alive = servers[0]._state.tenure.terms[-1], [h for h in self.hosts if h.alive]
        if any(h.local.following.candidates.term != term or h.claims for h in alive):
            return False
        return [h.index for h in alive if h.serves] == [term.node]

    def _check_models(self, state: RunState) -> None:
        """One model; what is in it was counted, and nothing was counted that nobody has made."""
        stopped = [w for w in self.workers if isinstance(w.current, Stop) and w.current.round is not None]
        final = max((w.round for w in stopped), key=lambda order: order.id)
        ends = [w for w in stopped if w.round == final]
        if {w.name for w in ends} != set(members_of(final)):
            raise BrokenError("not all members have made the last round")
        if any(w.model != ends[0].model for w in ends):
            raise BrokenError("several models at the end")
        if state.ledger.count > ends[0].model.total():
            raise BrokenError(f"{state.ledger.count} iterations count, and {ends[0].model.total()} are in the model")
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
        running = {h.index: h.server._state for h in self.hosts if h.server}
        servers = {index: (state.tenure.terms, state.ledger.count) for index, state in running.items()}
        waits = [waits_for(s._state, self.now) for s in self.serving()]
        follows = {h.index: h.local.following.candidates.term for h in self.hosts if h.alive}
        lines = [line for line in self.lines if "been silent" not in line and "answers at" not in line]
        notes = [f"{index}: {note}" for index, note in self.notes[-25:]]
        ends = {
            h.index: (h.ended_at, [t.command.name for t in h.tasks if t.code is None]) for h in self.hosts if h.alive
        }
        return "\n".join(
            [f"{self.now:.1f}", str(ends), *map(str, (states, servers, waits, follows)), *lines[-60:], *notes]
        )


def members_of(order: Round) -> tuple[str, ...]:
    """Return the names of those who take part in a round."""
    names = order.generation.members
    if order.scope == "global":
        return names
    node = names[order.leader].split("/")[0]
    return tuple(name for name in names if name.split("/")[0] == node)
