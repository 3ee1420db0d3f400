"""The tables of what ran: in the terminal, on the page of results, and README's of what is supported."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
COLUMNS = ("part", "what", "result", "measured", "wanted", "seconds")

PAGE, GUIDE = "benchmarks/results/gpu.md", "docs/guides/gpu.md"
PINNED = "Linux, Python 3.11, CPU, over TCP: the versions of [constraints.txt](constraints.txt), torch 2.13"
OTHERS = "other versions, and other Pythons from 3.11 on"
OTHERWISE = (
    ["several machines, NAT", "all tests, between network namespaces of one machine"],
    ["macOS, Windows", "no"],
)
"""Lines of README that do not depend on what ran."""


def table_of(rows: Sequence[Row], part: int | None = None) -> str:
    """Return the table of all findings, or of one part's without its number."""
    columns = COLUMNS if part is None else COLUMNS[1:]
    ruler = ["---:" if name in ("part", "seconds") else "---" for name in columns]
    lines = [_cells(row)[-len(columns) :] for row in rows if part in (None, row["part"])]
    return "\n".join([_line(columns), f"|{'|'.join(ruler)}|", *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    result = row["result"] if row["result"] == "passed" else f"**{row['result']}**"
    why = f"{result}: {row['why']}" if row["why"] else result
    seconds = f"{row['seconds']:.0f}" if row["seconds"] else ""
    return [str(row["part"]), row["what"], why.replace("|", "\\|"), row["measured"], row["wanted"], seconds]


def summary_of(rows: Sequence[Row]) -> str:
    """Return how many passed, failed, need a GPU, and were not run."""
    counts = Counter(row["result"] for row in rows)
    names = {"passed": "passed", "failed": "failed", "needs a GPU": "need a GPU", "not run": "not run"}
    told = [f"{counts[result]} {name}" for result, name in names.items() if counts[result]]
    return ", ".join(told) or "nothing was tried"


def machine_of(found: Row) -> str:
    """Return where and when it runs, as a list."""
    lines = {
        "command": f"`{found['command']}`",
        "date": found["date"],
        "GPU": found["gpu"] or "**none: this run is on a CPU, in small, and its figures say nothing about GPUs**",
        "CPU": f"{found['cpu']}; {found['load']} before it began",
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
    }
    return "\n".join(f"- {name}: {text}" for name, text in lines.items())


def about_of(found: Row) -> str:
    """Return that, and what came of it."""
    return f"{machine_of(found)}\n- time: {found['seconds']:.0f} s\n- result: {summary_of(found['results'])}"


def support_of(found: Row, versions: Row) -> str:
    """Return README's table of what is supported, from what ran on a GPU or in its place, and with which versions."""
    here = f"Linux, Python {found['versions']['python']}, torch {found['versions']['torch']}"
    came = f"[{summary_of(found['results'])}]({PAGE}) on {found['date']}"
    lines = [[PINNED, "all tests, at each change"]]
    for row in versions["results"]:
        names = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        tests = ", ".join(row["lanes"])
        lines += [
            [
                f"the {row['which']} that `pyproject.toml` allows: Python {row['python']}, {names}",
                f"tests of {tests}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
                f" on {row['date']} (`python -m benchmarks.versions`)",
            ]
        ]
    lines += [[OTHERS, "allowed by `pyproject.toml`, not run here"]]
    if found["gpu"]:
        lines += [[f"{here}, {found['gpu']}: [scripts/gpu.sh]({GUIDE})", came]]
    else:
        lines += [
            ["CUDA kernels, NCCL, workers on a GPU", f"**untested on real GPUs**; [scripts/gpu.sh]({GUIDE}) tests them"]
        ]
        lines += [[f"{here}, CPU: the same script in small", came]]
    return "\n".join(["| what | what ran |", "|---|---|", *map(_line, [*lines, *OTHERWISE])])
