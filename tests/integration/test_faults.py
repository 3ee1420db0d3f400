"""The table of faults in docs/guides/failures.md: each row has tests that show what it promises (faults.toml)."""

import ast
import functools
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "guides" / "failures.md"
HEADING = "## What goes wrong, and what is seen"
SHOWN_BY: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())


def rows() -> list[str]:
    """Return what goes wrong, row by row, as the page has it."""
    section = PAGE.read_text().partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.removeprefix("|").partition(" | ")[0].strip() for line in lines[2:]]


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Return the tests in a file, those of a class as ``Class::test``; none where there is no such file."""
    if not (TESTS / file).is_file():
        return frozenset()
    found = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {f"{prefix}{f.name}" for f in inner if isinstance(f, ast.FunctionDef)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_the_table_is_found_and_says_nothing_twice() -> None:
    assert len(rows()) > 40
    assert len(set(rows())) == len(rows())


def test_every_row_has_a_line_in_faults_toml_and_every_line_a_row() -> None:
    assert [row for row in rows() if row not in SHOWN_BY] == [], "add these to faults.toml, with their tests"
    assert [row for row in SHOWN_BY if row not in rows()] == [], "these are no rows of docs/guides/failures.md"


@pytest.mark.parametrize("row", SHOWN_BY)
def test_what_a_row_promises_is_tested(row: str) -> None:
    assert SHOWN_BY[row], "no test shows it"
    for test in SHOWN_BY[row]:
        file, _, name = test.partition("::")
        assert name in names_in(file), f"tests/{file} has no test {name}"
