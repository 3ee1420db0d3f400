"""The real coordinator in virtual time, with workers that have no sockets: what benchmarks/control counts.

Every worker iterates in about 50 ms, one in a hundred four times as slowly. Some of them die on the way, are evicted
after the lease, and join anew. A message takes no time here: what is timed is what the global server computes.
"""

import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.control.worker import greeting
from lsgd.algorithms.leader import LeaderSettings
from lsgd.client.iteration.grants import GrantedIterations
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.events import Happening
from lsgd.protocol.messages import (
    Completed,
    Downward,
    Failed,
    GenerationOver,
    Go,
    Heartbeat,
    Join,
    Leave,
    Recall,
    Request,
    Round,
    Stop,
    Upward,
    Welcome,
    encode,
    worker_name,
)
from lsgd.protocol.wants import More
from lsgd.server.coordinator import Coordinator
from lsgd.server.next_step import waits_for
from lsgd.server.rounds import abridged
from lsgd.server.state import Decision, RunState

WORKERS_PER_NODE = 8
PERIOD, LOCAL_PERIOD = 64, 16
STEP_S, STEP_SPREAD = 0.05, 0.1
STRAGGLERS, STRAGGLER_FACTOR = 0.01, 4.0
EXCHANGE_S = {"local": 0.02, "global": 0.2}
FAILURE_SEEN_AFTER_S = 0.02
LEASE_S = 5.0
COMES_BACK_AFTER_S = 2.0
HEARTBEAT_S = 1.0
TICK_S = 0.1
LONGEST_S = 36_000.0  # of virtual time


@dataclass(slots=True, eq=False)
class VirtualWorker:
    """What one process of a worker knows."""

    name: str
    node: int
    index: int
    incarnation: int
    step_s: float
    grants: GrantedIterations
    joined_at: float = 0.0
    done: int = 0
    committed: int = 0
    dropped: int = 0
    answer: Go | Stop | None = None
    exchanging: bool = False
    alive: bool = True


@dataclass
class Counts:
    """What a run has cost.

    Args:
        decisions_s: computing time of each request that no round followed from.
        openings_s: of each decision that ordered a global round, and of the encoding of its answers.
        joins_s: of each greeting.
        ticks_s: of each tick.
        killed: workers that died.
        upward: messages of the workers.
        heartbeats: those of them that are.
        downward: answers.
        round_nbytes: of all answers that carry a round, for each round, by scope.
    """

    decisions_s: list[float] = field(default_factory=list)
    openings_s: list[tuple[float, float]] = field(default_factory=list)
    joins_s: list[float] = field(default_factory=list)
    ticks_s: list[float] = field(default_factory=list)
    killed: int = 0
    upward: int = 0
    heartbeats: int = 0
    downward: int = 0
    round_nbytes: dict[str, list[int]] = field(default_factory=lambda: {"local": [], "global": []})


class Simulation:
    """A whole run: all workers join, make their iterations, and leave.

    Args:
        workers: how many, eight on a node.
        iterations: of each worker, on average.
        failures: how many workers die on the way.
        period: of the global rounds.
        local_period: of the local ones.
        lookahead: iterations that are asked for ahead.
        stragglers: the share of workers that are slow.
        step_s: seconds of an iteration of most workers.
        seed: of everything random.

    Attributes:
        now: seconds of virtual time.
        state: of the run.
        happened: takes what has happened, at this moment.
    """

    def __init__(
        self,
        workers: int,
        iterations: int,
        failures: int,
        *,
        period: int = PERIOD,
        local_period: int = LOCAL_PERIOD,
        lookahead: int = 1,
        stragglers: float = STRAGGLERS,
        step_s: float = STEP_S,
        seed: int = 0,
    ) -> None:
        self.counts = Counts()
        self.now = 0.0
        self.happened: Callable[[Iterable[Happening]], object] = lambda happened: None
        algorithm = LeaderSettings(period=period, local_period=local_period)
        settings = RunSettings(workers=workers, iterations=workers * iterations, lease_s=LEASE_S, lookahead=lookahead)
        self._lookahead, self._stragglers, self._step_s = lookahead, stragglers, step_s
        self.state = RunState(Plan(settings, (Phase(algorithm),)), "simulated")
        self._coordinator = Coordinator(self.state)
        self._random = random.Random(seed)
        self._incarnations = itertools.count(1)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._present: dict[tuple[str, int], VirtualWorker] = {}
        for place in range(workers):
            self._join(place // WORKERS_PER_NODE, place % WORKERS_PER_NODE)
        for _ in range(failures):
            self._after(self._random.uniform(0.1, 0.9) * iterations * step_s, self._kill_one)
        self._after(TICK_S, self._tick)
        self._after(HEARTBEAT_S, self._beat)

    def run(self) -> Counts:
        """Let the run go to its end and return what it has cost.

        Raises:
            RuntimeError: it does not come to its end.
        """
        self.advance(LONGEST_S)
        if not self.state.over:
            reason = waits_for(self.state, self.now)
            raise RuntimeError(f"the simulated run has not ended after {LONGEST_S:g} s: {reason}")
        return self.counts

    def advance(self, until: float) -> None:
        """Let the run go on to a moment, or to its end if that comes first."""
        while not self.state.over and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    # -- the server's side -------------------------------------------------------------------------------------

    def _say(self, message: Upward) -> None:
        self.counts.upward += 1
        self.counts.heartbeats += isinstance(message, Heartbeat)
        start = time.perf_counter()
        decision = self._coordinator.handle(message, self.now)
        seconds = time.perf_counter() - start
        opened = self._carry_out(decision, seconds)
        if isinstance(message, Join):
            self.counts.joins_s.append(seconds)
        elif isinstance(message, Request) and not opened:
            self.counts.decisions_s.append(seconds)

    def _tick(self) -> None:
        start = time.perf_counter()
        decision = self._coordinator.tick(self.now)
        seconds = time.perf_counter() - start
        if not self._carry_out(decision, seconds):
            self.counts.ticks_s.append(seconds)
        self._after(TICK_S, self._tick)

    def _carry_out(self, decision: Decision, decided_s: float) -> bool:
        """Deliver the answers; return whether a round was ordered."""
        self.happened(decision.happened)
        self.counts.downward += len(decision.answers)
        ordered = [(name, m) for name, _, m in decision.answers if isinstance(m, Go | Stop) and m.round is not None]
        rounds = {m.round.id: m.round for _, m in ordered if m.round is not None}
        if ordered:
            members = self.state.roster.members
            start = time.perf_counter()
            nbytes = sum(len(encode(abridged(answer, members[name]))) for name, answer in ordered)
            encoded_s = time.perf_counter() - start
            for round in rounds.values():
                self.counts.round_nbytes[round.scope].append(nbytes // len(rounds))
                if round.scope == "global":
                    self.counts.openings_s.append((decided_s, encoded_s))
        taking_part: dict[int, list[VirtualWorker]] = {id: [] for id in rounds}
        for name, incarnation, answer in decision.answers:
            worker = self._present.get((name, incarnation))
            if worker is not None and worker.alive:
                self._receive(worker, answer)
            if worker is not None and isinstance(answer, Go | Stop) and answer.round is not None:
                taking_part[answer.round.id].append(worker)
        for id, workers in taking_part.items():
            self._exchange(rounds[id], workers)
        return bool(ordered)

    # -- the workers' side -------------------------------------------------------------------------------------

    def _join(self, node: int, index: int) -> None:
        slow = self._random.random() < self._stragglers
        step_s = self._step_s * (STRAGGLER_FACTOR if slow else 1.0)
        place = (worker_name(node, index), node, index, next(self._incarnations))
        worker = VirtualWorker(*place, step_s, GrantedIterations(self._lookahead), self.now)
        self._present[worker.name, worker.incarnation] = worker
        self._say(greeting(node, index, worker.incarnation, f"10.{node >> 8}.{node & 255}.1"))

    def _receive(self, worker: VirtualWorker, answer: Downward) -> None:
        match answer:
            case Welcome() if not worker.grants.seq:
                self._after(0.0, lambda: self._next(worker))
            case GenerationOver() if worker.exchanging:
                self._after(0.0, lambda: self._drop(worker))
            case Go() if not worker.grants.take(answer):
                pass
            case Go() | Stop():
                worker.answer = answer
                if answer.round is None:
                    self._go_on(worker)
            case Recall():
                worker.grants.give_back()

    def _next(self, worker: VirtualWorker) -> None:
        """Begin the next iteration, or ask for it."""
        if worker.grants.next():
            self._go_on(worker)
        else:
            self._request(worker)

    def _ask_ahead(self, worker: VirtualWorker) -> None:
        if worker.alive and worker.grants.wants_more():
            state = (worker.grants.seq + 1, worker.done, worker.committed, worker.dropped, None, More())
            self._say(Request(worker.name, worker.incarnation, *state))

    def _request(self, worker: VirtualWorker) -> None:
        if worker.alive:
            loss = self._random.random()
            state = (worker.grants.seq, worker.done, worker.committed, worker.dropped, loss)
            self._say(Request(worker.name, worker.incarnation, *state))

    def _go_on(self, worker: VirtualWorker) -> None:
        """After the round, if there was one: iterate, or leave."""
        if isinstance(worker.answer, Stop):
            self._after(0.0, lambda: self._leave(worker))
            return
        self._after(0.0, lambda: self._ask_ahead(worker))
        spread = self._random.gauss(1.0, STEP_SPREAD)
        self._after(worker.step_s * max(0.5, spread), lambda: self._step(worker))

    def _step(self, worker: VirtualWorker) -> None:
        if worker.alive:
            worker.done += 1
            self._next(worker)

    def _leave(self, worker: VirtualWorker) -> None:
        worker.alive = False
        state = (worker.done, False, "the run is over", worker.committed)
        self._say(Leave(worker.name, worker.incarnation, *state))

    def _exchange(self, round: Round, workers: Iterable[VirtualWorker]) -> None:
        for worker in workers:
            worker.exchanging = True
        broken = not all(worker.alive for worker in workers)
        delay_s = FAILURE_SEEN_AFTER_S if broken else EXCHANGE_S[round.scope]
        self._after(delay_s, lambda: self._end_exchange(round, list(workers)))

    def _end_exchange(self, round: Round, workers: list[VirtualWorker]) -> None:
        complete = all(worker.alive for worker in workers)
        for worker in workers:
            if not worker.alive or not worker.exchanging:
                continue
            if complete:
                worker.exchanging, worker.committed = False, round.id
                self._say(Completed(worker.name, worker.incarnation, round.id))
                self._go_on(worker)
            else:
                self._drop(worker)

    def _drop(self, worker: VirtualWorker) -> None:
        """The round failed here: say so and ask again."""
        if not worker.alive or not worker.exchanging:
            return
        assert worker.answer is not None and worker.answer.round is not None
        worker.exchanging, worker.dropped = False, worker.answer.round.id
        self._say(Failed(worker.name, worker.incarnation, worker.dropped, "a peer closed"))
        self._request(worker)

    def _beat(self) -> None:
        for worker in list(self._present.values()):
            if worker.alive:
                compute_s = worker.done * worker.step_s
                waiting_s = max(0.0, self.now - worker.joined_at - compute_s)
                self._say(Heartbeat(worker.name, worker.incarnation, compute_s, waiting_s))
        self._after(HEARTBEAT_S, self._beat)

    def _kill_one(self) -> None:
        alive = [worker for worker in self._present.values() if worker.alive]
        if not alive or self.state.stopping:
            return
        dead = self._random.choice(alive)
        dead.alive = False
        self.counts.killed += 1
        back_s = LEASE_S + COMES_BACK_AFTER_S
        self._after(back_s, lambda: self._come_back(dead))

    def _come_back(self, dead: VirtualWorker) -> None:
        if not self.state.stopping:
            self._join(dead.node, dead.index)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie; 0 where there are none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]
