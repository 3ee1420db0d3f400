"""Write a run's curves to a table, TensorBoard or Weights & Biases."""

import csv
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from lsgd.errors import ConfigError
from lsgd.watch.curves import Point

CURVES = "curves.csv"
"""The table, in the run folder."""

_TAIL_NBYTES = 1 << 16


class Logger(ABC):
    """Writes the points of one run into its folder. The constructor and all methods may raise OSError.

    Args:
        folder: run folder.
        run: identity of the run.
    """

    package = ""
    """Required package, which the extra with the logger's name installs; empty: none."""

    @abstractmethod
    def __init__(self, folder: Path, run: str) -> None: ...

    @abstractmethod
    def write(self, point: Point) -> None:
        """Add a point; points come in order of time."""

    @abstractmethod
    def flush(self) -> None:
        """Make what was written visible to readers."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left and close."""


class _Csv(Logger):
    """Writes ``curves.csv``, a row for each value. A restarted process appends."""

    def __init__(self, folder: Path, run: str) -> None:
        path, self._run = folder / CURVES, run
        self._after = _last_time(path, run)
        self._file = path.open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if not self._file.tell():
            self._rows.writerow(["run", "time", "iterations", "name", "value"])

    def write(self, point: Point) -> None:
        if point.time > self._after:
            rows = ((self._run, point.time, point.iterations, name, value) for name, value in point.values.items())
            self._rows.writerows(rows)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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

    package = "tensorboardX"

    def __init__(self, folder: Path, run: str) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard" / run.replace("/", "-")))

    def write(self, point: Point) -> None:
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.iterations, walltime=point.time)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb(Logger):
    """Writes a run of Weights & Biases into ``wandb/``: offline, unless ``WANDB_MODE`` says something else."""

    package = "wandb"

    def __init__(self, folder: Path, run: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lsgd"),
            name=os.environ.get("WANDB_NAME", folder.name),
            config={"run": run},
            dir=folder,
            mode=os.environ.get("WANDB_MODE", "offline"),
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
"""By name."""


def check(names: Iterable[str]) -> None:
    """Raise ConfigError if a logger's package is missing."""
    for name in names:
        cls = LOGGERS[name]
        if cls.package and importlib.util.find_spec(cls.package) is None:
            raise ConfigError(f"{name} needs {cls.package}: {sys.executable} -m pip install 'lsgd[{name}]'")
