"""What two machines were worth beside one, and what ``lsgd estimate`` says: the table of ``worth``.

A method is worth w machines if one machine needs w times the seconds for its final loss. One machine was run with as
many steps as a worker, and with as many as both. Between these, the loss is taken to fall with the logarithm of the
steps. Both hosts of the benchmark share two cores, which real machines do not: where workers that exchange nothing
(``alone``) were timed beside one machine in the same hour, the steps of the methods are divided by that ratio.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.endtoend.runs import DEFAULT, WAITING
from benchmarks.endtoend.tables import name_of
from benchmarks.methods import ALONE, ONE_MACHINE, ONE_MACHINE_SAMPLES
from benchmarks.report.tables import table, worth_in_steps
from benchmarks.testbed import LINKS
from benchmarks.workloads import TASKS
from lsgd.plan.estimate import Link, Worth, worth_of

METHODS = (DEFAULT, WAITING)
"""Those that leave the period to the servers, as the estimate does."""

COLUMNS = (
    *("training, on two machines", "link", "parameters", "ms a step", "beside", "seeds"),
    *("worth in steps", "predicted", "worth", "predicted", "off"),
)

Rows = Sequence[Mapping[str, Any]]


class Place(NamedTuple):
    """What rows have to have in common to be compared."""

    task: str
    steps: int
    optimizer: str
    learning_rate_times: float


class Compared(NamedTuple):
    """What two machines were worth with a method, and what the estimate says."""

    name: str
    link: str
    parameters: int
    step_s: float
    beside: float
    seeds: int
    in_steps: float
    worth: float
    predicted: Worth

    @property
    def off(self) -> float:
        """By which share of what was measured the estimate is too high."""
        return self.predicted.times / self.worth - 1


def worth_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, from the contents of result files."""
    return table(COLUMNS, [_line(each) for each in compared(results)])


def compared(results: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Return all methods beside which one machine was run.

    Losses of one machine are taken from any file of the same task; times from the method's own file, because machines
    differ from day to day.
    """
    every = [(each, row) for each in results for row in _rows(each)]
    lines = []
    for found in results:
        rows = _rows(found)
        for place, link in dict.fromkeys((_place(found, row), row["link"]) for row in rows):
            for method in METHODS:
                ours = [
                    row for row in rows if (_place(found, row), row["link"], row["method"]) == (place, link, method)
                ]
                lines += _compared(place, link, ours, rows, every)
    return sorted(lines, key=lambda each: (each.parameters, each.name, each.link))


def _line(each: Compared) -> Sequence[str]:
    return (
        *(each.name, each.link, f"{each.parameters:,}", f"{1e3 * each.step_s:.0f}"),
        *(f"{each.beside:.2f}" if each.beside != 1 else "", str(each.seeds)),
        *(f"{each.in_steps:.2f}", f"{each.predicted.times * each.predicted.slower:.2f}"),
        *(f"{each.worth:.2f}", f"{each.predicted.times:.2f}", f"{100 * each.off:+.0f} %"),
    )


def _rows(found: Mapping[str, Any]) -> Rows:
    return [{"optimizer": "task", "learning_rate_times": 1.0, **row} for row in found["results"]]


def _place(found: Mapping[str, Any], row: Mapping[str, Any]) -> Place:
    settings = found["settings"]
    return Place(settings["task"], settings["steps"], row["optimizer"], row["learning_rate_times"])


def _compared(
    place: Place, link: str, ours: Rows, same_day: Rows, every: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[Compared]:
    """Compare a method's rows, unless one machine was not run beside it."""

    def losses(method: str) -> list[float]:
        return [row["final_loss"] for found, row in every if row["method"] == method and _place(found, row) == place]

    one_s = [r["step_s"] for r in same_day if r["method"] == ONE_MACHINE_SAMPLES and r["optimizer"] == place.optimizer]
    less, more = losses(ONE_MACHINE), losses(ONE_MACHINE_SAMPLES)
    if not (ours and one_s and less and more):
        return []
    step_s, beside = statistics.median(one_s), _beside(place, every)
    final = statistics.mean(row["final_loss"] for row in ours)
    in_steps = worth_in_steps(final, statistics.mean(less), statistics.mean(more), 2)
    slower = statistics.median(row["step_s"] for row in ours) / step_s / beside
    name, parameters = f"`{place.task}`, {name_of(ours[0])}", _parameters(place.task)
    said = _predicted(place, link, step_s, ours[0]["method"])
    return [Compared(name, link, parameters, step_s, beside, len(ours), in_steps, in_steps / slower, said)]


def _predicted(place: Place, link: str, step_s: float, method: str) -> Worth:
    mbit, delay_ms = LINKS[link]
    assert mbit is not None
    wire = Link(mbit * 1e6, delay_ms / 1e3)
    muon = place.optimizer == "muon" and method == DEFAULT
    return worth_of(_parameters(place.task), step_s, wire, 2 * place.steps, muon=muon)[0]


def _parameters(task: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in TASKS[task]().model().parameters())


def _beside(place: Place, every: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float:
    """Return how many times as long a step takes beside another busy host, without an exchange; 1: not measured."""

    def seconds(method: str) -> list[float]:
        return [
            row["step_s"]
            for found, row in every
            if found["settings"]["task"] == place.task
            and row["optimizer"] == place.optimizer
            and row["method"] == method
            and any(each["method"] == ALONE for each in found["results"])
        ]

    both, one = seconds(ALONE), seconds(ONE_MACHINE_SAMPLES)
    return statistics.median(both) / statistics.median(one) if both and one else 1.0
