"""The state of a run: all that its coordinator knows. The coordinator changes it; journal and report read it."""

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.events import Happening, Note, RunChanged
from lsgd.protocol.messages import Downward, Join, Pause, Request, worker_name
from lsgd.server.calls import Calls
from lsgd.server.changes import Changes
from lsgd.server.data import DataBook
from lsgd.server.ledger import Ledger
from lsgd.server.life import Life, LifeState
from lsgd.server.links import Links
from lsgd.server.phases import Phases
from lsgd.server.reasons import NO_REASON, Reason, Why, number_of
from lsgd.server.roster import Member, MemberState, Roster, named
from lsgd.server.rounds import RoundBook
from lsgd.server.tenure import Tenure

HERE_S = 5.0
"""A worker that was heard at most so long ago counts as being there."""

SILENCE_S = 5.0
"""After so long without its heartbeat, which comes every second, a worker counts as silent; or after its lease."""

CLOSED_S = 1.0
"""The same once the connection of its node has closed: a process that lives makes another one."""

LOOPS_EVERY_S = 1e-4
"""How long, for each worker, the share of their own loops is cached."""


UNSAID = (-math.inf, NO_REASON)


@dataclass(slots=True)
class Decision:
    """What to do now, and what has happened.

    Args:
        answers: messages by (worker, incarnation), in order.
        notes: lines of the log.
        happened: facts for the stream of events, the notes among them, in order.
    """

    answers: list[tuple[str, int, Downward]] = field(default_factory=list)
    notes: list[Reason] = field(default_factory=list)
    happened: list[Happening] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Outbox:
    """What has yet to leave the coordinator, and what it has said.

    Attributes:
        decision: what it has decided since the last one left.
        events: number of times that this server has noted each, by its code.
        said: what the run waits for, in words, and when that was said; :data:`UNSAID` if something has happened since.
        shown: state of the run, as last published.
    """

    decision: Decision = field(default_factory=Decision)
    events: Counter[str] = field(default_factory=Counter)
    said: tuple[float, Reason] = UNSAID
    shown: str = ""


@dataclass(slots=True, eq=False)
class Gathering:
    """Who comes: before the run begins, and in a name that another one has.

    Args:
        first: name of the worker that saves for all, fixed when the run begins.
        servers: incarnation of each node's local server, as last heard.

    Attributes:
        announced: number of workers on each node, according to its local server.
        since: time from which workers wait for others to join.
        claims: incarnation of another process that claims the name of a worker, and since when.
    """

    first: str = ""
    servers: dict[int, int] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    since: float = 0.0
    claims: dict[str, tuple[int, float]] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

    def claimed_since(self, join: Join, now: float) -> float:
        """Return since when this process, the last one to do so, claims the name of a member."""
        claim = self.claims.get(join.worker)
        if claim is None or claim[0] != join.incarnation:
            claim = self.claims[join.worker] = (join.incarnation, now)
        return claim[1]

    def complete(self, now: float, first: str) -> None:
        """Note that enough have joined: from now on the run waits for their first requests."""
        self.since = now
        if not self.first:
            self.first = first
            self.changes.count += 1

    def meet(self, node: int, server: int) -> bool:
        """Note which local server a node has; return whether it had another one before."""
        before = self.servers.get(node, server)
        if self.servers.get(node) != server:
            self.servers[node] = server
            self.changes.count += 1
        return before != server

    def leaves(self, node: int) -> None:
        """Forget a node that has left the run."""
        self.announced.pop(node, None)
        if self.servers.pop(node, None) is not None:
            self.changes.count += 1

    def missing(self, run: RunSettings, here: Container[str], most: int = 4) -> str:
        """Name the nodes that have not connected and the workers not ``here``, as far as that is known."""
        expected = sorted(self.announced.items())
        nodes = sum(count for _, count in expected)
        missing = [f"node{node}" for node in range(run.nodes) if node not in self.announced and expected]
        if not run.workers or nodes == run.workers:
            names = [worker_name(node, index) for node, count in expected for index in range(count)]
            missing += [name for name in names if name not in here]
        more = f" and {len(missing) - most} more" if len(missing) > most else ""
        return f"; missing: {', '.join(missing[:most])}{more}" if missing else ""


@dataclass(slots=True, eq=False)
class Progress:
    """How far the run is, in time.

    Args:
        started_at: time of the first round's order; None: there was none.

    Attributes:
        moved_at: time at which a member last asked (ahead: and was granted iterations), completed a round, or said that
            a transfer in its round goes on.
    """

    started_at: float | None = None
    moved_at: float = 0.0
    _loops: tuple[float, float] = (-math.inf, 0.0)  # when the share of their own loops was computed, and the share

    def elapsed_s(self, now: float) -> float:
        """Return the seconds since the first round was ordered; 0 before."""
        return 0.0 if self.started_at is None else now - self.started_at

    def share_of(self, loops: Callable[[], Sequence[Member]], workers: int, now: float) -> float:
        """Return the completed share of the scripts' own loops; with many ``workers``, as of a moment ago."""
        if now - self._loops[0] >= LOOPS_EVERY_S * workers:
            own = loops()
            left = sum(m.steps_left / m.asked.steps for m in own)
            self._loops = now, 1 - left / len(own) if own else 0.0
        return self._loops[1]


@dataclass(slots=True, eq=False)
class RunState:
    """What the servers know about a run.

    Args:
        now: seconds of a clock that never goes back, as of the last message or tick.
        tenure: what this server is in the run.
        life: where the run is between its first worker and its end.

    Attributes:
        links: members that the run continues without, because others cannot reach them.
        calls: those that workers make together.
        data: what workers have said of their data.
    """

    plan: Plan
    run: str
    now: float = 0.0
    tenure: Tenure = field(default_factory=Tenure)
    roster: Roster = field(default_factory=Roster)
    ledger: Ledger = field(default_factory=Ledger)
    book: RoundBook = field(default_factory=RoundBook)
    life: Life = field(default_factory=lambda: Life(LifeState.GATHERING, 0.0))
    gathering: Gathering = field(default_factory=Gathering)
    progress: Progress = field(default_factory=Progress)
    phases: Phases = field(init=False)
    links: Links = field(init=False)
    calls: Calls = field(default_factory=Calls)
    data: DataBook = field(default_factory=DataBook)
    outbox: Outbox = field(default_factory=Outbox)

    def __post_init__(self) -> None:
        self.phases = Phases(self.plan.phases)
        self.links = Links(self.plan.run.exchange_timeout_s)
        self.progress.moved_at = self.gathering.since = self.tenure.began_at = self.now
        if self.roster.generation is not None and not self.life.state.ends:
            self.life = Life(LifeState.TRAINING, self.now)
        elif self.life.state is LifeState.GATHERING and self.suffices(len(self.roster.members)):
            self.life = Life(LifeState.WELCOMING, self.now)
        self.outbox.shown = self.shown
        self.count_in(Changes())

    def count_in(self, changes: Changes) -> None:
        """Let all parts of the state count their changes in one place."""
        self.tenure.changes = self.gathering.changes = self.life.changes = self.roster.changes = changes
        self.links.changes = self.links.ways.changes = self.calls.changes = self.data.changes = changes
        self.book.changes = self.phases.changes = changes

    @property
    def changes(self) -> int:
        """Number of changes that the journal must have before the answers leave."""
        return self.roster.changes.count

    @property
    def stopping(self) -> Reason:
        """Why the run ends; none until then."""
        return self.life.reason

    @property
    def failed(self) -> Reason:
        """Why it ends without what it has learned; usually none."""
        return self.life.reason if self.life.failed else NO_REASON

    @property
    def closed(self) -> bool:
        """Whether every request is answered with the end."""
        return self.life.closed

    @property
    def over(self) -> bool:
        """Whether the run waits for nobody any more."""
        return self.life.state is LifeState.OVER

    @property
    def in_vain(self) -> bool:
        """Whether the run has ended without a consensus because its rounds kept failing."""
        return self.closed and self.book.hopeless

    def learned(self, gone: Container[int] = ()) -> int:
        """Return how many iterations count when two parts of the run meet: 0 if no worker with the model is here.

        -1: that is not known yet, because this server has just begun, or was frozen.

        Args:
            gone: nodes that follow the other part's server; late words of their workers may have come all the same.
        """
        holders = (m for m in self.roster.holders() if m.join.node not in gone)
        here = (m for m in holders if m.spent and self.now - m.heard_at < HERE_S)
        if any(here):
            return self.ledger.count
        return -1 if self.now - self.tenure.began_at < HERE_S else 0

    @property
    def patience_s(self) -> float:
        """How long others wait for a worker, in seconds; infinite: for ever."""
        return self.plan.run.patience_s or math.inf

    @property
    def silence_s(self) -> float:
        """After how long without a word a worker counts as silent, in seconds."""
        return min(SILENCE_S, self.plan.run.lease_s)

    @property
    def missed_s(self) -> float:
        """The same for a worker that all others wait for, if that costs more than the worker brings."""
        return self.silence_s / 2

    def is_silent(self, member: Member) -> bool:
        """Whether a worker is probably gone: its heartbeats are missing, or its node's connection has closed."""
        if member.state is MemberState.SILENT:
            return True
        closed_at = self.roster.closed_at.get(member.join.node, -math.inf)
        is_closed = member.heard_at <= closed_at < self.now - CLOSED_S
        return is_closed or self.now - member.heard_at > self.silence_s

    @property
    def limit(self) -> float:
        """How many iterations the run makes; infinite: as many as its time allows."""
        return self.plan.run.iterations or math.inf

    @property
    def has_end(self) -> bool:
        """Whether the plan ends the run, or the scripts' own loops do."""
        return self.plan.run.has_end or bool(self._own_loops())

    @property
    def expected(self) -> int:
        """How many iterations the run makes, by its plan or by the scripts' own loops; 0: nobody knows."""
        if self.plan.run.iterations or not (own := self._own_loops()):
            return self.plan.run.iterations
        return self.ledger.count + sum(m.steps_left for m in own)

    @property
    def wanted(self) -> int:
        """Number of workers that the run begins with, as far as the nodes have announced it."""
        return self.plan.run.workers or sum(self.gathering.announced.values())

    @property
    def shown(self) -> str:
        """``waiting`` (for workers), ``running``, ``stopping`` or ``over``."""
        return self.life.state.shown

    def suffices(self, workers: int) -> bool:
        """Whether the run can begin with this many workers."""
        run = self.plan.run
        return workers >= self.wanted and (run.workers > 0 or len(self.gathering.announced) >= run.nodes)

    @property
    def leads(self) -> bool:
        """Whether other workers use what the elected worker has."""
        return self.plan.run.leads(self.phases.algorithm)

    def share(self, now: float) -> float:
        """Return the completed share of the run, 0 to 1; 0 for one without an end."""
        run = self.plan.run
        by_count = (
            self.ledger.count / run.iterations
            if run.iterations
            else self.progress.share_of(self._own_loops, len(self.roster.members), now)
        )
        return min(1.0, max(by_count, self._share_of_time(now)))

    def steps(self, members: int) -> float:
        """Return how many iterations each of ``members`` makes in the whole run, about; infinite if it has no end.

        A run that ends by time makes them at the rate that it has had since it began, or was resumed.
        """
        own = [m.asked.steps for m in self._own_loops()]
        by_count = fmean(own) if own and not self.plan.run.iterations else self.limit / members
        passed, made = self._share_of_time(self.now), self.ledger.count - self.ledger.base
        return min(by_count, made / members / passed) if passed else by_count

    def _own_loops(self) -> list[Member]:
        """Return the members whose scripts have loops of their own; once all have left, those that had."""
        here = [m for m in self.roster.members.values() if m.asked.steps]
        return here if here or self.roster.members else [m for m in self.roster.left.values() if m.asked.steps]

    def _share_of_time(self, now: float) -> float:
        return min(1.0, self.progress.elapsed_s(now) / self.plan.run.seconds) if self.plan.run.seconds else 0.0

    def note(self, event: Reason) -> None:
        """Add an event to the log, and count it."""
        self.outbox.decision.notes.append(event)
        self.happened(Note(event.code, str(event)))
        self.outbox.events[event.code] += 1

    def decided(self) -> Decision:
        """Return what has been decided since the last call of this, with what has happened, for the stream."""
        if self.roster.happened or self.over:
            self.outbox.said = UNSAID
            if self.shown != self.outbox.shown:
                self.outbox.shown, reason = self.shown, self.stopping or self.joined()
                self.happened(RunChanged(self.shown, reason.code, str(reason)))
            self.outbox.decision.happened, self.roster.happened = self.roster.happened, []
        decision, self.outbox.decision = self.outbox.decision, Decision()
        return decision

    def happened(self, fact: Happening) -> None:
        """Add a fact to the stream of events."""
        self.roster.happened.append(fact)

    def answer_to(self, asked: Join | Request | Pause, message: Downward) -> None:
        """Send a message to a process that is not a member."""
        self.outbox.decision.answers.append((asked.worker, asked.incarnation, message))

    def answer(self, member: Member, message: Downward) -> None:
        """Send a message to a member."""
        self.outbox.decision.answers.append((member.worker, member.join.incarnation, message))

    def joined(self, *, names: bool = False) -> Reason:
        """Say how many workers have joined, and who is missing with ``names``; once it runs, how many there are."""
        run, here, nodes = self.plan.run, len(self.roster.members), len(self.gathering.announced)
        if self.roster.generation is not None:
            here = sum(not (m.leaving or m.state is MemberState.ENDED) for m in self.roster.members.values())
            return Why.STARTED(here=here, are="s are" if here != 1 else " is")
        missing = self.gathering.missing(run, self.roster.members) if names else ""
        if not run.workers and nodes < run.nodes:
            words = {"workers": number_of(here, "worker"), "nodes": nodes, "wanted": run.nodes}
            return Why.JOINING_NODES(**words, missing=missing)
        return Why.JOINING(here=here, wanted=max(here, self.wanted), missing=missing)

    def all_made(self, out: list[Member]) -> Reason:
        """Say that no iteration is left to grant: the members in ``out`` still have the last ones."""
        count, limit = self.ledger.count, self.limit
        if count < limit:
            return Why.REST_IS_OUT(count=count, limit=limit, who=named(out))
        return (Why.ALL_MADE if self.roster.generation else Why.ALL_MADE_BEFORE)(limit=limit)
