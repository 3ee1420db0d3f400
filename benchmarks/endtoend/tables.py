"""The table of benchmarks/endtoend, made from its results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.methods import LABELS
from benchmarks.report.tables import number, table

REFERENCE = "ddp"
COLUMNS = (
    *("method", "seeds", "steps", "s to target", "range", "over DDP", "steps to target"),
    *("ms a step", "over DDP", "MB a step", "final loss", "final accuracy"),
)


def name_of(row: Mapping[str, Any]) -> str:
    """Return what a reader finds a method under, with its optimizer if that is not the task's own."""
    label: str = LABELS.get(row["method"], row["method"])
    rate = f", rate times {row['learning_rate_times']:g}" if row["learning_rate_times"] != 1 else ""
    return label + (f", Muon{rate}" if row["optimizer"] == "muon" else rate)


def table_of(rows: Sequence[Mapping[str, Any]], target_loss: float | None = None) -> str:
    """Return the Markdown table of the runs on one link: medians over the seeds, and the range of the seconds.

    Ratios are those to DistributedDataParallel with the row's optimizer and learning rate, where that was run.
    ``target_loss`` replaces the target of the task.
    """
    if not rows:
        return table(COLUMNS, [])
    rows = [{"optimizer": "task", "learning_rate_times": 1.0, **row} for row in rows]
    references = {name_of(row): name_of({**row, "method": REFERENCE}) for row in rows}
    runs = pd.DataFrame([{**row, **_reached(row, target_loss), "method": name_of(row)} for row in rows])
    runs = runs.drop(columns=["link", "curve", "parts", "optimizer", "learning_rate_times"], errors="ignore")
    never = ["seconds_to_target", "steps_to_target"]
    runs[never] = runs[never].astype(float).fillna(math.inf)
    runs["final_loss"] = runs["final_loss"].astype(float)  # older results have none
    of_method = runs.groupby("method", sort=False)
    medians = of_method.median()
    medians["seeds"] = of_method.size()
    medians["first"], medians["last"] = (of_method["seconds_to_target"].agg(how) for how in ("min", "max"))
    of_references = medians.reindex([references[name] for name in medians.index]).to_dict("records")
    shown = medians.reset_index().to_dict("records")
    return table(COLUMNS, [_line(*pair) for pair in zip(shown, of_references, strict=True)])


def _reached(row: Mapping[str, Any], target_loss: float | None) -> dict[str, Any]:
    """Return when a run has reached a loss; nothing if the task's target counts, which the row has."""
    if target_loss is None:
        return {}
    step, seconds, *_ = next((point for point in row["curve"] if point[2] <= target_loss), (None, None))
    return {"steps_to_target": step, "seconds_to_target": seconds}


def _line(found: Mapping[Any, Any], reference: Mapping[Any, Any]) -> Sequence[str]:
    """Return the cells of a method with these medians, beside those of the reference."""
    seconds, steps = found["seconds_to_target"], found["steps_to_target"]
    first, last = (number(found[name], ".1f", "never") for name in ("first", "last"))
    ratio = reference["seconds_to_target"] / seconds if math.isfinite(seconds) else math.nan
    return (
        found["method"],
        f"{found['seeds']:.0f}",
        f"{found['steps']:.0f}",
        number(seconds, ".1f", "never"),
        f"{first} to {last}" if found["seeds"] > 1 else "",
        number(ratio, ".2f"),
        number(steps, ".0f"),
        f"{found['step_s'] * 1e3:.1f}",
        number(reference["step_s"] / found["step_s"], ".2f"),
        f"{found['sent_nbytes'] / 1e6:.3f}",
        number(found["final_loss"], ".3f"),
        f"{found['final_accuracy']:.4f}",
    )
