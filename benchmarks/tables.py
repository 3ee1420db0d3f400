"""Writes the tables in the pages of benchmarks/results, and README's, from JSON files: ``python -m benchmarks.tables``.

A table stands between ``<!-- table: WHAT -->`` and ``<!-- end of table -->``, where WHAT is one of these:

- ``network LINK NODES``: step times at one place (benchmarks/network),
- ``fastest baselines``: Leader SGD in 8 bits beside the fastest baseline of each place,
- ``convergence TASK``: steps to a target (benchmarks/convergence),
- ``convergence-NAME TASK``: final losses, with their errors (the same),
- ``endtoend``, ``endtoend-TASK [LOSS]``: seconds to the task's target, or to a loss (benchmarks/endtoend),
- ``endtoend-worth``: what two machines were worth, beside what ``lsgd estimate`` says (benchmarks/endtoend/worth.py),
- ``memory``: bytes per parameter (benchmarks/memory),
- ``gpu about``, ``gpu PART``: where scripts/gpu.sh ran, and what it found (benchmarks/gpu),
- ``support``: what is supported, by that and by what ran with which versions (benchmarks/versions.py),
- ``newcomer``: what a newcomer costs the others (benchmarks/newcomer).
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.convergence.tables import loss_table, task_table
from benchmarks.endtoend.tables import table_of
from benchmarks.endtoend.worth import worth_table
from benchmarks.gpu import tables as gpu
from benchmarks.memory.measure import memory_table
from benchmarks.network.tables import fastest_baselines, place_table
from benchmarks.newcomer.tables import newcomer_table
from benchmarks.report.about import argument_parser

RESULTS = Path(__file__).parent / "results"
PAGES = tuple(sorted(RESULTS.glob("*.md")))
WRITTEN = (*PAGES, RESULTS.parents[1] / "README.md")
"""What has tables."""
TABLE = re.compile(r"(<!-- table: (.+?) -->\n)(?:(?!<!-- table: ).)*?(?=<!-- end of table -->)", re.DOTALL)


def made_anew(text: str, page: Path) -> str:
    """Return the text of a page with its tables as the JSON files in benchmarks/results have them.

    Raises:
        ValueError: the page has a table that there is no result or no rule for.
    """
    return TABLE.sub(lambda found: f"{found[1]}\n{_table(found[2], page)}\n\n", text)


def _table(what: str, page: Path) -> str:
    match what.split():
        case ["network", link, nodes]:
            found = place_table(_results("network"), int(nodes), link)
        case ["fastest", "baselines"]:
            found = fastest_baselines(_results("network"))
        case ["convergence", task]:
            found = task_table(_results("convergence"), task)
        case [benchmark, task] if benchmark.startswith("convergence-"):
            found = loss_table(_results(benchmark), task)
        case ["endtoend-worth"]:
            found = worth_table([_found(path.stem) for path in sorted(RESULTS.glob("endtoend-*.json"))])
        case [benchmark, *target] if benchmark.startswith("endtoend"):
            found = table_of(_results(benchmark), *map(float, target))
        case ["memory"]:
            found = memory_table(_results("memory"))
        case ["gpu", "about"]:
            found = gpu.about_of(_found("gpu"))
        case ["gpu", part]:
            found = gpu.table_of(_results("gpu"), int(part))
        case ["support"]:
            found = gpu.support_of(_found("gpu"), _found("versions"))
        case ["newcomer"]:
            found = newcomer_table(_results("newcomer"))
        case _:
            raise ValueError(f"{page}: no table is called {what!r}; see python -m benchmarks.tables --help")
    if found.count("\n") < 2:
        raise ValueError(f"{page}: {RESULTS} has no results for the table {what!r}; run its benchmark")
    return found


def _results(benchmark: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _found(benchmark)["results"]
    return found


@cache
def _found(benchmark: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{benchmark}.json").read_text())
    return found


def write_pages() -> None:
    """Write the tables."""
    for page in WRITTEN:
        page.write_text(made_anew(page.read_text(), page))


def main() -> None:
    """Write the tables."""
    argument_parser("benchmarks.tables", __doc__).parse_args()
    write_pages()


if __name__ == "__main__":
    main()
