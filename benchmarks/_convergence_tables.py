"""The tables of benchmarks/convergence.py, made from its results and those of benchmarks/network.py."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._about import table
from benchmarks.methods import ALL, PERIODIC

BASELINE = "ddp"
Row = Mapping[str, Any]
Rows = Sequence[Row]


def tables(rows: Rows, network: Mapping[str, Any] | None, link: str, workers: int) -> str:
    """Return a table for each task, with a line for each method and period.

    Args:
        rows: the results.
        network: the file of benchmarks.network; None: no times.
        link: whose step times are taken.
        workers: how many there are.
    """
    texts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        texts.append(f"**{task}**\n\n{task_table(rows, task, network, link, workers)}")
    return "\n\n".join(texts)


def task_table(
    rows: Rows, task: str, network: Mapping[str, Any] | None = None, link: str = "", workers: int = 0
) -> str:
    """Return the table of one task; arguments as in :func:`tables`."""
    rows = [row for row in rows if row["task"] == task]
    columns = [
        "method",
        "period",
        "steps to the target",
        "reached it",
        "over DDP's",
        "final accuracy",
        "points over DDP's",
    ]
    columns += ["ms a step", "s to the target", "DDP's over it"] if network else []
    baseline = {row["seed"]: row for row in rows if row["method"] == BASELINE}
    baseline_s = _step_s(network, link, workers, BASELINE, 0)
    lines = []
    for method, period in sorted({(row["method"], row["period"]) for row in rows}, key=_place):
        runs = [row for row in rows if (row["method"], row["period"]) == (method, period)]
        line = [method, str(period or ""), *_steps(runs, baseline)]
        if network:
            line += _times(runs, baseline, _step_s(network, link, workers, method, period), baseline_s)
        lines.append(line)
    return table(columns, lines)


def _place(line: tuple[str, int]) -> tuple[int, int]:
    method, period = line
    return (ALL.index(method), period)


def _step_s(
    network: Mapping[str, Any] | None, link: str, workers: int, method: str, period: int
) -> float | None:
    """Return the seconds of a step; None if they were not measured with this period."""
    if network is None or (method in PERIODIC and network["settings"]["period"] != period):
        return None
    here = [row for row in network["results"] if (row["link"], row["nodes"]) == (link, workers)]
    found = [row["step_s"] for row in here if row["method"] == method]
    return statistics.median(found) if found else None


def _steps(runs: Rows, baseline: Mapping[int, Row]) -> Sequence[str]:
    """Return the cells that need no network."""
    steps = _reached(runs)
    ratios = _ratios(runs, baseline)
    points = [
        (run["final_accuracy"] - other["final_accuracy"]) * 100 for run, other in _pairs(runs, baseline)
    ]
    is_baseline = runs[0]["method"] == BASELINE
    return (
        spread(steps, ".0f") or "never",
        f"{len(steps)} of {len(runs)}",
        "1.00" if is_baseline else spread(ratios, ".2f"),
        spread([run["final_accuracy"] for run in runs], ".4f"),
        "" if is_baseline else spread(points, "+.2f"),
    )


def _times(
    runs: Rows, baseline: Mapping[int, Row], step_s: float | None, baseline_s: float | None
) -> Sequence[str]:
    """Return the cells that do."""
    steps, ratios = _reached(runs), _ratios(runs, baseline)
    if step_s is None:
        return ("", "", "")
    to_target = f"{statistics.mean(steps) * step_s:.1f}" if steps else "never"
    speed = f"{baseline_s / step_s / statistics.mean(ratios):.2f}" if ratios and baseline_s else ""
    return (f"{step_s * 1e3:.1f}", to_target, speed)


def _pairs(runs: Rows, baseline: Mapping[int, Row]) -> list[tuple[Row, Row]]:
    """Return each run with the baseline's of equal seed."""
    return [(run, baseline[run["seed"]]) for run in runs if run["seed"] in baseline]


def _reached(runs: Rows) -> list[int]:
    return [run["steps_to_target"] for run in runs if run["steps_to_target"] is not None]


def _ratios(runs: Rows, baseline: Mapping[int, Row]) -> list[float]:
    """Return the steps over the baseline's of equal seed, of the seeds that both have reached the target with."""
    return [
        run["steps_to_target"] / other["steps_to_target"]
        for run, other in _pairs(runs, baseline)
        if run["steps_to_target"] and other["steps_to_target"]
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Return mean ± standard deviation, the mean alone of one value, nothing of none."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean
