"""The picture of benchmarks/endtoend: accuracy over seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report.plots import COLORS

SHOWN = (
    *("ddp", "ddp-powersgd1", "post-local-sgd", "torchft-local-sgd"),
    *("leader-8bit", "leader-8bit-delay", "local-8bit", "bytegrad"),
)
"""A colour for each, lsgd's solid and the baselines' dashed; more would not be told apart."""

LOWEST_ACCURACY = 0.6


def draw(rows: Sequence[Mapping[str, Any]], title: str, target: float, path: Path) -> None:
    """Draw the runs of one link to a PNG file, 800 pixels wide, with a line for each seed."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    named = set()
    for row in rows:
        if row["method"] not in SHOWN:
            continue
        label = None if row["method"] in named else row["method"]
        named.add(row["method"])
        index = SHOWN.index(row["method"])
        _, seconds, accuracies = zip(*row["curve"], strict=True)
        style = "--" if index < 4 else "-"
        axes.plot(seconds, accuracies, style, color=COLORS[index], linewidth=1.6, label=label)
    axes.axhline(target, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(LOWEST_ACCURACY, 1.0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy of the models' average")
    axes.set_title(f"{title}\nthe line is the target, {target}", fontsize=11)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(loc="lower right", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
