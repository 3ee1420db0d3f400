"""Follows a run to its end, over restarts of its server and moves to another one: for processes beside a run."""

import time
from collections.abc import Iterator
from pathlib import Path

from lsgd.errors import JoinError
from lsgd.server.daemon import Ending
from lsgd.watch.reader import Batch, Reader
from lsgd.watch.results import read
from lsgd.watch.view import RunView

FIRST_WITHIN_S = 60.0
"""How long to wait for the first answer of a global server, which the launcher starts at the same time."""

AWAY_FOR_S = 600.0
"""How long to wait for a silent global server."""

READ_ON_S = 1.0
"""How long to wait for more events after the one that ends the run."""


def to_end(reader: Reader, view: RunView, run_dir: Path, ending: Ending) -> Iterator[Batch]:
    """Yield batches until the run is over, another one is served, or a signal has come.

    The caller applies each to ``view`` before it asks for the next one. A run whose server ended before it could say so
    is over if ``result.json`` in ``run_dir`` says it.

    Raises:
        JoinError: the server refuses us, has given up, is silent for ten minutes, or has never answered for one.
    """
    heard_at, over_at = time.monotonic(), 0.0
    while not ending.received:
        batch = reader.read(0.25)
        now = time.monotonic()
        if batch.report is not None and view.now.run not in ("", batch.report["run"]):
            return  # another run
        yield batch
        if view.now.state == "over" and not batch.more:
            over_at = over_at or now
            if now - over_at >= READ_ON_S or not batch.connected:
                return
        if batch.connected:
            heard_at = now
        elif _is_over(run_dir, view.now.run):
            return
        elif not view.now.run and now - heard_at > FIRST_WITHIN_S:
            raise JoinError(f"no global server has answered for {now - heard_at:.0f} s: is it the right address?")
        elif now - heard_at > AWAY_FOR_S:
            raise JoinError(f"the global server has been silent for {now - heard_at:.0f} s; what is known ends there")


def _is_over(folder: Path, run: str) -> bool:
    document = read(folder)
    return bool(run) and document.get("run") == run and document.get("state") not in ("waiting", "running", "stopping")
