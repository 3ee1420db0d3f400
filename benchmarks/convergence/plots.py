"""The learning curves of benchmarks/convergence as pictures."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from benchmarks.methods import ALL, ALONE, BASELINES, ONE_MACHINE, ONE_MACHINE_SAMPLES, sent_nbytes
from benchmarks.report.plots import COLORS
from benchmarks.workloads import TASKS

STYLES = ("-", "--", ":")
MARKERS = "osD^v<>PX*"
LEVELS = {ONE_MACHINE: ("#666666", "--"), ONE_MACHINE_SAMPLES: ("#666666", "-"), ALONE: ("#666666", ":")}
"""How the methods that send nothing are drawn."""
Rows = Sequence[Mapping[str, Any]]


def draw_all(rows: Rows, folder: Path, workers: int) -> None:
    """Draw each task's losses over bytes, and its curves for each period; methods without a period stand in each."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        for period in sorted({row["period"] for row in of_task if row["period"]}) or [0]:
            here = [row for row in of_task if row["period"] in (0, period)]
            _draw(here, task, period, workers, folder / f"convergence-{task}-{period}.png")
        draw_bytes(of_task, task, workers, folder / f"convergence-{task}-bytes.png")


def _draw(rows: Rows, task: str, period: int, workers: int, path: Path) -> None:
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for index, method in enumerate(methods):
        color, style = COLORS[index % len(COLORS)], STYLES[index // len(COLORS) % len(STYLES)]
        _draw_method(axes, [row for row in rows if row["method"] == method], method, color, style)
    axes.axhline(TASKS[task].target_loss, color="black", linewidth=0.8)
    _scale_losses(axes)
    axes.set_xlabel("steps of a worker")
    axes.set_ylabel("test loss of the average of all models, median and range over seeds")
    axes.set_title(f"{task}, {workers} workers, period {period}; the line is the target", fontsize=11)
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=90)


def _draw_method(axes: Axes, runs: Rows, method: str, color: str, style: str) -> None:
    steps = [step for step, _, _ in runs[0]["curve"]]
    losses = [sorted(column) for column in zip(*([p[1] for p in r["curve"]] for r in runs), strict=True)]
    axes.plot(steps, [statistics.median(x) for x in losses], style, color=color, linewidth=1.3, label=method)
    axes.fill_between(steps, [x[0] for x in losses], [x[-1] for x in losses], color=color, alpha=0.08, linewidth=0)


def draw_bytes(rows: Rows, task: str, workers: int, path: Path) -> None:
    """Draw the final loss over the bytes of a step, by formula: a line for each method, a point for each period."""
    model = TASKS[task]().model()
    losses: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if sent_nbytes(row["method"], row["period"], model, workers) is not None:
            losses.setdefault(row["method"], {}).setdefault(row["period"], []).append(row["final_loss"])
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    sending = sorted((method for method in losses if method not in LEVELS), key=ALL.index)
    families = list(dict.fromkeys(_family(method) for method in sending))
    for method in sending:
        periods = sorted(losses[method])
        nbytes = [sent_nbytes(method, period, model, workers) or 0.0 for period in periods]
        middle = [statistics.median(losses[method][period]) for period in periods]
        family = _family(method)
        color = COLORS[families.index(family) % len(COLORS)]
        index = [other for other in sending if _family(other) == family].index(method)
        style, marker = STYLES[index % len(STYLES)], MARKERS[index % len(MARKERS)]
        above = method not in BASELINES
        axes.plot(nbytes, middle, style, color=color, marker=marker, markersize=6, linewidth=1.3, label=method)
        for period, x, y in zip(periods, nbytes, middle, strict=True):
            if period:
                offset, va = ((0, 6), "bottom") if above else ((0, -6), "top")
                axes.annotate(
                    str(period), (x, y), textcoords="offset points", xytext=offset, ha="center", va=va, fontsize=8
                )
    for method in [method for method in LEVELS if method in losses]:
        color, style = LEVELS[method]
        level = statistics.median(losses[method][0])
        axes.axhline(level, color=color, linestyle=style, linewidth=1.2)
        x, ha, va = (0.99, "right", "top") if method == ONE_MACHINE_SAMPLES else (0.01, "left", "bottom")
        axes.text(x, level, method, transform=axes.get_yaxis_transform(), ha=ha, va=va, fontsize=8, color=color)
    axes.margins(y=0.1)
    axes.set_xscale("log")
    _scale_losses(axes)
    axes.set_xlabel("bytes that a worker sends in a step, on average; numbers at points are periods")
    axes.set_ylabel("final test loss, median over seeds")
    note = "; the level lines send nothing" if LEVELS.keys() & losses.keys() else ""
    axes.set_title(f"{task}, {workers} workers{note}", fontsize=11)
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=90)


def _family(method: str) -> str:
    """Return what the methods of one colour have in common, the beginning of their names."""
    return method.partition("-")[0]


def _scale_losses(axes: Axes) -> None:
    """Let the losses have a logarithmic axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(StrMethodFormatter("{x:g}"))
