"""``lsgd log``: a process that follows a run and writes its curves."""

import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from lsgd.errors import ConfigError, JoinError
from lsgd.protocol.events import RoundOrdered
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.watch.curves import Curves, Point
from lsgd.watch.loggers import LOGGERS, Logger, check
from lsgd.watch.reader import Reader
from lsgd.watch.results import METRICS, read

AWAY_FOR_S = 600.0
"""How long to wait for a silent global server."""

READ_ON_S = 1.0
"""How long to wait for more events after the one that ends the run."""


def write(address: str, keys: ConnectorKeys | None, folder: Path, names: Sequence[str]) -> str:
    """Write the curves of the run at ``address`` until it is over; return a summary.

    It continues with a restarted server, and ends on SIGTERM.

    Raises:
        ConfigError: a logger's package is missing, or the folder cannot be written.
        JoinError: the server refuses us, or is silent for ten minutes.
    """
    check(names)
    ended, count = threading.Event(), 0
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with ExitStack() as stack:
        reader, curves, loggers = stack.enter_context(Reader(address, keys)), Curves(), list[Logger]()
        try:
            for points in _follow(reader, curves, folder, ended):
                if not loggers:
                    for name in names:
                        loggers.append(LOGGERS[name](folder, curves.view.run))
                        stack.callback(loggers[-1].close)
                for point in points:
                    count += 1
                    for logger in loggers:
                        logger.write(point)
                for logger in loggers:
                    logger.flush()
            stack.close()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    return f"{count} points written to {folder} ({', '.join(names)})"


def _follow(reader: Reader, curves: Curves, folder: Path, ended: threading.Event) -> Iterator[list[Point]]:
    """Yield the run's points as they come; the first list, once the run is known, may be empty."""
    view, heard_at, over_at = curves.view, time.monotonic(), 0.0
    while not ended.is_set():
        batch = reader.read(0.25)
        now = time.monotonic()
        if batch.report is not None and view.run not in ("", batch.report["run"]):
            return  # another run
        points = list(curves.take(batch))
        if view.run and (batch.report is not None or points):
            yield points
        if view.state == "over" and not batch.more:
            over_at = over_at or now
            if now - over_at >= READ_ON_S or not batch.connected:
                return
        if batch.connected:
            heard_at = now
        elif _is_over(folder, view.run):
            break
        elif now - heard_at > AWAY_FOR_S:
            raise JoinError(f"the global server has been silent for {now - heard_at:.0f} s; its curves end there")
    if view.run and view.state != "over":  # it ended before it could tell us
        yield list(curves.rounds(time.time(), _written(folder / METRICS, view.run)))


def _is_over(folder: Path, run: str) -> bool:
    """Whether ``result.json`` says that the run is over."""
    document = read(folder)
    return bool(run) and document.get("run") == run and document.get("state") not in ("waiting", "running", "stopping")


def _written(path: Path, run: str) -> Iterator[RoundOrdered]:
    """Yield the rounds of a run from ``metrics.jsonl``."""
    with suppress(OSError), path.open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry.pop("run") == run:
                    yield RoundOrdered(**entry)
