"""Markdown tables, and the numbers in them."""

import math
import statistics
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are figures."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float, form: str, missing: str = "") -> str:
    """Return a number in this format, and what stands for one that is missing (NaN) or never was (infinite)."""
    return format(value, form) if math.isfinite(value) else missing


def worth_in_steps(loss: float, one: float, more: float, workers: int) -> float:
    """Return how many times the steps of a worker one machine needs for a loss.

    ``one`` and ``more``: its losses after as many steps as a worker, and as all of them. Between these, the loss is
    taken to fall in proportion to the logarithm of the steps.
    """
    return float(workers ** ((one - loss) / (one - more)))


def spread(values: Sequence[float], form: str) -> str:
    """Return mean ± standard deviation, the mean alone of one value, nothing of none."""
    if not len(values):
        return ""
    mean = format(statistics.mean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; not a number for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
