"""The table of programs in docs/guides/programs.md."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.programs.environment import ROOT
from benchmarks.programs.program import SCRIPTS, Program, programs
from benchmarks.report.tables import table
from lsgd.check.verdicts import POINTS

PAGE = ROOT / "docs" / "guides" / "programs.md"
_TABLE = re.compile(r"^\| program \|.*?\n(?=\n|\Z)", re.M | re.S)
COLUMNS = (
    *("program", "what", "lines", "figure", "alone", "two workers", "bytes a round"),
    *("points 1 to 9", "checked", "versions"),
)
SIGNS: Mapping[str, str] = {"right": "✓", "wrong": "✗", "unjudged": "-"}
NOT_ASKED = "·"

Row = Mapping[str, Any]


def write(rows: Sequence[Row]) -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    if not _TABLE.search(text):
        raise ValueError(f"{PAGE} has no table that begins with '| program |'")
    PAGE.write_text(_TABLE.sub(lambda _: lines(rows) + "\n", text, count=1), encoding="utf-8")


def lines(rows: Sequence[Row]) -> str:
    """Return the table."""
    every: dict[str, dict[str, Row]] = {}
    for row in rows:
        every.setdefault(row["program"], {})[row["part"]] = row
    found = [_cells(each, every.get(each.name, {})) for each in programs()]
    return re.sub(r"\| ---: \| ---: \|", "| --- | ---: |", table(COLUMNS, found), count=1)


def _cells(program: Program, parts: Mapping[str, Row]) -> list[str]:
    link = f"[{program.name}](../../{SCRIPTS.relative_to(ROOT)}/{program.name}.py)"
    added, replaced = program.changes
    what = program.title + (f". {program.says('Remark')}" if program.says("Remark") else "")
    if program.says("Unable"):
        return [link, f"{program.title}. {program.says('Unable')}", *[""] * (len(COLUMNS) - 2)]
    current = {name: row for name, row in parts.items() if row["script"] == program.digest}
    alone, checked = current.get("alone"), current.get("check")
    two = current.get("two") or checked
    versions: Mapping[str, str] = next(iter(current.values()), {"versions": {}})["versions"]
    return [
        link,
        what,
        f"+{added}" + (f" ~{replaced}" if replaced else ""),
        program.says("Figure", "held-out loss"),
        *(f"{row['figure']:.4g}" if row else "" for row in (alone, two)),
        nbytes(two["round_nbytes"]) if two and two["round_nbytes"] is not None else "",
        _signs(checked["points"]) if checked else "",
        checked["date"] if checked else "",
        ", ".join(f"{name} {version}" for name, version in versions.items() if name != "torch"),
    ]


def nbytes(value: float) -> str:
    """Return a number of bytes in words."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def _signs(points: Mapping[str, str]) -> str:
    return "".join(SIGNS[points[str(point)]] if str(point) in points else NOT_ASKED for point in POINTS)
