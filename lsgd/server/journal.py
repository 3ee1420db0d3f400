"""The journal: a small SQLite file from which a restarted global server continues its run.

The state has rounds, generations and members, with what each has reported so far; of grants only those of evicted
members, and no tokens. So a restored run has nothing to grant until all live members have asked and so reported what
they did meanwhile. Then no grant is outstanding, the count is exact, and a global round follows. Members that ask again
for an open round get the same answer.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError, ProtocolError
from lsgd.means import finite
from lsgd.plan.plan import Plan, algorithm_of, table_of
from lsgd.protocol.events import RoundOrdered
from lsgd.protocol.fields import build, values_of
from lsgd.protocol.messages import Generation, Go, Join, Round, Stop, Term
from lsgd.server.calls import Calls
from lsgd.server.changes import Changes
from lsgd.server.daemon import tell
from lsgd.server.data import DataBook
from lsgd.server.ledger import Account, Ledger
from lsgd.server.life import Life
from lsgd.server.links import Ways
from lsgd.server.phases import Pace, Stretch
from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import Asked, Entry, Has, Member, MemberState, OpenRound, Record, Roster
from lsgd.server.rounds import MAX_ELECTIONS, RoundBook
from lsgd.server.state import Gathering, Progress, RunState
from lsgd.server.tenure import Tenure

LOCK_WAIT_S = 2.0
"""How long a server waits for another one that still locks the file, and may be about to end."""

KEEP_EVERY_S = 1.0
"""How often the journal is written if only counts have changed, in seconds."""

RETRY_EVERY_S = 5.0
"""How long a failed write is not repeated, in seconds."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, document TEXT, digest TEXT)",
    "CREATE TABLE IF NOT EXISTS rounds (id INTEGER PRIMARY KEY, document TEXT)",
)


_MARK, _WAL = "-last", "-wal"
_NO_STATE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, ProtocolError)
"""What data raises that holds no state of a run."""


class Journal:
    """Keeps the last state of a run and its rounds, each write durable before it returns.

    The file belongs to one server at a time. It is created if it does not exist, or was deleted meanwhile. SQLite drops
    a damaged end of its write-ahead log without a word, so a small file beside it says how far the journal goes.

    Attributes:
        resumed: whether :meth:`load` has found a run.

    Raises:
        ConfigError: the file cannot be used, is not a journal, or is another server's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resumed = False
        self._kept = 0  # id of the last round in the file
        self._version = (-1, -1)  # changes and count of the state in the file
        self._kept_at = 0.0
        self._retry_at = 0.0  # when to try again to write; 0: the last write succeeded
        try:
            self._connect()
        except sqlite3.Error as error:
            raise ConfigError(_unusable(path, error)) from None

    def _connect(self) -> None:
        self._connection = sqlite3.connect(self.path, timeout=LOCK_WAIT_S, isolation_level=None)
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
                self._connection.execute(f"PRAGMA {pragma}").fetchall()
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")  # takes the lock, which is kept from here on
                for table in _TABLES:
                    self._connection.execute(table)
        except sqlite3.Error:
            self._connection.close()
            raise
        self._file = self._there()

    def load(self) -> tuple[dict[str, Any], list[RoundOrdered]] | None:
        """Return the state of an unfinished run and its last rounds; None if there is none.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            found = self._connection.execute("SELECT document, digest FROM state WHERE id = 1").fetchone()
            if found is None:
                self._check_end({})
                return None
            document, digest = found
            if _digest(document) != digest:
                raise ValueError("the state does not fit its digest")
            state = dict(json.loads(document))
            self._check_end(state)
            rows = self._connection.execute(
                "SELECT document FROM rounds ORDER BY id DESC LIMIT ?", (MAX_ELECTIONS,)
            ).fetchall()
            elections = [RoundOrdered(**json.loads(document)) for (document,) in reversed(rows)]
        except (sqlite3.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(_damaged(self.path, error)) from None
        self._kept = elections[-1].round if elections else 0
        self.resumed = True
        return state, elections

    def keep(self, state: RunState, now: float, captured: Callable[[], dict[str, Any]]) -> str:
        """Write the state if it has to be there before answers leave; counts alone now and then.

        ``captured`` returns what :func:`capture` does.

        Returns:
            A line for the log if writing has begun to fail or works again, else an empty text.
        """
        version = (state.changes, state.ledger.count)
        due = version[0] != self._version[0] or (version != self._version and now - self._kept_at > KEEP_EVERY_S)
        if not due or now < self._retry_at:
            return ""
        failing = self._retry_at > 0
        try:
            self.save(captured(), list(state.book.elections))
        except (sqlite3.Error, OSError) as error:
            self.remove()
            self._retry_at = now + RETRY_EVERY_S
            trouble = (
                f"the journal {self.path} cannot be written: {error}; it is removed, and rewritten as soon as "
                f"possible. If this server dies before that, the run cannot continue: free space there"
            )
            return "" if failing else trouble
        self._version, self._kept_at, self._retry_at = version, now, 0.0
        return f"the journal {self.path} is written again" if failing else ""

    def finish(self) -> None:
        """Leave nothing to continue from: the run is over, and all know."""
        try:
            self._beside(_MARK).unlink(missing_ok=True)
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute("DELETE FROM rounds")
                self._connection.execute("DELETE FROM state")
            self.close()
        except (sqlite3.Error, OSError):
            self.remove()

    def save(self, state: dict[str, Any], elections: list[RoundOrdered]) -> None:
        """Write the state, and the rounds that are not in the file yet.

        Raises:
            sqlite3.Error: it cannot be written: the disk is full, say.
        """
        if self._file is None or self._there() != self._file:
            self._connection.close()
            self._connect()
            self._kept = 0
        document = json.dumps(state)
        new = [(e.round, json.dumps(asdict(e))) for e in elections if e.round > self._kept]
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR REPLACE INTO rounds VALUES (?, ?)", new)
            if new:
                self._connection.execute("DELETE FROM rounds WHERE id <= ?", (new[-1][0] - MAX_ELECTIONS,))
            self._connection.execute("INSERT OR REPLACE INTO state VALUES (1, ?, ?)", (document, _digest(document)))
        if new:
            self._kept = new[-1][0]
        with suppress(OSError):  # not synced: after a power failure it says less than the journal has
            self._beside(_MARK).write_text(json.dumps(_end_of(state)))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def remove(self) -> None:
        """Close and delete the file, which is out of date. The next :meth:`save` creates it again."""
        with suppress(sqlite3.Error):
            self._connection.close()
        self._file = None
        for suffix in ("", _WAL, "-shm", _MARK):
            with suppress(OSError):
                self._beside(suffix).unlink()

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _check_end(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the journal had more than this state; a damaged mark says nothing."""
        changes, count = _end_of(state)
        marked = [changes, count]
        with suppress(OSError, ValueError, RecursionError):
            marked = json.loads(self._beside(_MARK).read_text())
        if not (isinstance(marked, list) and len(marked) == 2 and all(type(number) is int for number in marked)):
            return
        if marked > [changes, count]:
            raise ValueError(
                f"it had {marked[0] - changes} more changes, and {marked[1]} iterations instead of {count}: the end of "
                f"{self.path.name}{_WAL} is missing or damaged"
            )

    def _there(self) -> int | None:
        """Return the inode of the file at the path, None if there is none."""
        with suppress(OSError):
            return os.stat(self.path).st_ino
        return None


def _end_of(state: dict[str, Any]) -> list[int]:
    """Return how far a state goes: its changes and its count."""
    return [state.get("changes", -1), state.get("count", 0)]


def _digest(document: str) -> str:
    return hashlib.blake2b(document.encode(), digest_size=8).hexdigest()


def _unusable(path: Path, error: sqlite3.Error) -> str:
    if "locked" in str(error):
        return f"another global server uses the journal {path}; stop it, or give this one another --journal"
    if "malformed" in str(error) or "not a database" in str(error):
        return _damaged(path, error)
    return (
        f"the journal {path} cannot be written: {error}; check its folder, its permissions and the space on the disk, "
        f"or give another --journal"
    )


def _damaged(path: Path, error: Exception) -> str:
    return f"the journal {path} is damaged: {error}; delete {path.name}* to begin a new run, and restart its workers"


def new_run() -> str:
    """Return an identity for a run that no other has."""
    return secrets.token_hex(6)


def open_run(plan: Plan, journal: Journal | None, *, continues: bool = False, run: str = "", node: int = 0) -> RunState:
    """Return the state of a new run, or of the unfinished one that the journal holds.

    Args:
        plan: of a new run.
        journal: what holds an unfinished one.
        continues: whether it must.
        run: identity of a new run; empty: one that no other has.
        node: where it begins.

    Raises:
        ConfigError: the journal cannot be continued, or it holds no run and ``continues`` forbids a new one.
    """
    kept = journal.load() if journal else None
    if continues and journal and kept is None:
        raise ConfigError(
            f"the journal {journal.path} holds no unfinished run to continue (--continue): it was lost, or the run is "
            f"over. Its workers save checkpoints; continue from those with RESUME=1 (lsgd launch --resume)"
        )
    if journal is None or kept is None:
        return RunState(plan, run or new_run(), tenure=Tenure((Term(1, node),)))
    saved, elections = kept
    try:
        state = restore(saved, time.monotonic())
    except ConfigError as error:
        raise ConfigError(
            f"the journal {journal.path} cannot be continued: {error}; use the lsgd that wrote it, or delete "
            f"{journal.path.name}* to begin a new run"
        ) from None
    state.book.elections.extend(elections)
    tell(
        f"continues run {state.run} of the journal {journal.path}, with its plan: "
        f"{state.ledger.count} iterations, {len(state.roster.members)} workers"
    )
    return state


VERSION = 18
"""Version of the format."""

_KEPT = ("committed", "sent_nbytes", "times_leader", "usual")
"""Fields of a member's record that are kept unchanged: the generation that it knows is not."""


def capture(state: RunState, now: float) -> dict[str, Any]:
    """Return the state of a run, for JSON."""
    roster, ledger, book, phases = state.roster, state.ledger, state.book, state.phases
    return {
        "version": VERSION,
        "run": state.run,
        "plan": state.plan.to_json(),
        "life": state.life.to_json(),
        "count": ledger.count,
        "base": ledger.base,
        "unheard": ledger.at_risk(roster.members.values()),
        "rounds": book.ordered,
        "failures": book.failures,
        "final": book.final,
        "averages": book.averages,
        "elapsed_s": None if state.progress.started_at is None else now - state.progress.started_at,
        "phase": phases.number,
        "algorithm": table_of(phases.algorithm),
        "next_algorithm": table_of(phases.next_algorithm),
        "pace": phases.pace.to_json(),
        "why": phases.why.to_json(),
        "generation": None if roster.generation is None else _fields(roster.generation),
        "broken": roster.broken.to_json(),
        "open": [
            {
                "round": _fields(o.round, "generation"),
                "waiting": sorted(m.worker for m in o.waiting),
                "done": [[m.worker, m.join.incarnation, done] for m, done in o.done.items()],
            }
            for o in book.open.values()
        ],
        "members": [_member(m) for m in roster.members.values()],
        "data": state.data.to_json(),
        "left": [_member(m) for m in roster.left.values()],
        "made": roster.made,
        "replaced": roster.replaced,
        "links": state.links.capture(now),
        "ways": state.links.ways.capture(),
        "first": state.gathering.first,
        "servers": sorted(state.gathering.servers.items()),
        "meeting": state.calls.to_json(),
        "terms": [[term.number, term.node] for term in state.tenure.terms],
        "beaten": [[term.number, term.node] for term in state.tenure.beaten],
        "moved": state.tenure.took_over,
        "skipped": book.skipped,
        "known": book.known if state.tenure.took_over else book.next_id - 1,
        "changes": state.changes,
    }


def taken_over(saved: dict[str, Any], terms: Sequence[Term]) -> dict[str, Any]:
    """Return the state from a copy, as the server that takes over continues from it; ``terms``: with its own.

    Rounds may have been ordered that the copy does not have, so the generation is over.

    Raises:
        ConfigError: the copy is not a state.
    """
    state = saved | {"terms": [[term.number, term.node] for term in terms], "moved": True}
    try:
        if saved["generation"] is not None and not saved["broken"][0]:
            state["broken"] = Why.SERVER_MOVED(node=terms[-1].node, before=terms[-2].node).to_json()
    except _NO_STATE as error:
        raise ConfigError(f"it holds no state of a run: {error!r}") from None
    return state


def restore(saved: dict[str, Any], now: float) -> RunState:
    """Return the state that :func:`capture` captured, with no member silent or waiting yet.

    Raises:
        ConfigError: the data has another version, or is not a state.
    """
    if saved.get("version") != VERSION:
        raise ConfigError(f"it is of version {saved.get('version')}, this lsgd reads version {VERSION}")
    try:
        return _state_of(saved, now)
    except _NO_STATE as error:
        raise ConfigError(f"it holds no state of a run: {error!r}") from None


def _state_of(saved: dict[str, Any], now: float) -> RunState:
    generation = Generation(**_of_lists(saved["generation"])) if saved["generation"] else None
    members = {m.worker: m for m in (_member_of(each, now) for each in saved["members"])}
    left = [_member_of(each, now) for each in saved["left"]]
    known = {(m.worker, m.join.incarnation): m for m in (*members.values(), *left)}
    opened = []
    for each in saved["open"]:
        order = Round(**_of_lists(each["round"] | {"generation": generation}))
        done = {known[name, incarnation]: made for name, incarnation, made in each["done"]}
        opened.append(OpenRound(order, {members[name] for name in each["waiting"]}, done))
    state = RunState(
        Plan.from_json(saved["plan"]),
        saved["run"],
        now=now,
        roster=Roster(
            members.values(),
            left,
            saved["made"],
            generation,
            Reason(*saved["broken"]),
            saved["replaced"],
        ),
        ledger=Ledger(saved["count"], saved["base"], saved["unheard"]),
        book=RoundBook(
            *(saved["rounds"], saved["failures"], saved["final"], opened, saved["skipped"], saved["known"]),
            averages=saved["averages"],
        ),
        progress=Progress(None if saved["elapsed_s"] is None else now - saved["elapsed_s"]),
        gathering=Gathering(saved["first"], dict(saved["servers"])),
        calls=Calls.from_json(saved["meeting"]),
        life=Life.from_json(saved["life"], now),
        data=DataBook.from_json(saved["data"]),
        tenure=Tenure(_terms_of(saved["terms"]), _terms_of(saved["beaten"]), saved["moved"]),
    )
    state.links.ways = Ways(*saved["ways"])
    state.count_in(Changes(saved["changes"]))
    algorithm, following = (algorithm_of(saved[key], "the journal") for key in ("algorithm", "next_algorithm"))
    pace, why = Pace(**saved["pace"]), Reason(*saved["why"])
    state.phases.follow(Stretch(saved["phase"], following, algorithm, pace, why))
    state.links.restore(saved["links"], now)
    for each in opened:
        _answer_again(state, each)
    return state


def _answer_again(state: RunState, opened: OpenRound) -> None:
    """Give members that had not completed a round the answer that ordered it."""
    order = opened.round
    for member in opened.waiting:
        member.round, member.asked = opened, replace(member.asked, seq=member.seq + 1)
        go = Go(member.seq, order, state.share(state.now))
        member.answer = Stop(member.seq, order, state.stopping) if order.final else go


def _member(member: Member) -> dict[str, Any]:
    account, entry = member.account, member.entry
    return {name: getattr(member.record, name) for name in _KEPT} | {
        "rank": member.rank,
        "has": member.has,
        "granted": account.granted,
        "done": account.done,
        "shared": account.shared,
        "late": entry.late,
        "began": entry.step,
        "join": _fields(member.join),
        "state": member.state.name,
        "asked": values_of(Asked)(replace(member.asked, loss=finite(member.asked.loss))),
        "leaving": member.leaving.to_json(),
        "left": member.left.to_json(),
    }


def _member_of(saved: dict[str, Any], now: float) -> Member:
    member = Member(
        Join(**saved["join"]),
        now,
        MemberState[saved["state"]],
        saved["rank"],
        asked=build(Asked, _tuples(saved["asked"])),
        has=Has(saved["has"]),
        leaving=Reason(*saved["leaving"]),
        left=Reason(*saved["left"]),
        account=Account(0, saved["done"], saved["shared"]),
        record=Record(**{name: saved[name] for name in _KEPT}),
        entry=Entry(saved["late"], saved["began"]),
    )
    left_out = member.state in (MemberState.STRAGGLER, MemberState.SILENT)
    if member.live or left_out or member.state in (MemberState.CUT, MemberState.ENDED):
        # Its last answer may not have arrived: it may ask with that number again.
        member.asked = replace(member.asked, seq=member.seq - 1)
    if member.live or member.state is MemberState.CUT:
        member.state = MemberState.BUSY
    elif left_out or member.was_silent:
        member.account.granted = saved["granted"]  # nobody waits for it: its grant is set aside
    return member


def _fields(message: Generation | Join | Round, *without: str) -> dict[str, Any]:
    """Return a message's fields, except those that are kept elsewhere."""
    names = (field.name for field in dataclasses.fields(message))
    return {name: getattr(message, name) for name in names if name not in without}


def _of_lists(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a message from JSON, with tuples for lists."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}


def _terms_of(saved: list[list[int]]) -> tuple[Term, ...]:
    return tuple(Term(*term) for term in saved)


def _tuples(saved: Any) -> Any:
    """Return what was packed, from JSON, which has lists for tuples."""
    return tuple(map(_tuples, saved)) if isinstance(saved, list) else saved
