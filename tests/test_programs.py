"""The programs of benchmarks/programs: their marks, and those that need no other package run."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.programs import __main__ as command
from benchmarks.programs import table
from benchmarks.programs.program import Program, programs
from benchmarks.programs.runs import check

ALL = {each.name: each for each in programs()}


@pytest.mark.parametrize("program", ALL.values(), ids=str)
def test_a_program_without_the_marked_lines_is_one_without_lsgd(program: Program) -> None:
    names = {each.id for each in ast.walk(ast.parse(program.plain)) if isinstance(each, ast.Name)}
    imported = re.search(r"^(import|from) lsgd", program.plain, re.M)
    assert imported is None and not names & {"lsgd", "worker", "LsgdCallback"}
    assert program.changes[0] > 0


def test_marks(tmp_path: Path) -> None:
    script = tmp_path / "some.py"
    script.write_text(
        '"""Some.\n\nNeeds: a b\nSteps: 8\n"""\n'
        "import lsgd  # lsgd\n"
        "while not worker.stopped:  # lsgd: while True:\n"
        "    step()\n"
        "\n"
        "with join() as worker:  # lsgd\n"
        "    if worker.first:  # lsgd\n"
        "        save()\n"
        "    end()\n"
        "bye()\n"
    )
    some = Program(script)
    assert (some.title, some.needs, some.steps, some.changes) == ("Some", ["a", "b"], 8, (3, 1))
    assert some.plain.partition('"""\n')[2].endswith("while True:\n    step()\n\nsave()\nend()\nbye()\n")


def test_the_table_has_a_row_for_each_program() -> None:
    lines = table.lines([]).splitlines()
    assert len(lines) == 2 + len(ALL)
    row = {"program": "gan", "script": ALL["gan"].digest, "versions": {"torch": "2"}, "date": "2026-01-01"}
    points = {"points": {"1": "right", "6": "unjudged", "8": "wrong"}}
    parts = [
        {**row, "part": "alone", "figure": 1.25},
        {**row, "part": "check", "figure": 1.5, "round_nbytes": 2e5, **points},
    ]
    (found,) = (line for line in table.lines(parts).splitlines() if "[gan]" in line)
    assert "| 1.25 | 1.5 | 200 kB | ✓····-·✗· | 2026-01-01 |" in found


def test_results_of_another_text_are_not_shown() -> None:
    row = {"program": "gan", "script": "another", "versions": {"torch": "2"}, "date": "2026-01-01", "part": "alone"}
    assert "1.25" not in table.lines([{**row, "figure": 1.25}])


def test_results_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert command.read(path) == []
    path.write_text(json.dumps({"program": "gan"}) + "\n")
    assert command.read(path) == [{"program": "gan"}]


@pytest.mark.slow
@pytest.mark.timeout(260)
def test_a_program_runs_with_two_workers_and_is_right(tmp_path: Path) -> None:
    program = ALL["sam"]
    found = check(program, sys.executable, tmp_path, "2,3,4,5,8")
    assert set(found["points"].values()) == {"right"}
    assert found["iterations"] == program.steps and found["round_nbytes"] > 0 and found["figure"] < 1
