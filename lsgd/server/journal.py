"""The journal: a small SQLite file from which a restarted global server continues its run."""

import hashlib
import json
import os
import sqlite3
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError
from lsgd.protocol.events import RoundOrdered
from lsgd.server.rounds import MAX_ELECTIONS

LOCK_WAIT_S = 2.0
"""How long a server waits for another one that still locks the file, and may be about to end."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, document TEXT, digest TEXT)",
    "CREATE TABLE IF NOT EXISTS rounds (id INTEGER PRIMARY KEY, document TEXT)",
)


class Journal:
    """Keeps the last state of a run and its rounds, each write durable before it returns.

    The file belongs to one server at a time. If it is deleted meanwhile, the next write creates it again.

    Args:
        path: of the file; created if it does not exist.

    Attributes:
        resumed: :meth:`load` has found a run.

    Raises:
        ConfigError: the file cannot be used, is not a journal, or is another server's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resumed = False
        self._kept = 0  # id of the last round in the file
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
                return None
            document, digest = found
            if _digest(document) != digest:
                raise ValueError("the state does not fit its digest")
            state = dict(json.loads(document))
            rows = self._connection.execute(
                "SELECT document FROM rounds ORDER BY id DESC LIMIT ?", (MAX_ELECTIONS,)
            ).fetchall()
            elections = [RoundOrdered(**json.loads(document)) for (document,) in reversed(rows)]
        except (sqlite3.Error, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(_damaged(self.path, error)) from None
        self._kept = elections[-1].round if elections else 0
        self.resumed = True
        return state, elections

    def forget(self) -> None:
        """Forget the run that the file holds, because it has ended.

        Raises:
            sqlite3.Error: it cannot be written.
        """
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("DELETE FROM rounds")
            self._connection.execute("DELETE FROM state")
        self._kept = 0

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

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def remove(self) -> None:
        """Close and delete the file, which is out of date. The next :meth:`save` creates it again."""
        with suppress(sqlite3.Error):
            self._connection.close()
        self._file = None
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                self.path.with_name(self.path.name + suffix).unlink()

    def _there(self) -> int | None:
        """Return the inode of the file at the path, None if there is none."""
        try:
            return os.stat(self.path).st_ino
        except OSError:
            return None


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
