"""Runs side by side: what was set, how fast they were, and their losses at the same iterations and times."""

import math
import tomllib
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError
from lsgd.means import mean_of_finite
from lsgd.run_folder import METRICS
from lsgd.watch.results import read, read_rounds
from lsgd.watch.terminal import duration

OVER = 0.05
"""A loss is the mean over the rounds of this share of the run before it: single rounds are noisy."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Where losses are compared, as shares of the shorter run."""


@dataclass(frozen=True)
class Run:
    """A run as its folder has it.

    Args:
        name: of its folder.
        result: content of ``result.json``.
        points: iterations, seconds and mean loss of each global round.
        settings: of its plan, by name.
    """

    name: str
    result: dict[str, Any]
    points: Sequence[tuple[int, float, float]]
    settings: dict[str, str]

    def loss(self, count: float = math.inf, seconds: float = math.inf) -> float | None:
        """Return the loss after so many iterations and seconds; None: there is none yet."""
        within = (
            loss
            for (made, at, _), loss in zip(self.points, self.losses, strict=True)
            if made <= count and at <= seconds
        )
        return next(iter(deque(within, maxlen=1)), None)

    @cached_property
    def losses(self) -> list[float | None]:
        """The loss at each point."""
        window = deque[float](maxlen=max(1, round(OVER * len(self.points))))
        found = []
        for _, _, loss in self.points:
            window.append(loss)
            found.append(mean_of_finite(window))
        return found

    @property
    def count(self) -> int:
        """Iterations of all workers."""
        return int(self.result.get("count", 0))

    @property
    def seconds(self) -> float:
        """Seconds from its first round."""
        return float(self.result.get("seconds", 0.0))


def run_of(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: there is no run in it.
    """
    result, rounds = read(folder), read_rounds(folder / METRICS)
    if not result:
        raise ConfigError(f"{folder} has no result.json: name the folder of a run, as lsgd runs lists them")
    losses = [
        (each["count"], each["seconds"], mean_of_finite(each["losses"].values()))
        for each in rounds
        if each["scope"] == "global"
    ]
    points = [(count, seconds, loss) for count, seconds, loss in losses if loss is not None]
    settings: dict[str, str] = {}
    with suppress(OSError, ValueError):
        settings = _flat(tomllib.loads((folder / "plan.toml").read_text(encoding="utf-8")))
    return Run(folder.resolve().name, result, points, settings)


def _flat(settings: dict[str, Any], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        tables = value if isinstance(value, list) else [value]
        if all(isinstance(each, dict) for each in tables):
            for number, each in enumerate(tables):
                found |= _flat(each, f"{name}{number or ''}.")
        else:
            found[before + name] = str(value)
    return found


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return rows for runs: what it is, then each run's value. A row of settings is there if they differ."""
    rows: list[tuple[str, ...]] = [("", *(run.name for run in runs))]

    def row(name: str, values: Iterable[object]) -> None:
        rows.append((name, *("-" if value is None else str(value) for value in values)))

    for name in dict.fromkeys(name for run in runs for name in run.settings):
        if len({run.settings.get(name) for run in runs}) > 1:
            row(name, [run.settings.get(name) for run in runs])
    row("state", [run.result.get("state") for run in runs])
    row("workers", [len(run.result.get("members", [])) for run in runs])
    row("iterations", [run.count for run in runs])
    row("time", [duration(round(run.seconds)) for run in runs])
    row("iterations a second", [f"{run.count / run.seconds:.3g}" if run.seconds else None for run in runs])
    row("global rounds", [run.result.get("rounds_global") for run in runs])
    row("take part in rounds", [_share(run.result.get("participation")) for run in runs])
    for share in SHARES:
        count = round(share * min(run.count for run in runs))
        row(f"loss after {count} iterations", [_loss(run.loss(count=count)) for run in runs])
    for share in SHARES:
        seconds = share * min(run.seconds for run in runs)
        row(f"loss after {duration(round(seconds))}", [_loss(run.loss(seconds=seconds)) for run in runs])
    if (worst := _worst(runs)) is not None:
        row(f"time to a loss of {worst:.4g}", [_time_to(run, worst) for run in runs])
    return rows


def _share(participation: float | None) -> str | None:
    return None if participation is None else f"{participation:.0%}"


def _loss(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4g}"


def _worst(runs: Sequence[Run]) -> float | None:
    """Return the highest of the last losses, which all runs have reached; None: one has no loss."""
    last = [run.loss() for run in runs]
    known = [loss for loss in last if loss is not None]
    return max(known) if len(known) == len(runs) else None


def _time_to(run: Run, loss: float) -> str | None:
    """Return when a run's loss first was as low."""
    reached = (
        at for (_, at, _), so_far in zip(run.points, run.losses, strict=True) if so_far is not None and so_far <= loss
    )
    return None if (seconds := next(reached, None)) is None else duration(round(seconds))
