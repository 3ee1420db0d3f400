"""The learning curve of a run as a picture, from the state that the global server tells."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999999")
"""Told apart by the colour-blind too (Okabe and Ito)."""


def draw(status: dict[str, Any], path: Path) -> None:
    """Draw each worker's loss over the iterations of all, and below it who led when, to a PNG file."""
    workers = [member["worker"] for member in status["members"]]
    colors = {worker: COLORS[i % len(COLORS)] for i, worker in enumerate(workers)}
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    heights = [5, 0.35 + 0.3 * len(_levels(status))]
    losses, leaders = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw_losses(losses, status, colors)
    _draw_leaders(leaders, status, colors)
    handles = [Line2D([], [], color=color, label=worker) for worker, color in colors.items()]
    handles.append(Line2D([], [], color="black", marker="o", linestyle="", label="a new leader of all"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)), frameon=False)
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Axes, status: dict[str, Any], colors: dict[str, str]) -> None:
    for worker, color in colors.items():
        points = [(e["count"], e["losses"].get(worker)) for e in status["leaders"]]
        points = [(count, loss) for count, loss in points if loss is not None]
        axes.plot([count for count, _ in points], [loss for _, loss in points], color=color, linewidth=1.3)
    changes = [e for e in _changes(status, "global") if e["losses"].get(e["worker"]) is not None]
    for election in changes:
        loss = election["losses"][election["worker"]]
        axes.plot(election["count"], loss, "o", color=colors.get(election["worker"], "black"), markersize=5)
    axes.set_yscale("log")
    axes.set_ylabel("training loss, mean of the last batches")
    axes.grid(True, which="major", alpha=0.3)
    axes.set_title(
        f"{len(colors)} workers in {status['nodes']} node{'s' * (status['nodes'] != 1)}: "
        f"{status['count']} iterations, {status['rounds_local']} local and {status['rounds_global']} global rounds",
        fontsize=11,
    )


def _draw_leaders(axes: Axes, status: dict[str, Any], colors: dict[str, str]) -> None:
    """Draw a bar for each level of leaders, in the colour of the worker that leads."""
    levels = _levels(status)
    for height, (scope, node) in enumerate(levels):
        elections = [e for e in status["leaders"] if (e["scope"], e["node"]) == (scope, node)]
        starts = [e["count"] for e in elections]
        ends = [*starts[1:], status["count"]]
        spans = [(start, end - start) for start, end in zip(starts, ends, strict=True)]
        axes.broken_barh(spans, (height - 0.4, 0.8), facecolors=[colors.get(e["worker"], "black") for e in elections])
    axes.set_yticks(range(len(levels)), [_level_name(*level) for level in levels])
    axes.set_ylim(max(len(levels), 1) - 0.5, -0.5)
    axes.set_xlim(0, max(status["count"], 1))
    axes.set_xlabel("iterations of all workers")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _levels(status: dict[str, Any]) -> list[tuple[str, int]]:
    """Return (scope, node) of every kind of round that took place, that of all workers first."""
    return sorted({(e["scope"], e["node"]) for e in status["leaders"]})


def _level_name(scope: str, node: int) -> str:
    return "leader of all" if scope == "global" else f"leader of node{node}"


def _changes(status: dict[str, Any], scope: str) -> list[dict[str, Any]]:
    """Return the elections of ``scope`` that another worker won than the one before."""
    elections = [e for e in status["leaders"] if e["scope"] == scope]
    return [e for i, e in enumerate(elections) if i == 0 or e["worker"] != elections[i - 1]["worker"]]
