"""The table of what a newcomer costs the others."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report.tables import spread, table

CASES: Mapping[str, str] = {
    "equal": "two workers start, equal seeds",
    "unequal": "two workers start, unequal seeds",
    "restarted": "one of two is killed and comes back",
    "third": "a third one comes, with an empty disk",
}
"""What each case is called in the table."""

COLUMNS = (
    "case",
    "version",
    "s until it trains",
    "longest pause of the others, s",
    "all pauses while it downloads, s",
    "an ordinary round, s",
    "received, over the model",
    "load",
)


def newcomer_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of results: means of each case and version.

    Pauses are those beyond an ordinary round of as many workers. At the start of a run, all wait until all train.
    """
    rows, versions = [], dict.fromkeys(result["version"] for result in results)
    for case, name in CASES.items():
        for version in versions:
            if found := [result for result in results if (result["case"], result["version"]) == (case, version)]:
                rows.append([name, version, *_cells(found)])
    return table(COLUMNS, rows)


def _cells(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the figures of results of one case and version."""

    def mean(key: str, form: str) -> str:
        return spread([result[key] for result in results if result[key] is not None], form)

    pauses = [mean("longest_s", "+.1f"), mean("all_s", "+.1f"), mean("ordinary_s", ".1f")]
    load = " ".join(f"{result['load']:.1f}" for result in results)
    return [mean("until_s", ".1f"), *pauses, mean("received", ".2f"), load]
