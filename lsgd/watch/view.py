"""The state and history of a run for display, from a report and the events after it."""

import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from lsgd.protocol.events import (
    AGREEMENT,
    Event,
    GenerationBegan,
    Note,
    RoundCompleted,
    RoundFailed,
    RoundOrdered,
    RunChanged,
    RunProgress,
    SettingsChanged,
    Summary,
    WorkerChanged,
    WorkerJoined,
    WorkerProgress,
)
from lsgd.watch.history import GOES_BACK, Counters, Series
from lsgd.watch.reader import Batch

MAX_POINTS, MAX_ROUNDS, MAX_LINES, MAX_GAPS, MAX_TURNS = 512, 2048, 1000, 100, 3
"""How many points of a worker's curve, rounds, log lines, gaps of a worker, and turns of the run to keep."""

RATE_OVER_S, PACE_OVER_S = 30.0, 600.0
"""Over what time the rate is taken, and how much of the run's course is kept for the time that is left."""

NAMES = tuple(each.name for each in fields(Summary))
"""What a report, an event and a view say of a run as a whole."""

TAKES_PART = ("live", "held")
"""States of workers that rounds wait for."""

HELD_OUT = re.compile(r"loss|^(val|valid|validation|test|eval|dev|held_?out)$")
"""Names of numbers that scripts average (``worker.mean``), by which they are taken for losses on held-out data."""


class Line(NamedTuple):
    """A line of the log; ``time`` is in seconds since the epoch, and ``code`` may be empty."""

    time: float
    code: str
    words: str


class Totals(NamedTuple):
    """A worker's totals up to a moment, over all its processes. Subtract two to get an interval.

    ``time`` is in seconds since the epoch; for the rest see :class:`lsgd.protocol.events.WorkerProgress`.
    """

    time: float
    done: int
    loss: float | None
    compute_s: float
    waiting_s: float
    exchange_s: float
    sent_nbytes: int
    received_nbytes: int


@dataclass(slots=True)
class Gap:
    """A time in which rounds did not wait for a worker.

    Args:
        state: ``straggler``, ``cut``, ``away`` or ``left``.
        begin, end: times in seconds since the epoch; ``end`` is None while the gap lasts.
    """

    state: str
    code: str
    reason: str
    begin: float
    end: float | None = None


@dataclass(slots=True)
class WorkerView:
    """A worker, as of the last event.

    Args:
        rank: rank in the generation; -1: outside it.
        state: ``held``, ``live``, ``straggler``, ``cut``, ``away`` or ``left``.
        code, reason: reason for its state, if known, as a code and as text.
        done: number of iterations it has completed.
        heard_s: seconds since its last message, at the last progress.
        totals: curve of about one point a second at first, of at most :data:`MAX_POINTS`.
    """

    worker: str
    node: int = 0
    rank: int = -1
    state: str = "away"
    code: str = ""
    reason: str = ""
    done: int = 0
    loss: float | None = None
    times_leader: int = 0
    heard_s: float = 0.0
    totals: Series[Totals] = field(default_factory=lambda: Series(MAX_POINTS))
    gaps: deque[Gap] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))
    _before: tuple[float, float, float, int, int] = (0.0, 0.0, 0.0, 0, 0)  # totals of its earlier processes

    @property
    def lost_its_loss(self) -> bool:
        """Whether it takes part, and has made something since its last finite loss without another one."""
        last = next((total for total in reversed([*self.totals]) if total.loss is not None), None)
        return self.loss is None and self.state in TAKES_PART and last is not None and last.done < self.done

    def add(self, time: float, now: WorkerProgress) -> None:
        """Add a point to its curve; falling totals mean that a new process replaced the last."""
        spent = (now.compute_s, now.waiting_s, now.exchange_s, now.sent_nbytes, now.received_nbytes)
        before = self.totals.last
        if before is not None and not any(spent):  # this server has not heard its totals yet
            self.totals.add(before._replace(time=time, done=now.done, loss=now.loss))
            return
        if before is not None and any(b + s < t for b, s, t in zip(self._before, spent, before[3:], strict=True)):
            self._before = before[3:]
        sums = (b + s for b, s in zip(self._before, spent, strict=True))
        self.totals.add(Totals._make((time, now.done, now.loss, *sums)))

    def mind(self, time: float, state: str, code: str, reason: str) -> None:
        """Begin or end a gap."""
        last = self.gaps[-1] if self.gaps and self.gaps[-1].end is None else None
        if last is not None and last.state != state:
            last.end = time
        if state not in TAKES_PART and (last is None or last.state != state):
            self.gaps.append(Gap(state, code, reason, time))


@dataclass(slots=True)
class RoundView:
    """A round.

    Args:
        scope: ``local`` or ``global``. node: of a local round; -1: the round is global.
        count: number of the run's iterations when it was ordered.
        seconds: time from the run's first round to its order.
        losses: losses when it was ordered, by worker.
        means: what scripts have averaged since the round before, by name.
        state: ``open``, ``completed`` or ``failed``; stays ``open`` if its end is unknown.
        took_s: time from its order to its completion; None: unknown.
        sent_nbytes: bytes that its members sent; None: unknown.
        time: when it was ordered, in seconds since the epoch; None: unknown.
    """

    round: int
    scope: str
    leader: str
    count: int
    seconds: float
    losses: Mapping[str, float | None]
    state: str = "open"
    reason: str = ""
    took_s: float | None = None
    sent_nbytes: int | None = None
    time: float | None = None
    node: int = -1
    means: Mapping[str, float | None] = field(default_factory=dict)

    def could_have(self, worker: str) -> bool:
        """Whether a worker could have been in it."""
        return self.node in (-1, node_and_index(worker)[0])


class Rounds(Series[RoundView]):
    """The history of a run's rounds. The last ones are known by their number, in case their end is yet to come."""

    def __init__(self) -> None:
        super().__init__(MAX_ROUNDS)
        self._recent: dict[int, RoundView] = {}
        self._untimed: list[RoundView] = []  # rounds that are known from a report

    def order(self, order: RoundOrdered, time: float | None = None) -> None:
        """Add a round, unless it is known; ``time``: None if a report has it."""
        if order.round <= next(reversed(self._recent), 0):
            return
        view = round_of(order, time)
        self.add(view)
        if time is None:
            self._untimed.append(view)
        self._recent[order.round] = view
        if len(self._recent) > MAX_ROUNDS:
            del self._recent[next(iter(self._recent))]

    def open(self, number: int) -> RoundView | None:
        """Return a round that is open still; a restarted server may report its end twice."""
        known = self._recent.get(number)
        return known if known and known.state == "open" else None

    def date(self, started_at: float) -> None:
        """Give each round without a time the one that follows from when the first was ordered, once and for all."""
        for each in self._untimed:
            each.time = started_at + each.seconds
        self._untimed = []


class Turns:
    """When, and why, a run's length has changed or it has gone back.

    Attributes:
        causes: what may be one, since the last look.
        lines: the last turns.
    """

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.lines: deque[Line] = deque(maxlen=MAX_TURNS)
        self._length = (0, 0)  # iterations made at the last look, and in all

    def look(self, time: float, run: Summary) -> None:
        """Note if the run has become longer or shorter, or has gone back, for a reason that is known."""
        before, self._length = self._length, (run.count, run.iterations)
        causes, self.causes = ", ".join(self.causes), []
        if not causes or run.state != "running":
            return
        if run.count < before[0]:
            self.lines.append(Line(time, "back", f"back from {before[0]} to {run.count} iterations: {causes}"))
        elif 0 < run.iterations != before[1] > 0:
            words = f"{run.iterations} iterations in all instead of {before[1]}: {causes}"
            self.lines.append(Line(time, "length", words))


class RunView:
    """The state and history of a run. Only :meth:`apply` changes it, and it does no I/O.

    The history is bounded, to :data:`MAX_ROUNDS` rounds for example; a full history keeps every second point.

    Args:
        report: content of ``lsgd status --json`` or ``result.json``; None: it comes with the first batch.

    Attributes:
        now: the run as a whole; its ``run`` is empty before the first report.
        workers: workers by name, in the order of node and index, including those that have left.
        ways: pairs of nodes that do not simply dial each other, as in the report.
        logged: numbers that scripts log, by name: the mean over the live workers that have one.
        agreements: iterations of the run, and how far the workers' changes agreed then in each layer, by its name.
        settings: settings that operators have changed since this view began, by name.
        turns: when, and why, the run's length changed or it went back.
        lost: total number of lost events.
        time: time of the last event, in seconds since the epoch by the server's clock; 0: no event yet.
    """

    def __init__(self, report: Mapping[str, Any] | None = None) -> None:
        self.now = Summary()
        self.lost, self.time = 0, 0.0
        self.ways: list[dict[str, Any]] = []
        self.workers: dict[str, WorkerView] = {}
        self.rounds = Rounds()
        self.log: deque[Line] = deque(maxlen=MAX_LINES)
        self.settings: dict[str, str] = {}
        self.turns = Turns()
        self.logged: dict[str, float] = {}
        self.agreements: Series[tuple[int, dict[str, float]]] = Series(MAX_POINTS)
        self.counters = Counters()
        self.connected = False
        self._as_of = 0  # the report includes the events up to this one
        self._progress: deque[tuple[float, int, float]] = deque()  # time, count and share of the last seconds
        if report is not None:
            self._begin(report)

    def apply(self, batch: Batch) -> None:
        """Apply a reader's batch."""
        for _ in self.taken(batch):
            pass

    def taken(self, batch: Batch) -> Iterator[Event]:
        """Apply a reader's batch, and yield each event once it is applied."""
        if batch.report is not None:
            self._begin(batch.report)
        self.connected = batch.connected
        self.lost += batch.lost
        self.counters.restarts += batch.restarted
        for event in batch.events:
            self.fold(event)
            yield event

    @property
    def elects(self) -> bool:
        """Whether workers have taken over what an elected leader has: otherwise nobody counts as one."""
        return any(worker.times_leader for worker in self.workers.values())

    @property
    def rate(self) -> float | None:
        """Iterations a second over the last :data:`RATE_OVER_S`; None until there are two points."""
        return self._slope(1, RATE_OVER_S)

    @property
    def left_s(self) -> float | None:
        """Seconds left; None: unknown, or nothing has moved for :data:`RATE_OVER_S`.

        The pace is that of the last half of the known time: the first steps are slow, and a round may take longer than
        the time over which the rate is taken.
        """
        if self.now.state == "over":
            return 0.0
        known_s = self._progress[-1][0] - self._progress[0][0] if self._progress else 0.0
        pace = self._slope(2, RATE_OVER_S) and self._slope(2, max(RATE_OVER_S, known_s / 2))
        return (1 - self.now.progress) / pace if pace and pace > 0 else None

    @property
    def made(self) -> int:
        """Iterations since the run began or was resumed, as its seconds and the bytes count from there."""
        return sum(worker.done for worker in self.workers.values())

    def _slope(self, of: int, over_s: float) -> float | None:
        if len(self._progress) < 2:
            return None
        *before, last = self._progress
        first = next((point for point in before if last[0] - point[0] <= over_s), before[-1])
        return (last[of] - first[of]) / (last[0] - first[0])

    # -- a report ----------------------------------------------------------------------------------------------

    def _begin(self, report: Mapping[str, Any]) -> None:
        """Take the state and new rounds from a report; reset for another run."""
        if self.now.run and self.now.run != report["run"]:
            RunView.__init__(self)
        self.now = replace(self.now, **{name: report[name] for name in NAMES if name in report})
        self.ways = report.get("ways", [])
        self._as_of = report.get("stream", {}).get("last", 0)
        self.counters.made(self.now.count)
        for member in report.get("members", []):
            worker = self._worker(member["worker"], member["node"])
            worker.rank, worker.state = member["rank"], member["state"]
            worker.reason, worker.code = member["reason"], member["code"]
            worker.done, worker.loss = member["done"], member["loss"]
            worker.times_leader, worker.heard_s = member["times_leader"], member["heard_s_ago"]
        for entry in report.get("leaders", []):
            self.rounds.order(RoundOrdered(**entry))

    # -- events ------------------------------------------------------------------------------------------------

    def fold(self, event: Event) -> None:
        """Apply one event; if the report includes it already, only to the history."""
        self.time = max(self.time, event.time)
        self.counters.fold(event.what)
        is_new = event.seq > self._as_of
        self._remember(event.time, event.what, is_new=is_new)
        if is_new:
            self._change(event.what)

    def _remember(self, time: float, what: object, *, is_new: bool) -> None:
        match what:
            case Note(code, words):
                self.log.append(Line(time, code, words))
                self.turns.causes += [words] * (code in GOES_BACK)
            case RoundOrdered():
                self.rounds.order(what, time if is_new else None)
            case RoundCompleted(number, took_s, sent_nbytes) if known := self.rounds.open(number):
                known.state, known.took_s, known.sent_nbytes = "completed", took_s, sent_nbytes
                if took_s is not None:
                    self.counters.took[known.scope].add(took_s)
            case RoundFailed(number, code, reason) if known := self.rounds.open(number):
                known.state, known.reason = "failed", reason
                self.counters.fail(code)
            case WorkerJoined(name, node):
                self._worker(name, node).mind(time, "live", "", "")
                self.turns.causes.append(f"{name} joined")
            case WorkerChanged(name, state, code, reason):
                self._worker(name).mind(time, state, code, reason)
                self.turns.causes += [f"{name} left: {reason}"] * (state == "left")
            case SettingsChanged(changes):
                self.settings.update(changes)
                self.turns.causes += [f"{name} was set to {changes[name]}" for name in changes if name == "iterations"]
            case RunProgress():
                for each in what.workers:
                    worker = self._worker(each.worker)
                    worker.add(time, each)
                    if each.state in TAKES_PART:
                        worker.mind(time, each.state, "", "")
                run = what.run
                self.turns.look(time, run)
                self._agree(run.count, what.logged)
                if run.seconds:
                    self.rounds.date(time - run.seconds)
                # Back to a checkpoint, or the server's clock was set back.
                back = self._progress and (run.count < self._progress[-1][1] or time <= self._progress[-1][0])
                if back or run.state == "waiting":
                    self._progress.clear()
                elif self._progress and not any(self._progress[-1][1:]):  # until then there was no pace
                    self._progress = deque([self._progress[-1]])
                self._progress.append((time, run.count, run.progress))
                while len(self._progress) > 2 and time - self._progress[0][0] > PACE_OVER_S:
                    self._progress.popleft()

    def _agree(self, count: int, logged: Mapping[str, float]) -> None:
        """Keep how far the workers agree in each layer, if a round has changed that."""
        before = f"{AGREEMENT}/"
        now = {name.removeprefix(before): x for name, x in logged.items() if name.startswith(before)}
        if now and (self.agreements.last is None or self.agreements.last[1] != now):
            self.agreements.add((count, now))

    def _change(self, what: object) -> None:
        match what:
            case RoundOrdered() if what.worker:
                self._worker(what.worker).times_leader += 1
            case WorkerJoined(name, node):
                worker = self._worker(name, node)
                worker.state, worker.code, worker.reason = "away", "", ""
            case WorkerChanged(name, state, code, reason):
                worker = self._worker(name)
                worker.state, worker.code, worker.reason = state, code, reason
                if state == "left":
                    worker.rank = -1
            case GenerationBegan(generation):
                ranks = {name: rank for rank, name in enumerate(generation.members)}
                for name, worker in self.workers.items():
                    worker.rank = ranks.get(name, -1)
            case RunChanged(state, code, reason):
                self.now = replace(self.now, state=state, code=code, reason=reason)
            case RunProgress():
                self.now, self.logged = what.run, what.logged
                for each in what.workers:
                    worker = self._worker(each.worker)
                    worker.rank, worker.state, worker.done = each.rank, each.state, each.done
                    worker.loss, worker.heard_s = each.loss, each.heard_s

    def _worker(self, name: str, node: int | None = None) -> WorkerView:
        if name not in self.workers:
            self.workers[name] = WorkerView(name, node_and_index(name)[0] if node is None else node)
            self.workers = dict(sorted(self.workers.items(), key=lambda item: node_and_index(item[0])))
        return self.workers[name]


def round_of(order: RoundOrdered, time: float | None = None) -> RoundView:
    """Return a round as it was ordered."""
    losses = {sys.intern(name): loss for name, loss in order.losses.items()}  # the same names each time
    facts = order.round, order.scope, order.worker, order.count, order.seconds, losses
    return RoundView(*facts, time=time, node=order.node, means=order.means)


def node_and_index(name: str) -> tuple[int, int]:
    """Return node and index from a worker's name, ``node0/worker1``, as a sort key."""
    found = re.fullmatch(r"node(\d+)/worker(\d+)", name)
    return (int(found[1]), int(found[2])) if found else (0, 0)
