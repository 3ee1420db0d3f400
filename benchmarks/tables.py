"""Writes the tables in docs/performance from the results in docs/results: ``python -m benchmarks.tables``.

A table stands between ``<!-- table: WHAT -->`` and ``<!-- end of table -->``, where WHAT is one of these:

- ``network LINK NODES``: step times at one place (benchmarks/network.py),
- ``fastest peers``: Leader SGD in 8 bits beside the fastest peer of each place,
- ``convergence TASK``: steps to a target (benchmarks/convergence.py),
- ``endtoend``: seconds to a target (benchmarks/endtoend.py).
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import _convergence_tables, _network_tables, endtoend
from benchmarks._about import argument_parser

DOCS = Path(__file__).parents[1] / "docs"
PAGES = tuple(sorted((DOCS / "performance").glob("*.md")))
TABLE = re.compile(r"(<!-- table: (.+?) -->\n)(?:(?!<!-- table: ).)*?(?=<!-- end of table -->)", re.DOTALL)


def made_anew(text: str, page: Path) -> str:
    """Return the text of a page with its tables as the results in docs/results have them.

    Raises:
        ValueError: the page has a table that there is no result or no rule for.
    """
    return TABLE.sub(lambda found: f"{found[1]}\n{_table(found[2], page)}\n\n", text)


def _table(what: str, page: Path) -> str:
    match what.split():
        case ["network", link, nodes]:
            places = _network_tables.by_place(_results("network"))
            found = _network_tables.place_table(places.get((int(nodes), link), []))
        case ["fastest", "peers"]:
            found = _network_tables.fastest_peers(_results("network"))
        case ["convergence", task]:
            found = _convergence_tables.task_table(_results("convergence"), task)
        case ["endtoend"]:
            found = endtoend.table_of(_results("endtoend"))
        case _:
            raise ValueError(f"{page}: no table is called {what!r}; see python -m benchmarks.tables --help")
    if found.count("\n") < 2:
        raise ValueError(
            f"{page}: {DOCS / 'results'} has no results for the table {what!r}; run its benchmark"
        )
    return found


@cache
def _results(benchmark: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DOCS / "results" / f"{benchmark}.json").read_text())["results"]
    return found


def main() -> None:
    """Write the tables."""
    argument_parser("benchmarks.tables", __doc__).parse_args()
    for page in PAGES:
        page.write_text(made_anew(page.read_text(), page))


if __name__ == "__main__":
    main()
