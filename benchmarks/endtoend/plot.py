"""The picture of benchmarks/endtoend: accuracy over seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.methods import ALONE, ONE_MACHINE
from benchmarks.report.plots import COLORS

STYLES = {
    ONE_MACHINE: ("#666666", "-."),
    ALONE: ("#666666", ":"),
    **{name: (COLORS[i], "--") for i, name in enumerate(("ddp", "ddp-powersgd1", "torchft-local-sgd"))},
    **{name: (COLORS[i + 3], "-") for i, name in enumerate(("leader-8bit", "default", "bytegrad"))},
}
"""The methods that are shown: lsgd's solid, the baselines dashed; more lines would not be told apart."""

LOWEST_ACCURACY = 0.6


def draw(rows: Sequence[Mapping[str, Any]], title: str, target: float, path: Path, *, losses: bool) -> None:
    """Draw the loss, or the accuracy, of the runs on one link to a PNG file, 800 pixels wide; a line for each seed."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    named = set()
    for row in sorted((r for r in rows if r["method"] in STYLES), key=lambda r: list(STYLES).index(r["method"])):
        label = None if row["method"] in named else row["method"]
        named.add(row["method"])
        color, style = STYLES[row["method"]]
        _, seconds, *scores = zip(*row["curve"], strict=True)
        axes.plot(seconds, scores[0 if losses else 1], style, color=color, linewidth=1.6, label=label)
    axes.axhline(target, color="black", linewidth=0.8)
    axes.set_xscale("log")
    if not losses:
        axes.set_ylim(LOWEST_ACCURACY, 1.0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"test {'loss' if losses else 'accuracy'} of the models' average")
    axes.set_title(f"{title}\nthe level line is the target, {target}", fontsize=11)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(loc="upper right" if losses else "lower right", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
