"""How workers spent their time, and what they sent, in columns of equal width."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lsgd.watch.view import Totals

LEVELS = 20
"""Steps of a share of time, which is one character: ``0`` to ``9``, ``a`` to ``k``."""

_DIGITS = "0123456789abcdefghijk"
_WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


class Columns(NamedTuple):
    """``number`` columns of ``width_s`` seconds from ``begin`` on, in seconds since the epoch."""

    begin: float
    width_s: float
    number: int

    @property
    def edges(self) -> NDArray[np.float64]:
        """Return the start of each column, and the end of the last."""
        return np.asarray(self.begin + self.width_s * np.arange(self.number + 1), dtype=np.float64)


def columns(begin: float, end: float, most: int, least_s: float = 1.0) -> Columns:
    """Return columns from ``begin`` to ``end``; their edges do not move as time passes."""
    fits = (w for w in _WIDTHS_S if w >= least_s and (end - begin) / w <= most - 1)
    width = next(fits, max(1.0, (end - begin) / (most - 1)))
    begin = begin // width * width
    return Columns(begin, width, max(1, int((end - begin) // width)))


def shares(points: Sequence[Totals], over: Columns) -> list[str]:
    """Return the shares of compute, waiting and exchange, each as a string of one character per column."""
    if len(points) < 2:
        return ["0" * over.number] * 3
    points = [next(same) for _, same in groupby(points, _spent)]  # drop points without new time
    spent = np.array([_spent(p) for p in points]).T
    times = np.array([p.time for p in points])
    told = np.array([np.diff(np.interp(over.edges, times, each)) for each in spent]) / over.width_s
    told = np.clip(told, 0.0, None) / np.maximum(1.0, told.sum(axis=0))
    ends = np.rint(np.cumsum(told, axis=0) * LEVELS).astype(int).clip(0, LEVELS)
    return ["".join(_DIGITS[level] for level in row) for row in np.diff(ends, axis=0, prepend=0)]


def traffic(workers: Iterable[Sequence[Totals]], over: Columns) -> dict[str, list[float | None]]:
    """Return what all workers sent, in bytes a second and bytes an iteration; None if there were no iterations."""
    sent, done = np.zeros(over.number), np.zeros(over.number)
    for points in workers:
        if len(points) > 1:
            times = [p.time for p in points]
            sent += np.diff(np.interp(over.edges, times, [p.sent_nbytes for p in points]))
            done += np.diff(np.interp(over.edges, times, [p.done for p in points]))
    per = [round(s / d) if d >= 0.5 else None for s, d in zip(sent.clip(0), done, strict=True)]
    return {"bytes_per_s": np.rint(sent.clip(0) / over.width_s).tolist(), "bytes_per_iteration": per}


def pace(points: Sequence[Totals], over_s: float) -> dict[str, float | None]:
    """Return a worker's recent iterations and bytes a second, compute time per iteration, and shares of time."""
    names = ("rate", "compute_s", "compute", "waiting", "exchange", "bytes_per_s")
    points = [p for p in points if p.time >= points[-1].time - over_s]
    if len(points) < 2:
        return dict.fromkeys(names)
    first, last = points[0], points[-1]
    seconds, done = last.time - first.time, last.done - first.done
    spent = [b - a for a, b in zip(_spent(first), _spent(last), strict=True)]
    whole = max(seconds, sum(spent))
    values = (
        done / seconds,
        spent[0] / done if done > 0 else None,
        *(max(0.0, each) / whole for each in spent),
        (last.sent_nbytes - first.sent_nbytes) / seconds,
    )
    return {name: None if v is None else float(f"{v:.4g}") for name, v in zip(names, values, strict=True)}


def _spent(point: Totals) -> tuple[float, float, float]:
    return point.compute_s, point.waiting_s, point.exchange_s
