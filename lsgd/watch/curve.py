"""The learning curve of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lsgd.means import mean_of_finite
from lsgd.watch.compare import Run
from lsgd.watch.view import HELD_OUT, node_and_index

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999999")
"""Safe for color blindness (Okabe and Ito). If there are more workers than colors, all are gray, with their mean."""

GRAY, BLACK = "#b5b5b5", "#222222"

DASHES = ("--", ":", "-.")
"""Of losses on held-out data."""

LOG_FROM = 10.0
"""The axis is logarithmic if the largest loss is at least this many times the smallest."""

Rounds = Sequence[dict[str, Any]]
"""The lines of ``metrics.jsonl``."""


def draw(result: dict[str, Any], rounds: Rounds, path: Path) -> None:
    """Draw each worker's loss over the run's iterations, and below it the leader over time, to a PNG file.

    A line has a gap where its worker took part in no round, or had no finite loss. Losses on held-out data are dashed.
    Leaders are shown if others have taken over something of theirs. ``result`` is the content of ``result.json``; there
    is at least one round.
    """
    workers = sorted({worker for e in rounds for worker in e["losses"]}, key=node_and_index)
    many = len(workers) > len(COLORS)
    colors = {worker: GRAY if many else COLORS[i] for i, worker in enumerate(workers)}
    led = set() if many else {(e["scope"], e["node"]) for e in rounds if e["worker"]}
    levels = sorted(led)  # that of all workers first
    figure = Figure(figsize=(9, 5.0 + 0.3 * len(levels)), layout="constrained")
    if levels:
        losses, leaders = figure.subplots(2, 1, sharex=True, height_ratios=[5, 0.35 + 0.3 * len(levels)])
        _draw_leaders(leaders, rounds, levels, colors, _end(result, rounds))
    else:
        losses = leaders = figure.subplots()
    handles = _draw_losses(losses, rounds, colors, many=many)
    losses.set_xlim(rounds[0]["count"], max(_end(result, rounds), rounds[0]["count"] + 1))
    leaders.set_xlabel("iterations of all workers together")
    leaders.xaxis.set_major_locator(MaxNLocator(integer=True))
    leaders.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    name = path.parent.name.encode(errors="replace").decode()  # a folder's name may be no UTF-8
    losses.set_title(f"{name}: {_title(result)}", fontsize=11, parse_math=False)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    figure.savefig(path, dpi=120)


def draw_beside(runs: Sequence[Run], path: Path) -> None:
    """Draw the losses of runs over iterations and over seconds to a PNG file: each round's, and their mean."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for place_, (axes, what) in enumerate(zip(figure.subplots(1, 2), ("iterations", "seconds"), strict=True)):
        for number, run in enumerate(runs):
            at, color = [point[place_] for point in run.points], COLORS[number % len(COLORS)]
            axes.plot(at, [point[2] for point in run.points], color=color, linewidth=0.8, alpha=0.3)
            axes.plot(at, np.array(run.losses, dtype=float), color=color, label=run.name, linewidth=1.8)
        axes.set_xlabel(what)
        _finish(axes, "training loss, mean of the workers", [point[2] for run in runs for point in run.points])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def _title(result: dict[str, Any]) -> str:
    members = len(result.get("members", []))
    facts = [
        str(result.get("algorithm", "")),
        f"{members} worker{'s' * (members != 1)}",
        f"{result.get('count', 0):,} iterations",
        f"{result.get('rounds_global', 0):,} global rounds",
        f"{result.get('seconds', 0.0):,.0f} s",
        str(result.get("state", "")),
    ]
    return ", ".join(filter(None, facts))


def _draw_losses(axes: Axes, rounds: Rounds, colors: dict[str, str], *, many: bool) -> list[Line2D]:
    """Draw a line for each worker; return the legend's handles."""
    seen: list[float] = []
    for worker, color in colors.items():
        points = [(e["count"], e["losses"].get(worker)) for e in rounds if e["node"] in (-1, node_and_index(worker)[0])]
        seen += [loss for _, loss in points if loss is not None]
        losses = np.array([loss for _, loss in points], dtype=float)  # None, as NaN, leaves a gap
        width, marker = (0.8, "") if many else (1.5, "o" if len(rounds) < 40 else "")
        counts = [count for count, _ in points]
        axes.plot(counts, losses, color=color, linewidth=width, marker=marker, markersize=3.5, clip_on=False)
    handles = [Line2D([], [], color=color, label=worker, linewidth=2) for worker, color in colors.items()]
    if many:
        shared = [e for e in rounds if e["scope"] == "global"]
        means = np.array([mean_of_finite(e["losses"].values()) for e in shared], dtype=float)  # NaN leaves a gap
        axes.plot([e["count"] for e in shared], means, color=BLACK, linewidth=1.8)
        labels = {GRAY: f"each of {len(colors)} workers", BLACK: "their mean"}
        handles = [Line2D([], [], color=color, label=label, linewidth=2) for color, label in labels.items()]
    told = [(name, mean) for e in rounds for name, mean in e.get("means", {}).items() if HELD_OUT.search(name)]
    held_out = list(dict.fromkeys(name for name, mean in told if mean is not None))
    for number, name in enumerate(held_out):
        values = [(e["count"], mean) for e in rounds if (mean := e.get("means", {}).get(name)) is not None]
        seen += [mean for _, mean in values]
        label, style = f"{name}, averaged by the script", DASHES[number % len(DASHES)]
        handles += axes.plot(*zip(*values, strict=True), color=BLACK, linestyle=style, label=label)
    _finish(axes, "loss" if held_out else "training loss", seen)
    if not seen:
        axes.text(0.5, 0.5, "no worker has reported a finite loss", transform=axes.transAxes, ha="center")
    return handles


def _finish(axes: Axes, label: str, seen: Sequence[float]) -> None:
    """Give the axis of losses its label, its grid and, for values that are far apart, a logarithmic scale."""
    if seen and min(seen) > 0 and max(seen) >= LOG_FROM * min(seen):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_leaders(
    axes: Axes, rounds: Rounds, levels: Sequence[tuple[str, int]], colors: dict[str, str], end: int
) -> None:
    for height, (scope, node) in enumerate(levels):
        elections = [e for e in rounds if (e["scope"], e["node"]) == (scope, node)]
        starts = [e["count"] for e in elections]
        spans = [(start, stop - start) for start, stop in zip(starts, [*starts[1:], end], strict=True)]
        axes.broken_barh(spans, (height - 0.4, 0.8), facecolors=[colors.get(e["worker"], BLACK) for e in elections])
    axes.set_yticks(range(len(levels)), ["leader" if s == "global" else f"leader of node{n}" for s, n in levels])
    axes.set_ylim(len(levels) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _end(result: dict[str, Any], rounds: Rounds) -> int:
    return max(int(result.get("count", 0)), int(rounds[-1]["count"]))
