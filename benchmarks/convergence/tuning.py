"""The same tuning budget for every method: three learning rates on two seeds that no table has."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.convergence.runs import Training

SEEDS = (1000, 1001)
TIMES = (0.5, 1.0, 2.0)
"""What the learning rate is multiplied by."""

PLACE = ("task", "method", "period", "steps", "shards", "optimizer")
"""What is tuned on its own."""

Rows = Sequence[Mapping[str, Any]]


def trials(trainings: Sequence[Training]) -> Sequence[Training]:
    """Return the trainings that find the learning rates of these."""
    return [
        replace(training, seed=seed, learning_rate_times=times * training.learning_rate_times)
        for training in dict.fromkeys(replace(t, seed=0) for t in trainings)
        for times, seed in itertools.product(TIMES, SEEDS)
    ]


def best_times(rows: Rows, begun_with: float) -> Mapping[tuple[Any, ...], float]:
    """Return the best multiple of the learning rate by what :data:`PLACE` names, of the lowest mean final loss.

    Only trials of this tuning count, which began with a multiple; the file may have those of another.
    """
    tried = [times * begun_with for times in TIMES]
    found: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for row in rows:
        if row["seed"] in SEEDS and row["learning_rate_times"] in tried:
            loss = row["final_loss"] if math.isfinite(row["final_loss"]) else math.inf
            found.setdefault(_place(row), {}).setdefault(row["learning_rate_times"], []).append(loss)
    best = {}
    for place, losses in found.items():
        means = {times: statistics.fmean(each) for times, each in losses.items() if len(each) == len(SEEDS)}
        if len(means) == len(TIMES):
            best[place] = min(means, key=means.__getitem__)
    return best


def tuned(trainings: Sequence[Training], rows: Rows, begun_with: float) -> Sequence[Training]:
    """Return the trainings with the best learning rates; those without all their trials are left out."""
    best = best_times(rows, begun_with)
    places = [tuple(getattr(training, name) for name in PLACE) for training in trainings]
    return [
        replace(training, learning_rate_times=best[place])
        for training, place in zip(trainings, places, strict=True)
        if place in best
    ]


def reported(rows: Rows, begun_with: float) -> Rows:
    """Return the rows of which a table is made: no trials, and what was tuned with its best learning rate only."""
    best = best_times(rows, begun_with)
    return [
        row
        for row in rows
        if row["seed"] not in SEEDS and row["learning_rate_times"] == best.get(_place(row), row["learning_rate_times"])
    ]


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)
