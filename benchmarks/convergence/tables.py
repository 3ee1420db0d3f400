"""The tables of benchmarks/convergence, made from its results and those of benchmarks/network."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.methods import ALL, ONE_MACHINE, ONE_MACHINE_SAMPLES, PERIODIC
from benchmarks.report.tables import number, spread, standard_error, table, worth_in_steps

REFERENCES = ("ddp", "allreduce")  # the first that was run; simulated, the second is exactly the first
COLUMNS = (
    *("method", "period", "steps to the target", "reached it", "over DDP's"),
    *("final accuracy", "points over DDP's"),
)
COLUMNS_OF_LOSS = (
    *("method", "period", "learning rate times", "final loss, each seed", "over DDP's, %", "± seeds", "± windows"),
    *("kB a step", "DDP's over it"),
)
COLUMNS_OF_WORTH = ("method", "period", "machines' worth")
LEAST_WORTH = 0.6
"""What each further worker must add, in machines, to synchronous training of a task that can show a gain."""

LINKS_MBIT = {"1 Gbit": 1000, "100 Mbit": 100, "10 Mbit": 10}
COLUMNS_OF_TIME = ("ms a step", "s to the target", "DDP's over it")
Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows, network: Mapping[str, Any] | None, link: str, workers: int) -> str:
    """Return two tables for each task, with a line for each method and period: steps, then losses and bytes.

    Args:
        rows: the results.
        network: the file of benchmarks.network; None: no times.
        link: whose step times are taken.
        workers: how many there are.
    """
    tasks = dict.fromkeys(row["task"] for row in rows)
    return "\n\n".join(
        f"**{task}**\n\n{task_table(rows, task, network, link, workers)}\n\n{loss_table(rows, task)}"
        f"\n\n{worth_table(rows, task, workers)}"
        for task in tasks
    )


def worth_table(rows: Rows, task: str, workers: int) -> str:
    """Return the table of what each method is worth in machines, and whether the task can show it.

    A method is worth w machines if one machine needs w times the steps of a worker for its final loss. One machine was
    run with as many steps as a worker and with as many as all of them. Between these, the loss is taken to fall in
    proportion to the logarithm of the steps.
    """
    losses: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if row["task"] == task:
            losses.setdefault((row["method"], row["period"]), {})[row["seed"]] = row["final_loss"]
    one, more = losses.pop((ONE_MACHINE, 0), {}), losses.pop((ONE_MACHINE_SAMPLES, 0), {})
    worth = {}
    for place in sorted(losses, key=_place):
        seeds = sorted(losses[place].keys() & one.keys() & more.keys())
        found = [worth_in_steps(losses[place][s], one[s], more[s], workers) for s in seeds if more[s] < one[s]]
        if found:
            worth[place] = found
    if not worth:
        return (
            "One machine was not run with the steps of one worker and of all, so nothing says what exchanges are worth."
        )
    lines = [(method, str(period or ""), spread(found, ".2f")) for (method, period), found in worth.items()]
    return f"{table(COLUMNS_OF_WORTH, lines)}\n\n{_verdict(worth, workers)}"


def _verdict(worth: Mapping[tuple[str, int], Sequence[float]], workers: int) -> str:
    """Say whether synchronous training is so much better than one machine that exchanges can be worth something."""
    machines = next((statistics.mean(worth[name, 0]) for name in REFERENCES if (name, 0) in worth), None)
    if machines is None:
        return "Synchronous training was not run, so nothing says how much exchanges can be worth here."
    least = 1 + LEAST_WORTH * (workers - 1)
    able = "can show" if machines >= least else "CANNOT show"
    return (
        f"Synchronous training of {workers} workers is worth {machines:.2f} machines. From {least:.1f} on a task can "
        f"show what exchanges are worth: this one {able} it."
    )


def task_table(
    rows: Rows, task: str, network: Mapping[str, Any] | None = None, link: str = "", workers: int = 0
) -> str:
    """Return the table of one task; arguments as in :func:`tables`."""
    columns = [*COLUMNS, *(COLUMNS_OF_TIME if network else ())]
    here = [row for row in rows if row["task"] == task]
    if not here:
        return table(columns, [])
    runs = pd.DataFrame(here)
    reference_method = _reference(runs)
    reference = runs[runs["method"] == reference_method].set_index("seed")  # runs of equal seed are compared
    runs["ratio"] = runs["steps_to_target"] / runs["seed"].map(reference["steps_to_target"])
    runs["points"] = (runs["final_accuracy"] - runs["seed"].map(reference["final_accuracy"])) * 100
    reference_s = _to_target_s(reference, _step_s(network, link, workers, reference_method, 0))
    lines = []
    for method, period in sorted({(row["method"], row["period"]) for row in here}, key=_place):
        of_one = runs[(runs["method"] == method) & (runs["period"] == period)]
        found = {
            name: of_one[name].dropna().tolist() for name in ("steps_to_target", "ratio", "final_accuracy", "points")
        }
        line = [method, str(period or ""), *_steps(method == reference_method, len(of_one), found)]
        if network:
            step_s = _step_s(network, link, workers, method, period)
            line += _times(step_s, _to_target_s(of_one, step_s), reference_s)
        lines.append(line)
    return table(columns, lines)


def loss_table(rows: Rows, task: str) -> str:
    """Return the table of a task's losses and bytes, with the seconds to the target on links, which are computed.

    A loss is compared with that of the same seed on the same test data. Beside the mean stand its two errors, in points
    of per cent: the standard error over the seeds, and that of the test data, from its parts (the ruler's own).
    A step takes the processor time of the task, the least that was measured, and then its bytes over the bandwidth.
    """
    columns = [*COLUMNS_OF_LOSS, *(f"computed s to the target, {link}" for link in LINKS_MBIT)]
    here = [row for row in rows if row["task"] == task]
    if not here:
        return table(columns, [])
    runs = pd.DataFrame(here).reindex(columns=[*here[0], *({"sent_nbytes", "compute_s", "parts"} - here[0].keys())])
    reference_method = _reference(runs)
    reference = runs[runs["method"] == reference_method].set_index("seed")
    runs["ratio"] = runs["final_loss"] / runs["seed"].map(reference["final_loss"])
    compute_s, reference_nbytes = runs["compute_s"].min(), reference["sent_nbytes"].median()
    lines = []
    for method, period in sorted({(row["method"], row["period"]) for row in here}, key=_place):
        of_one = runs[(runs["method"] == method) & (runs["period"] == period)]
        nbytes = of_one["sent_nbytes"].median()
        steps = _median_steps(of_one)
        seconds = [steps * (compute_s + nbytes * 8 / (mbit * 1e6)) for mbit in LINKS_MBIT.values()]
        lines.append(
            [
                method,
                str(period or ""),
                " or ".join(f"{times:g}" for times in sorted(set(of_one["learning_rate_times"]))),
                ", ".join(f"{loss:.4f}" for loss in of_one.sort_values("seed")["final_loss"]),
                *(("", "", "") if method == reference_method else _over(of_one, reference)),
                number(nbytes / 1e3, ".2f"),
                number(reference_nbytes / nbytes if nbytes else math.nan, ".0f"),
                *(number(value, ".1f", "never" if math.isinf(steps) else "") for value in seconds),
            ]
        )
    return table(columns, lines)


def _over(of_one: pd.DataFrame, reference: pd.DataFrame) -> Sequence[str]:
    """Return by how many per cent a method's losses lie over those of the reference, and both errors of that."""
    over = [100 * (ratio - 1) for ratio in of_one["ratio"].dropna()]
    theirs = reference.to_dict("index")
    differences = [
        [
            100 * (mine - its) / theirs[seed]["final_loss"]
            for mine, its in zip(parts, theirs[seed]["parts"], strict=True)
        ]
        for seed, parts in zip(of_one["seed"], of_one["parts"], strict=True)
        if seed in theirs and isinstance(parts, list) and isinstance(theirs[seed]["parts"], list)  # older results: none
    ]
    return (
        number(statistics.mean(over) if over else math.nan, "+.2f"),
        number(standard_error(over), ".2f"),
        number(standard_error([statistics.mean(each) for each in zip(*differences, strict=True)]), ".2f"),
    )


def _median_steps(of_one: pd.DataFrame) -> float:
    """Return the median over the seeds of the steps to the target; infinite: never."""
    return float(of_one["steps_to_target"].astype(float).fillna(math.inf).median())


def _to_target_s(of_one: pd.DataFrame, step_s: float | None) -> float:
    """Return the median over the seeds of the seconds to the target; infinite: never; NaN: a step was not measured."""
    return math.nan if step_s is None else _median_steps(of_one) * step_s


def _reference(runs: pd.DataFrame) -> str:
    return next((method for method in REFERENCES if (runs["method"] == method).any()), REFERENCES[0])


def _place(line: tuple[str, int]) -> tuple[int, int]:
    method, period = line
    return (ALL.index(method), period)


def _step_s(network: Mapping[str, Any] | None, link: str, workers: int, method: str, period: int) -> float | None:
    """Return the seconds of a step; None if they were not measured with this period."""
    if network is None or (method in PERIODIC and network["settings"]["period"] != period):
        return None
    here = [row for row in network["results"] if (row["link"], row["nodes"]) == (link, workers)]
    found = [row["step_s"] for row in here if row["method"] == method]
    return statistics.median(found) if found else None


def _steps(is_reference: bool, runs: int, found: Mapping[str, list[float]]) -> Sequence[str]:
    """Return the cells that need no network; ``found`` has the numbers of those runs that have them."""
    return (
        spread(found["steps_to_target"], ".0f") or "never",
        f"{len(found['steps_to_target'])} of {runs}",
        "1.00" if is_reference else spread(found["ratio"], ".2f"),
        spread(found["final_accuracy"], ".4f"),
        "" if is_reference else spread(found["points"], "+.2f"),
    )


def _times(step_s: float | None, to_target_s: float, reference_s: float) -> Sequence[str]:
    """Return the cells that do."""
    if step_s is None:
        return ("", "", "")
    speed = reference_s / to_target_s if math.isfinite(to_target_s) else math.nan
    return (f"{step_s * 1e3:.1f}", number(to_target_s, ".1f", "never"), number(speed, ".2f"))
