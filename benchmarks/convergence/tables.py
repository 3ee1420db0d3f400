"""The tables of benchmarks/convergence, made from its results and those of benchmarks/network."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.methods import ALL, PERIODIC
from benchmarks.report.tables import spread, table

REFERENCE = "ddp"
COLUMNS = (
    *("method", "period", "steps to the target", "reached it", "over DDP's"),
    *("final accuracy", "points over DDP's"),
)
COLUMNS_OF_TIME = ("ms a step", "s to the target", "DDP's over it")
Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows, network: Mapping[str, Any] | None, link: str, workers: int) -> str:
    """Return a table for each task, with a line for each method and period.

    Args:
        rows: the results.
        network: the file of benchmarks.network; None: no times.
        link: whose step times are taken.
        workers: how many there are.
    """
    tasks = dict.fromkeys(row["task"] for row in rows)
    return "\n\n".join(f"**{task}**\n\n{task_table(rows, task, network, link, workers)}" for task in tasks)


def task_table(
    rows: Rows, task: str, network: Mapping[str, Any] | None = None, link: str = "", workers: int = 0
) -> str:
    """Return the table of one task; arguments as in :func:`tables`."""
    columns = [*COLUMNS, *(COLUMNS_OF_TIME if network else ())]
    here = [row for row in rows if row["task"] == task]
    if not here:
        return table(columns, [])
    runs = pd.DataFrame(here)
    reference = runs[runs["method"] == REFERENCE].set_index("seed")  # runs of equal seed are compared
    runs["ratio"] = runs["steps_to_target"] / runs["seed"].map(reference["steps_to_target"])
    runs["points"] = (runs["final_accuracy"] - runs["seed"].map(reference["final_accuracy"])) * 100
    reference_s = _step_s(network, link, workers, REFERENCE, 0)
    lines = []
    for method, period in sorted({(row["method"], row["period"]) for row in here}, key=_place):
        of_one = runs[(runs["method"] == method) & (runs["period"] == period)]
        found = {
            name: of_one[name].dropna().tolist() for name in ("steps_to_target", "ratio", "final_accuracy", "points")
        }
        line = [method, str(period or ""), *_steps(method, len(of_one), found)]
        if network:
            line += _times(found, _step_s(network, link, workers, method, period), reference_s)
        lines.append(line)
    return table(columns, lines)


def _place(line: tuple[str, int]) -> tuple[int, int]:
    method, period = line
    return (ALL.index(method), period)


def _step_s(network: Mapping[str, Any] | None, link: str, workers: int, method: str, period: int) -> float | None:
    """Return the seconds of a step; None if they were not measured with this period."""
    if network is None or (method in PERIODIC and network["settings"]["period"] != period):
        return None
    here = [row for row in network["results"] if (row["link"], row["nodes"]) == (link, workers)]
    found = [row["step_s"] for row in here if row["method"] == method]
    return statistics.median(found) if found else None


def _steps(method: str, runs: int, found: Mapping[str, list[float]]) -> Sequence[str]:
    """Return the cells that need no network; ``found`` has the numbers of those runs that have them."""
    is_reference = method == REFERENCE
    return (
        spread(found["steps_to_target"], ".0f") or "never",
        f"{len(found['steps_to_target'])} of {runs}",
        "1.00" if is_reference else spread(found["ratio"], ".2f"),
        spread(found["final_accuracy"], ".4f"),
        "" if is_reference else spread(found["points"], "+.2f"),
    )


def _times(found: Mapping[str, list[float]], step_s: float | None, reference_s: float | None) -> Sequence[str]:
    """Return the cells that do."""
    if step_s is None:
        return ("", "", "")
    steps, ratios = found["steps_to_target"], found["ratio"]
    to_target = f"{statistics.mean(steps) * step_s:.1f}" if steps else "never"
    speed = f"{reference_s / step_s / statistics.mean(ratios):.2f}" if ratios and reference_s else ""
    return (f"{step_s * 1e3:.1f}", to_target, speed)
