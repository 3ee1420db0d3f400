"""The same tuning budget for every method: three learning rates, on a seed that no table has."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.convergence.runs import Training

SEED = 1000
TIMES = (0.5, 1.0, 2.0)
"""What the task's learning rate is multiplied by."""

PLACE = ("task", "method", "period", "steps", "shards", "optimizer")
"""What is tuned on its own."""

Rows = Sequence[Mapping[str, Any]]


def trials(trainings: Sequence[Training]) -> Sequence[Training]:
    """Return the trainings that find the learning rates of these."""
    return [
        replace(training, seed=SEED, learning_rate_times=times)
        for training in dict.fromkeys(replace(t, seed=SEED, learning_rate_times=1.0) for t in trainings)
        for times in TIMES
    ]


def best_times(rows: Rows) -> Mapping[tuple[Any, ...], float]:
    """Return the best multiple of the learning rate by what :data:`PLACE` names, of the lowest final loss."""
    found: dict[tuple[Any, ...], dict[float, float]] = {}
    for row in rows:
        if row["seed"] == SEED:
            loss = row["final_loss"] if math.isfinite(row["final_loss"]) else math.inf
            found.setdefault(_place(row), {})[row["learning_rate_times"]] = loss
    return {place: min(losses, key=losses.__getitem__) for place, losses in found.items() if len(losses) == len(TIMES)}


def tuned(trainings: Sequence[Training], rows: Rows) -> Sequence[Training]:
    """Return the trainings with the best learning rates; those without all their trials are left out."""
    best = best_times(rows)
    places = [tuple(getattr(training, name) for name in PLACE) for training in trainings]
    return [
        replace(training, learning_rate_times=best[place])
        for training, place in zip(trainings, places, strict=True)
        if place in best
    ]


def reported(rows: Rows) -> Rows:
    """Return the rows of which a table is made: no trials, and what was tuned with its best learning rate only."""
    best = best_times(rows)
    return [
        row
        for row in rows
        if row["seed"] != SEED and row["learning_rate_times"] == best.get(_place(row), row["learning_rate_times"])
    ]


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)
