"""The learning curves of benchmarks/convergence as pictures."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from benchmarks.report.plots import COLORS
from benchmarks.workloads import TASKS

STYLES = ("-", "--", ":")
Rows = Sequence[Mapping[str, Any]]


def draw_all(rows: Rows, folder: Path) -> None:
    """Draw a picture for each task and period; methods without a period stand in each."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        for period in sorted({row["period"] for row in of_task if row["period"]}) or [0]:
            here = [row for row in of_task if row["period"] in (0, period)]
            _draw(here, task, period, folder / f"convergence-{task}-{period}.png")


def _draw(rows: Rows, task: str, period: int, path: Path) -> None:
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for index, method in enumerate(methods):
        color, style = COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]
        _draw_method(axes, [row for row in rows if row["method"] == method], method, color, style)
    axes.axhline(TASKS[task].target_loss, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())  # "3" rather than a power of ten
    axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    axes.set_xlabel("steps of a worker")
    axes.set_ylabel("test loss of the average of all models, median and range over seeds")
    axes.set_title(f"{task}, four workers, period {period}; the line is the target", fontsize=11)
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=90)


def _draw_method(axes: Axes, runs: Rows, method: str, color: str, style: str) -> None:
    steps = [step for step, _, _ in runs[0]["curve"]]
    losses = [sorted(column) for column in zip(*([p[1] for p in r["curve"]] for r in runs), strict=True)]
    axes.plot(steps, [statistics.median(x) for x in losses], style, color=color, linewidth=1.3, label=method)
    axes.fill_between(steps, [x[0] for x in losses], [x[-1] for x in losses], color=color, alpha=0.08, linewidth=0)
