"""A run's results in its folder: ``metrics.jsonl`` has a line for each round, ``result.json`` the run's state.

The global server writes both, because it alone is sure to know every round.
"""

import json
import math
import os
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from lsgd.output import append, write_whole
from lsgd.protocol.events import RoundOrdered
from lsgd.server.report import entry, summary
from lsgd.server.state import RunState

METRICS, RESULT = "metrics.jsonl", "result.json"
"""Names of the files."""

RESULT_EVERY_S = 5.0
"""How often the state is written during the run, in seconds."""

RETRY_EVERY_S = 5.0
"""How long a failed write is not repeated, in seconds."""

_TAIL_NBYTES = 1 << 16  # holds several lines, whatever their number of losses


class Record:
    """Writes the rounds and the state of a run to files; a failure never ends the run.

    Each round is one line, written once: a restarted server rewrites a line that its predecessor left incomplete. A
    resumed run's lines follow those of the run before it.

    Args:
        folder: of the run.
        run: its identity.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._metrics, self._result = folder / METRICS, folder / RESULT
        self._run = run
        self._round: int | None = None  # id of the last one in the file; None: not read yet
        self._started = self._started_before() or datetime.now().astimezone().isoformat(timespec="seconds")
        self._written_at = -math.inf
        self._retry_at = -math.inf
        self._failing = False

    def keep(self, state: RunState, now: float, *, last: bool = False) -> str:
        """Write new rounds, and the state if it is due or this is the last call.

        Returns:
            A line for the log if writing has begun to fail or works again, else an empty text.
        """
        if now < self._retry_at and not last:
            return ""
        try:
            self._append(state)
            if last or now - self._written_at >= RESULT_EVERY_S:
                self._write(summary(state, now))
                self._written_at = now
        except OSError as error:
            self._retry_at = now + RETRY_EVERY_S
            said, self._failing = self._failing, True
            where = f"{self._metrics} and {RESULT} cannot be written: {error.strerror}"
            return "" if said else f"{where}; the run continues, and the server tries again: free space there"
        said, self._failing = self._failing, False
        return f"{self._metrics} is written again" if said else ""

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
        losses = {w: None if loss is None else float(f"{loss:.6g}") for w, loss in round_["losses"].items()}
        return json.dumps({"run": self._run, **round_, "seconds": round(election.seconds, 3), "losses": losses})

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
