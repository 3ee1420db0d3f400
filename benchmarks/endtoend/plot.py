"""The picture of benchmarks/endtoend: loss or accuracy over seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.endtoend.tables import name_of
from benchmarks.methods import ALONE, ONE_MACHINE, ONE_MACHINE_SAMPLES
from benchmarks.report.plots import COLORS

SHOWN = {
    ONE_MACHINE: "#666666",
    ONE_MACHINE_SAMPLES: "#000000",
    ALONE: "#999999",
    **dict(
        zip(
            ("ddp", "ddp-powersgd1", "torchft-local-sgd", "leader-8bit", "default", "bytegrad", "ddp-powersgd2"),
            COLORS,
            strict=False,
        )
    ),
}
"""The methods that are shown, with their colors; more lines would not be told apart."""

LOWEST_ACCURACY = 0.6


def draw(rows: Sequence[Mapping[str, Any]], title: str, target: float, path: Path, *, losses: bool) -> None:
    """Draw the loss, or the accuracy, of the runs on one link to a PNG file, 800 pixels wide.

    There is a line for each seed; with two optimizers, only for the first one, and the task's own are dashed.
    """
    optimizers = {row["optimizer"] for row in rows}
    rows = [row for row in rows if row["method"] in SHOWN and (len(optimizers) == 1 or row["seed"] == 0)]
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    axes = figure.subplots()
    named = set()
    for row in sorted(rows, key=lambda r: (list(SHOWN).index(r["method"]), r["optimizer"])):
        name = name_of(row)
        label = None if name in named else name
        named.add(name)
        style = "--" if row["optimizer"] == "task" and len(optimizers) > 1 else "-"
        _, seconds, *scores = zip(*row["curve"], strict=True)
        axes.plot(seconds, scores[0 if losses else 1], style, color=SHOWN[row["method"]], linewidth=1.6, label=label)
    axes.axhline(target, color="black", linewidth=0.8)
    axes.set_xscale("log")
    if not losses:
        axes.set_ylim(LOWEST_ACCURACY, 1.0)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"test {'loss' if losses else 'accuracy'} of the models' average")
    axes.set_title(f"{title}\ntarget: {target:g}, the black line", fontsize=11)
    axes.grid(True, which="both", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
