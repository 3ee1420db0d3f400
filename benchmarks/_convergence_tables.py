"""The tables of benchmarks/convergence.py, made from its results and those of benchmarks/network.py."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._about import table
from benchmarks.methods import PERIODIC

BASELINE = "ddp"
Row = Mapping[str, Any]
Rows = Sequence[Row]


def tables(rows: Rows, network: Mapping[str, Any] | None, link: str, workers: int) -> str:
    """Return a table for each task and period; methods without a period stand in each.

    Args:
        rows: the results.
        network: the file of benchmarks.network; None: no times.
        link: whose step times are taken.
        workers: how many there are.
    """
    texts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        for period in sorted({row["period"] for row in of_task if row["period"]}) or [0]:
            here = [row for row in of_task if row["period"] in (0, period)]
            steps_s = _step_times(network, link, workers, period)
            texts.append(f"**{task}, period {period or 'none'}**\n\n{_table(here, steps_s)}")
    return "\n\n".join(texts)


def _step_times(network: Mapping[str, Any] | None, link: str, workers: int, period: int) -> dict[str, float]:
    """Return the seconds of a step by method, for those that were measured with this period."""
    if network is None:
        return {}
    found: dict[str, list[float]] = {}
    for row in network["results"]:
        fits = row["method"] not in PERIODIC or network["settings"]["period"] == period
        if fits and row["link"] == link and row["nodes"] == workers:
            found.setdefault(row["method"], []).append(row["step_s"])
    return {method: statistics.median(steps_s) for method, steps_s in found.items()}


def _table(rows: Rows, steps_s: Mapping[str, float]) -> str:
    columns = [
        "method",
        "steps to the target",
        "reached",
        "over DDP's",
        "final accuracy",
        "points over DDP's",
    ]
    columns += ["ms a step", "s to the target", "DDP's over it"] if steps_s else []
    methods = dict.fromkeys(row["method"] for row in rows)
    baseline = {row["seed"]: row for row in rows if row["method"] == BASELINE}
    return table(columns, [_line([r for r in rows if r["method"] == m], baseline, steps_s) for m in methods])


def _line(runs: Rows, baseline: Mapping[int, Row], steps_s: Mapping[str, float]) -> Sequence[str]:
    method = runs[0]["method"]
    steps = [run["steps_to_target"] for run in runs if run["steps_to_target"] is not None]
    pairs = [(run, baseline[run["seed"]]) for run in runs if run["seed"] in baseline]
    ratios = [
        run["steps_to_target"] / other["steps_to_target"]
        for run, other in pairs
        if run["steps_to_target"] and other["steps_to_target"]
    ]
    points = [(run["final_accuracy"] - other["final_accuracy"]) * 100 for run, other in pairs]
    cells = [
        method,
        spread(steps, ".0f"),
        f"{len(steps)} of {len(runs)}",
        spread(ratios, ".2f"),
        spread([run["final_accuracy"] for run in runs], ".4f"),
        spread(points, "+.2f"),
    ]
    if not steps_s:
        return cells
    if method not in steps_s or not steps:
        return [*cells, "", "", ""]
    to_target_s = statistics.mean(steps) * steps_s[method]
    speed = ""
    if (
        ratios and BASELINE in steps_s
    ):  # of equal seeds: those that one of both did not reach count for neither
        speed = f"{steps_s[BASELINE] / steps_s[method] / statistics.mean(ratios):.2f}"
    return [*cells, f"{steps_s[method] * 1e3:.1f}", f"{to_target_s:.1f}", speed]


def spread(values: Sequence[float], form: str) -> str:
    """Return mean ± standard deviation, the mean alone of one value, nothing of none."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean
