"""Whole runs in virtual time: real requests and connections of workers, over a network that does not behave."""

import functools
import heapq
import itertools
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lsgd.plan.plan import Plan
from lsgd.protocol import wants
from lsgd.protocol.messages import (
    Downward,
    Go,
    Leave,
    Left,
    Request,
    Round,
    Stop,
    Upward,
    encode,
)
from lsgd.server.coordinator import Coordinator
from lsgd.server.journal import capture, restore
from lsgd.server.next_step import waits_for
from lsgd.server.reasons import Reason
from lsgd.server.state import Decision, RunState

from .helpers import check_invariants
from .simulated_worker import SimulatedWorker

SLOW_S = (8.0, 20.0, 120.0)
MOST_DOWN_S = 1.0
LEAST_UP_S = 2.0
MOST_KILLS = 12  # the death of a worker is seen by a server that lives for longer than its lease


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong: probabilities, and two times."""

    lose: float = 0.0
    double: float = 0.0
    delay_s: float = 0.0  # longest extra delay of a message, which is what brings them out of order
    pause: float = 0.0  # of an iteration
    unused_pause: float = 0.0  # before an iteration that was granted
    leave: float = 0.0
    last: float = 0.0  # of a worker that wants one more round, and leaves
    crash: float = 0.0
    exchange: float = 0.0  # of one member's part in a round
    links: float = 0.0  # of a probe that finds pairs which cannot reach each other
    exchange_timeout_s: float = 4.0
    slow: float = 0.0  # of a step that takes one of SLOW_S
    kill: float = 0.0  # of the global server, by each decision; it is soon started again, and lives for a while

    @property
    def any_loss(self) -> bool:
        return bool(self.lose or self.crash)


@dataclass
class Exchange:
    """The data plane of one round: who has arrived; it begins when all have."""

    round: Round
    expected: set[str]
    arrived: dict[str, SimulatedWorker] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    model: set[tuple[int, int]] = field(default_factory=set)  # all that its members have learned from


class SimulatedRun:
    """A coordinator, its workers and their network.

    Args:
        plan: with a limit of iterations.
        groups: workers on each node.
        seed: of everything random.
        faults: what goes wrong.
        latecomers: workers that join in the middle, some of them on new nodes.

    Attributes:
        own_steps: length of each worker's own loop; 0: the plan ends the run.
        meet_every: steps of a worker after which it calls mean(); 0: never.
    """

    own_steps = meet_every = 0

    def __init__(
        self, plan: Plan, queues: list[int], seed: int, faults: Faults | None = None, latecomers: int = 0
    ) -> None:
        self.plan, self.faults = plan, faults or Faults()
        self.random = random.Random(seed)
        self.coordinator = Coordinator(RunState(plan, "run"))
        self.now = 0.0
        self.steps = 0
        self.rounds: dict[int, Round] = {}
        self.failed: set[int] = set()
        self.answered: dict[tuple[str, int, int], list[Go | Stop]] = defaultdict(list)
        self.requests: set[tuple[str, int, int]] = set()
        self.held: set[tuple[str, int, int]] = set()  # those that are not ahead, and so are answered some day
        self.notes: list[Reason] = []
        self.clean_leaves: set[tuple[str, int]] = set()
        self.kills = self.stragglers = self.slow_steps = self.cuts = 0
        self.forgotten: Counter[tuple[str, int]] = Counter()  # steps reported, and not yet in the journal at a kill
        self._down = False
        self._started_at = 0.0
        self._kept = -1  # the changes that the journal has
        self._keep()
        self._under_way: dict[int, tuple[bool, Callable[[], None]]] = {}
        self._exchanges: dict[int, Exchange] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sizes = list(queues)
        self.workers: list[SimulatedWorker] = []
        self._by_identity: dict[tuple[str, int], SimulatedWorker] = {}
        for node, size in enumerate(queues):
            for index in range(size):
                self.add(node, index)
        for _ in range(latecomers):
            self.after(self.random.uniform(1.0, 30.0), self.add_latecomer)

    @property
    def state(self) -> RunState:
        return self.coordinator.state

    # -- time and network --------------------------------------------------------------------------------------

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def slowness_s(self, worker: SimulatedWorker) -> float:
        """Return by how much a step is too long."""
        if not self.happens(worker.slow):
            return 0.0
        self.slow_steps += 1
        return self.random.choice(SLOW_S)

    def transmit(self, deliver: Callable[[], None], *, downward: bool) -> None:
        if self._down or self.happens(self.faults.lose):
            return
        for _ in range(1 + self.happens(self.faults.double)):
            key = next(self._order)
            self._under_way[key] = (downward, deliver)
            delay_s = 0.001 + self.random.uniform(0.0, self.faults.delay_s)
            self.after(delay_s, lambda key=key: self._arrive(key))

    def _arrive(self, key: int) -> None:
        if key in self._under_way:
            _, deliver = self._under_way.pop(key)
            deliver()

    def upward(self, worker: SimulatedWorker, message: Upward) -> None:
        if isinstance(message, Request):
            key = (message.worker, message.incarnation, message.seq)
            self.requests.add(key)
            if not isinstance(message.wants, wants.More):
                self.held.add(key)
        self.transmit(lambda: self._deliver(message), downward=False)

    def _deliver(self, message: Upward) -> None:
        who = (message.worker, message.incarnation)
        member = self.state.roster.members.get(message.worker)
        known = member is not None and member.join.incarnation == message.incarnation
        kept = self.act(self.coordinator.handle(message, self.now))
        if kept and isinstance(message, Leave):
            if known:
                self.clean_leaves.add(who)
            self._send(*who, Left())

    def act(self, decision: Decision) -> bool:
        """Do as the global server does with a decision; return whether it lived to journal it."""
        check_invariants(self.state)
        assert self.state.ledger.count <= (self.plan.run.iterations or math.inf)
        dies = self.now - self._started_at > LEAST_UP_S and self.kills < MOST_KILLS and self.happens(self.faults.kill)
        killed = self.random.choice(("decided", "kept", "sent")) if dies else ""
        if killed == "decided":
            self.kill()
            return False
        self._keep()
        self.notes += decision.notes
        self.stragglers += sum(note.code == "evicted" for note in decision.notes)
        self.failed |= {int(n.split()[1]) for n in decision.notes if n.code.startswith("round_fails")}
        self._check_rounds(decision)
        if killed != "kept":
            for worker, incarnation, message in decision.answers:
                if isinstance(message, Go | Stop):
                    self._check_answer(worker, incarnation, message)
                self._send(worker, incarnation, message)
        if killed:
            self.kill()
        return True

    def _send(self, worker: str, incarnation: int, message: Downward) -> None:
        target = self._by_identity[worker, incarnation]
        if target.state != "gone":
            frame = encode(message)
            self.transmit(lambda: target.hears(frame), downward=True)

    # -- deaths of the global server ---------------------------------------------------------------------------

    def _keep(self) -> None:
        """Write the journal, by the rule of the global server: when what has to be kept has changed."""
        if self.state.changes != self._kept:
            self._journal = json.dumps(capture(self.state, self.now))
            self._kept = self.state.changes

    def kill(self) -> None:
        """Lose the coordinator; what it was sent is lost, what it has sent arrives now or never."""
        self.kills += 1
        self._down = True
        kept = {(m["join"]["worker"], m["join"]["incarnation"]): m["done"] for m in self._saved_members()}
        for member in self.state.roster.members.values():
            who = (member.worker, member.join.incarnation)
            self.forgotten[who] += member.done - kept.get(who, 0)
        under_way, self._under_way = self._under_way, {}
        for downward, deliver in under_way.values():
            if downward and self.random.random() < 0.5:
                deliver()
        self.after(self.random.uniform(0.0, MOST_DOWN_S), self._restart)

    def _saved_members(self) -> list[dict[str, Any]]:
        return list(json.loads(self._journal)["members"])

    def _restart(self) -> None:
        elections = self.state.book.elections  # they have a table of their own in the journal
        self.coordinator = Coordinator(restore(json.loads(self._journal), self.now))
        self.state.book.elections = elections
        self._kept = self.state.changes
        self._down = False
        self._started_at = self.now
        check_invariants(self.state)

    def _check_rounds(self, decision: Decision) -> None:
        """A new round goes to all its members in one decision, once to each, the same object."""
        ordered: dict[int, list[tuple[str, Round]]] = defaultdict(list)
        for worker, _, message in decision.answers:
            if isinstance(message, Go | Stop) and message.round and message.round.id not in self.rounds:
                ordered[message.round.id].append((worker, message.round))
        assert len({r.scope for pairs in ordered.values() for _, r in pairs}) <= 1
        for id, pairs in ordered.items():
            round = pairs[0][1]
            assert all(r is round for _, r in pairs)
            assert id == len(self.rounds) + 1
            self.rounds[id] = round
            members = self.members_of(round)
            assert sorted(worker for worker, _ in pairs) == sorted(members)
            if round.scope == "global":
                live = {m.worker for m in self.state.roster.members.values() if m.live}
                end = min(self.plan.run.iterations, self.state.phases.ends[self.state.phases.number])
                out = sum(m.granted for m in self.state.roster.members.values() if not m.live)
                left = end - self.state.ledger.count - out
                assert set(members) == live or len(members) == left < len(live)
            assert round.leader >= 0 and round.source >= 0
            assert not round.new or self.first_of_generation(round)

    def first_of_generation(self, round: Round) -> bool:
        same = [r.id for r in self.rounds.values() if r.generation.number == round.generation.number]
        return min(same) == round.id

    def members_of(self, round: Round) -> tuple[str, ...]:
        names = round.generation.members
        if round.scope == "global":
            return names
        node = names[round.leader].split("/")[0]
        return tuple(name for name in names if name.split("/")[0] == node)

    def _check_answer(self, worker: str, incarnation: int, answer: Go | Stop) -> None:
        assert isinstance(answer, Go) or answer.reason
        key = (worker, incarnation, answer.seq)
        assert key in self.requests
        earlier = self.answered[key]
        if not any(answer is e or (self.kills and answer.round == e.round) for e in earlier):
            # Another answer only if the earlier one ordered a round that failed, or died with the server.
            assert all(e.round.id in self.failed if e.round is not None else self.kills for e in earlier)
            earlier.append(answer)

    # -- data plane --------------------------------------------------------------------------------------------

    def arrive(self, worker: SimulatedWorker) -> None:
        round = worker.round
        exchange = self._exchanges.setdefault(round.id, Exchange(round, set(self.members_of(round))))
        exchange.arrived[worker.name] = worker
        if set(exchange.arrived) == exchange.expected:
            exchange.model = set().union(*(w.learned for w in exchange.arrived.values() if self._counts(w, round)))
            broken = self._broken(round) if round.probe and self.happens(self.faults.links) else ()
            for member in exchange.arrived.values():
                end = functools.partial(self._finish, member, round, broken)
                self.after(self.random.uniform(0.01, 0.3), end)
        answer = worker.current
        self.after(self.faults.exchange_timeout_s, lambda: worker.current is answer and worker.drop())

    def completed(self, worker: SimulatedWorker) -> set[tuple[int, int]]:
        """Note that a worker has completed its round, and return what it has learned from now."""
        exchange = self._exchanges[worker.round.id]
        exchange.completed.add(worker.name)
        own = {each for each in worker.learned if each[0] == worker.incarnation}
        return exchange.model | (own if self.state.phases.schedule.common else set())

    def _counts(self, worker: SimulatedWorker, round: Round) -> bool:
        """Whether a round takes in what a worker has learned: newcomers take another's model."""
        rank = round.generation.members.index(worker.name)
        return rank not in round.new or (round.final and self.state.phases.schedule.common)

    @property
    def codes(self) -> set[str]:
        """The codes of what the servers have told people."""
        return {note.code for note in self.notes}

    @property
    def learned(self) -> int:
        """How many iterations the run's consensus has learned from."""
        finals = [e.model for e in self._exchanges.values() if e.round.final and e.completed]
        return len(finals[-1]) if finals else 0

    @property
    def reported(self) -> int:
        """How many iterations workers have reported, those included that were lost."""
        return self.state.ledger.count - self.state.ledger.base

    def unfinished(self) -> set[int]:
        """Return the rounds that not all their members have completed."""
        done = {id: exchange.completed for id, exchange in self._exchanges.items()}
        return {id for id, round in self.rounds.items() if done.get(id) != set(self.members_of(round))}

    def _broken(self, round: Round) -> tuple[int, ...]:
        """Return pairs of two different ranks, as a probe does; of a member that is alone, none."""
        size = len(round.generation.members)
        if size == 1:
            return ()
        pairs = [self.random.sample(range(size), 2) for _ in range(self.random.randint(1, size))]
        return tuple(rank for pair in pairs for rank in pair)

    def _finish(self, worker: SimulatedWorker, round: Round, broken: tuple[int, ...]) -> None:
        if worker.state != "exchanging" or worker.round != round:
            return
        if broken:
            self.cuts += 1
            worker.drop(broken)
        elif self.happens(self.faults.exchange):
            worker.drop()
        else:
            worker.commit()

    # -- the run -----------------------------------------------------------------------------------------------

    def add(self, node: int, index: int) -> None:
        speed = self.random.choice([0.05, 0.1, 0.2, 0.5])
        worker = SimulatedWorker(self, node, index, len(self.workers) + 1, speed)
        self.workers.append(worker)
        self._by_identity[worker.name, worker.incarnation] = worker

    def add_latecomer(self) -> None:
        node = self.random.randrange(len(self._sizes) + 1)
        if node == len(self._sizes):
            self._sizes.append(0)
        self._sizes[node] += 1
        self.add(node, self._sizes[node] - 1)

    def go(self, most_s: float = 3000.0) -> "SimulatedRun":
        """Run until the coordinator is over."""
        self._tick()
        try:
            while not self.state.over:
                assert self._events and self.now < most_s, self._story()
                if not self._down and not self.state.roster.members and self.now > 40.0:
                    self.coordinator.stop("everybody has left")
                self._step()
        finally:
            for worker in self.workers:
                worker.end()
        return self

    def _step(self) -> None:
        """Go on to the next event."""
        self.now, _, event = heapq.heappop(self._events)
        event()

    def _tick(self) -> None:
        if not self._down:
            self.act(self.coordinator.tick(self.now))
        self.after(0.5, self._tick)

    def _story(self) -> str:
        states = {w.name: (w.state, w.seq, w.done) for w in self.workers}
        return "\n".join(
            [
                f"not over at {self.now:.1f}",
                waits_for(self.state, self.now),
                str(states),
                *self.notes[-30:],
            ]
        )
