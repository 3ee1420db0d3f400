"""The state of a run as JSON: for ``lsgd status``, and in the files of its folder, which the global server writes."""

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Reversible
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from lsgd.means import finite, mean_of_finite
from lsgd.output import append, write_whole
from lsgd.protocol.events import RoundOrdered, RunProgress, Summary, WorkerProgress
from lsgd.protocol.messages import MAX_LOGGED, MAX_LOGGED_NAME, MAX_NBYTES, MAX_OWN, Heartbeat
from lsgd.run_folder import METRICS, RESULT
from lsgd.server.next_step import waits_for
from lsgd.server.roster import Member, Roster, by_place
from lsgd.server.state import RunState

MAX_LEADERS = 1000
"""Most rounds of the history in a report; of a longer history, it has every second, third, ... round."""

MAX_PROGRESS_WORKERS = 4096
"""Most workers in a :class:`RunProgress`: more would not fit into a message."""


def report(state: RunState, now: float, stream: Mapping[str, Any] | None = None) -> str:
    """Return the run's state and its last rounds; docs/guides/monitoring.md describes the keys.

    ``stream``: the ``epoch`` of the stream of events, and the number of its ``last`` one, which this report includes.
    """
    elections = list(state.book.elections)
    step = -(-len(elections) // MAX_LEADERS) or 1
    leaders = [entry(election) for election in elections[::-step][::-1]]
    whole = document(state, now) | {"leaders": leaders, "stream": dict(stream or {})}
    text = json.dumps(whole)
    if len(text) > MAX_NBYTES * 3 // 4:  # thousands of workers: drop the history's losses first
        text = json.dumps(whole | {"leaders": [leader | {"losses": {}} for leader in leaders]})
    return text


def document(state: RunState, now: float) -> dict[str, Any]:
    """Return the run's state without its rounds."""
    roster = state.roster
    return {
        **asdict(summary(state, now)),
        "ways": state.links.ways.shown(),
        "events": state.outbox.events,
        "members": [_line(roster, m, now) for m in sorted((roster.left | roster.members).values(), key=by_place)],
    }


def summary(state: RunState, now: float) -> Summary:
    """Return the run's state as a whole."""
    roster, book, phases = state.roster, state.book, state.phases
    reason = state.stopping or waits_for(state, now)
    return Summary(
        run=state.run,
        state=state.shown,
        code=reason.code,
        reason=str(reason),
        algorithm=phases.algorithm.name,
        period=phases.schedule.period,
        delay=phases.schedule.delay,
        period_reason=str(phases.why),
        count=state.ledger.count,
        iterations=state.expected,
        progress=state.share(now),
        participation=book.participation,
        loss=_loss(book.elections),
        seconds=state.progress.elapsed_s(now),
        rounds_local=book.ordered["local"],
        rounds_global=book.ordered["global"],
        term=state.tenure.term.number,
        served_by=state.tenure.term.node,
        generation=roster.generation.number if roster.generation else 0,
        nodes=len(roster.queues),
    )


def progress(state: RunState, now: float, departed: Collection[str] = ()) -> RunProgress:
    """Return how far the run is; ``departed``: workers to include although they have left."""
    roster = state.roster
    gone = [m for name, m in roster.left.items() if name in departed and name not in roster.members]
    members = sorted([*roster.members.values(), *gone], key=by_place)[:MAX_PROGRESS_WORKERS]
    workers = tuple(_progress_of(roster, member, now) for member in members)
    return RunProgress(summary(state, now), workers, _logged(members))


def _logged(members: Iterable[Member]) -> dict[str, float]:
    """Return the means of what the live members' scripts logged: over finite numbers, of a bounded set of names."""
    numbers: dict[str, list[float]] = {}
    for spent in (member.spent for member in members if member.live and member.spent):
        for name, number in islice(spent.logged.items(), MAX_LOGGED + MAX_OWN):
            known = name in numbers or (len(numbers) < MAX_LOGGED + MAX_OWN and len(name) <= MAX_LOGGED_NAME)
            if known and math.isfinite(number):
                numbers.setdefault(name, []).append(number)
    return {name: mean for name in sorted(numbers) if (mean := mean_of_finite(numbers[name])) is not None}


def _progress_of(roster: Roster, member: Member, now: float) -> WorkerProgress:
    spent = member.spent or Heartbeat(member.worker, 0)
    rank, state, done = _standing(roster, member)
    return WorkerProgress(
        worker=member.worker,
        rank=rank,
        state=state,
        done=done,
        loss=finite(member.asked.loss),
        heard_s=now - member.heard_at,
        compute_s=_total_s(spent.compute_s),
        waiting_s=_total_s(spent.waiting_s),
        exchange_s=_total_s(spent.exchange_s),
        sent_nbytes=max(0, spent.sent_nbytes),
        received_nbytes=max(0, spent.received_nbytes),
    )


def _total_s(seconds: float) -> float:
    """Return a total that a worker reported; 0 if it is nonsense."""
    return seconds if 0 <= seconds < math.inf else 0.0


def _standing(roster: Roster, member: Member) -> tuple[int, str, int]:
    """Return a worker's rank, its state, and the iterations that all its processes have completed."""
    made = roster.made.get(member.worker, 0)
    if roster.members.get(member.worker) is not member:
        return -1, "left", made
    return member.rank, member.state.shown, made + member.done


def _line(roster: Roster, member: Member, now: float) -> dict[str, Any]:
    rank, state, done = _standing(roster, member)
    return {
        "worker": member.worker,
        "node": member.join.node,
        "rank": rank,
        "state": state,
        "reason": member.left,
        "code": member.left.code,
        "done": done,
        "loss": finite(member.asked.loss),
        "times_leader": member.record.times_leader,
        "heard_s_ago": round(now - member.heard_at, 3),
    }


def entry(election: RoundOrdered) -> dict[str, Any]:
    """Return a round of the history."""
    finites = {
        name: {key: finite(number) for key, number in getattr(election, name).items()} for name in ("losses", "means")
    }
    return {**asdict(election), **finites}


def _loss(elections: Reversible[RoundOrdered]) -> float | None:
    """Return the mean loss of the workers of the last global round, as reported then; None: it is not finite."""
    last = next((e for e in reversed(elections) if e.scope == "global"), None)
    return mean_of_finite(last.losses.values()) if last else None


RESULT_EVERY_S = 5.0
"""How often the state is written during the run, in seconds."""

RETRY_EVERY_S = 5.0
"""How long a failed write is not repeated, in seconds."""

_TAIL_NBYTES = 1 << 16  # holds several lines, whatever their number of losses


class Record:
    """Writes the rounds and the state of a run to files; a failure never ends the run.

    Each round is one line, written once: a restarted server rewrites a line that its predecessor left incomplete. A
    resumed run's lines follow those of the run before it.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._metrics, self._result = folder / METRICS, folder / RESULT
        self._run = run
        self._round: int | None = None  # id of the last one in the file; None: not read yet
        self._started = self._started_before() or datetime.now().astimezone().isoformat(timespec="seconds")
        self._written_at = -math.inf
        self._retry_at = 0.0  # when to try again to write; 0: the last write succeeded

    def keep(self, state: RunState, now: float, *, last: bool = False) -> str:
        """Write new rounds, and the state if it is due or this is the last call.

        Returns:
            A line for the log if writing has begun to fail or works again, else an empty text.
        """
        if now < self._retry_at and not last:
            return ""
        failing = self._retry_at > 0
        try:
            self._append(state)
            if last or now - self._written_at >= RESULT_EVERY_S:
                self._write(document(state, now))
                self._written_at = now
        except OSError as error:
            self._retry_at = now + RETRY_EVERY_S
            where = f"{self._metrics} and {RESULT} cannot be written: {error.strerror}"
            return "" if failing else f"{where}; the run continues, and the server tries again: free space there"
        self._retry_at = 0.0
        return f"{self._metrics} is written again" if failing else ""

    def _append(self, state: RunState) -> None:
        if self._round is None:
            self._round = self._mend()
        last = self._round
        new = list(takewhile(lambda election: election.round > last, reversed(state.book.elections)))
        if new:
            with self._metrics.open("ab", buffering=0) as file:
                append(file.fileno(), "".join(f"{self._line(election)}\n" for election in reversed(new)).encode())
            self._round = new[0].round

    def _line(self, election: RoundOrdered) -> str:
        """Return a round as JSON, with numbers rounded."""
        round_ = entry(election)
        for name in ("losses", "means"):
            round_[name] = {w: None if loss is None else float(f"{loss:.6g}") for w, loss in round_[name].items()}
        return json.dumps({"run": self._run, **round_, "seconds": round(election.seconds, 3)})

    def _write(self, document: dict[str, Any]) -> None:
        write_whole(self._result, json.dumps({**document, "started": self._started}, indent=2) + "\n")

    def _mend(self) -> int:
        """Cut off the incomplete line of a server that died; return the id of this run's last round in the file."""
        self._metrics.parent.mkdir(parents=True, exist_ok=True)
        with self._metrics.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - _TAIL_NBYTES))
            lines = file.read().splitlines(keepends=True)
            while lines:
                with suppress(ValueError, KeyError, TypeError):
                    line = json.loads(lines[-1])
                    if lines[-1].endswith(b"\n"):
                        return int(line["round"]) if line["run"] == self._run else 0
                lines.pop()
                os.ftruncate(file.fileno(), start + sum(map(len, lines)))
        return 0

    def _started_before(self) -> str:
        """Return when the run started that this server continues; an empty text for a new run."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads(self._result.read_text(encoding="utf-8"))
            return str(before["started"]) if before["run"] == self._run else ""
        return ""
