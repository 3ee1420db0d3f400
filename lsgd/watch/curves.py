"""A run's curves, computed only from its events; the loggers that write them; the process of ``lsgd log``."""

import csv
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from lsgd.errors import ConfigError
from lsgd.means import mean_of_finite
from lsgd.protocol.events import Event, RoundCompleted, RoundOrdered, RunProgress
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.run_folder import CURVES, METRICS
from lsgd.server.daemon import Ending, Signals
from lsgd.watch import require
from lsgd.watch.reader import Batch, Reader
from lsgd.watch.to_end import to_end
from lsgd.watch.view import TAKES_PART, RunView

_MAX_OPEN = 1024


class Point(NamedTuple):
    """Values at one moment of a run.

    Args:
        time: time in seconds since the epoch.
        iterations: iterations of all workers so far.
        values: finite values by name: ``loss/consensus``, ``loss/node0/worker1``, ``user/accuracy``, ...
    """

    time: float
    iterations: int
    values: dict[str, float]


class Curves:
    """Turns batches into points, each once, even if a restarted server repeats events."""

    def __init__(self) -> None:
        self.view = RunView()
        self._round = 0
        self._open: dict[int, int] = {}  # count of each round that has not ended, as far as known

    def points(self, batch: Batch) -> Iterator[Point]:
        """Yield the points of a batch, in order."""
        for event in self.view.taken(batch):
            count, values = self._values(event)
            if values:
                yield Point(event.time, count, values)

    def rounds(self, time: float, orders: Iterable[RoundOrdered]) -> Iterator[Point]:
        """Yield the points of rounds that were not among the events."""
        return (Point(time, order.count, values) for order in orders if (values := self._ordered(order)))

    def _values(self, event: Event) -> tuple[int, dict[str, float]]:
        """Return the run's count at an event, and the event's values, if any."""
        match event.what:
            case RoundOrdered():
                return event.what.count, self._ordered(event.what)
            case RoundCompleted(number, took_s, sent_nbytes) if number in self._open:
                values = {"round/seconds": took_s, "round/sent_bytes": sent_nbytes}
                return self._open.pop(number), {name: float(x) for name, x in values.items() if x is not None}
            case RunProgress():
                return event.what.run.count, self._progress(event.what)
        return 0, {}

    def _ordered(self, order: RoundOrdered) -> dict[str, float]:
        """Return the values of a global round: its number and the losses."""
        if order.round <= self._round or order.scope != "global":
            return {}
        self._round = order.round
        self._open[order.round] = order.count
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]
        losses = {name: loss for name, loss in order.losses.items() if loss is not None and math.isfinite(loss)}
        values = {"rounds": float(order.round), **{f"loss/{name}": loss for name, loss in losses.items()}}
        values |= {
            f"mean/{name}": mean for name, mean in order.means.items() if mean is not None and math.isfinite(mean)
        }
        consensus = mean_of_finite(losses.values())
        return values if consensus is None else values | {"loss/consensus": consensus}

    def _progress(self, now: RunProgress) -> dict[str, float]:
        totals = [worker.totals.last for worker in self.view.workers.values() if worker.totals.last is not None]
        rate = self.view.rate
        return {
            "progress": now.run.progress,
            "period": float(now.run.period),
            **({} if rate is None else {"iterations_per_second": rate}),
            "workers": float(sum(each.state in TAKES_PART for each in now.workers)),
            "bytes/sent": float(sum(total.sent_nbytes for total in totals)),
            "bytes/received": float(sum(total.received_nbytes for total in totals)),
            "seconds/compute": sum(total.compute_s for total in totals),
            "seconds/wait": sum(total.waiting_s for total in totals),
            "seconds/exchange": sum(total.exchange_s for total in totals),
            **{f"user/{name}": number for name, number in now.logged.items()},
        }


_TAIL_NBYTES = 1 << 16


class Logger(ABC):
    """Writes the points of the run with an identity into its folder. All methods may raise OSError."""

    packages: tuple[str, ...] = ()
    """Required packages, which the extra with the logger's name installs."""
    _sink: Any

    @abstractmethod
    def __init__(self, folder: Path, run: str) -> None: ...

    @abstractmethod
    def write(self, point: Point) -> None:
        """Add a point; points come in order of time."""

    def flush(self) -> None:
        """Make what was written visible to readers."""
        self._sink.flush()

    def close(self) -> None:
        """Write what is left and close."""
        self._sink.close()


class _Csv(Logger):
    """Writes ``curves.csv``, a row for each value. A restarted process appends."""

    def __init__(self, folder: Path, run: str) -> None:
        path, self._run = folder / CURVES, run
        self._after = _last_time(path, run)
        self._sink = path.open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._sink, lineterminator="\n")
        if not self._sink.tell():
            self._rows.writerow(["run", "time", "iterations", "name", "value"])

    def write(self, point: Point) -> None:
        if point.time > self._after:
            rows = ((self._run, point.time, point.iterations, name, value) for name, value in point.values.items())
            self._rows.writerows(rows)


def _last_time(path: Path, run: str) -> float:
    """Return the time of the last row if it is of this run, else 0; cut off an incomplete last row."""
    if not path.exists():
        return 0.0
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, end - _TAIL_NBYTES))
        tail = file.read()
        whole = tail[: tail.rfind(b"\n") + 1]
        file.truncate(start + len(whole))
    *_, row = [[], *csv.reader(whole.decode("utf-8", "replace").splitlines())]
    return float(row[1]) if len(row) == 5 and row[0] == run else 0.0


class _TensorBoard(Logger):
    """Writes event files into ``tensorboard/RUN``, over the run's iterations."""

    packages = ("tensorboardX",)

    def __init__(self, folder: Path, run: str) -> None:
        from tensorboardX import SummaryWriter

        self._sink = SummaryWriter(str(folder / "tensorboard" / run.replace("/", "-")))

    def write(self, point: Point) -> None:
        for name, value in point.values.items():
            self._sink.add_scalar(name, value, point.iterations, walltime=point.time)


class _Wandb(Logger):
    """Writes a run of Weights & Biases into ``wandb/``: offline, unless ``WANDB_MODE`` says something else."""

    packages = ("wandb",)

    def __init__(self, folder: Path, run: str) -> None:
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lsgd"),
            name=os.environ.get("WANDB_NAME", folder.name),
            config={"run": run},
            dir=folder,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="iterations")

    def write(self, point: Point) -> None:
        self._run.log({"iterations": point.iterations, "time": point.time, **point.values})

    def flush(self) -> None:
        """Do nothing: wandb flushes by itself."""

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, type[Logger]] = {"csv": _Csv, "tensorboard": _TensorBoard, "wandb": _Wandb}


def check(names: Iterable[str]) -> None:
    """Raise ConfigError if a logger's package is missing."""
    for name in names:
        require(name, name, *LOGGERS[name].packages)


def write(
    address: str, keys: ConnectorKeys | None, folder: Path, names: Sequence[str], run_dir: Path | None = None
) -> int:
    """Write the curves of the run at ``address`` until it is over; return the number of points.

    It continues with a restarted server, and ends on SIGINT or SIGTERM. What a server could not tell before it ended is
    looked up in ``run_dir``, or else in the folder that is written.

    Raises:
        ConfigError: a logger's package is missing, or the folder cannot be made or written.
        JoinError: the server refuses us, has given up, is silent for ten minutes, or has never answered for one.
    """
    check(names)
    signals = Signals()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Reader(address, keys) as reader:
            return _log(reader, folder, run_dir or folder, names, signals)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        signals.restore()


def _log(reader: Reader, folder: Path, run_dir: Path, names: Sequence[str], ending: Ending) -> int:
    """Write the run's points with these loggers; return their number."""
    curves, loggers, count = Curves(), list[Logger](), 0
    view = curves.view
    with ExitStack() as stack:

        def add(points: Sequence[Point]) -> int:
            if not loggers:
                for name in names:
                    loggers.append(LOGGERS[name](folder, view.now.run))
                    stack.callback(loggers[-1].close)
            for logger in loggers:
                for point in points:
                    logger.write(point)
                logger.flush()
            return len(points)

        for batch in to_end(reader, view, run_dir, ending):
            points = list(curves.points(batch))
            if view.now.run and (batch.report is not None or points):
                count += add(points)
        if view.now.run and view.now.state != "over":  # it ended before it could tell us
            count += add(list(curves.rounds(time.time(), _written(run_dir / METRICS, view.now.run))))
    return count


def _written(path: Path, run: str) -> Iterator[RoundOrdered]:
    """Yield the rounds of a run from ``metrics.jsonl``."""
    with suppress(OSError), path.open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry.pop("run") == run:
                    yield RoundOrdered(**entry)
