"""The phases of a worker: the table that the roster holds to, and that docs/concepts/protocol.md shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from lsgd.server.roster import TRANSITIONS, Member, MemberState, Roster
from scripts.state_tables import TABLES

from .helpers import greeting
from .invariants import check_roster

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("before", MemberState)
@pytest.mark.parametrize("after", MemberState)
def test_a_member_moves_as_the_table_says_and_in_no_other_way(before: MemberState, after: MemberState) -> None:
    member = Member(greeting(0, 0), 0.0, before)
    roster = Roster([member])
    if after is before or after in {follower for state, follower, _ in TRANSITIONS if state is before}:
        roster.move(member, after)
        assert member.state is after
    else:
        with pytest.raises(RuntimeError, match=f"is {before.name} and cannot become {after.name}"):
            roster.move(member, after)
        assert member.state is before
    check_roster(roster)


def test_every_phase_but_the_first_follows_another() -> None:
    assert {before for before, _, _ in TRANSITIONS} == set(MemberState)
    assert {after for _, after, _ in TRANSITIONS} == set(MemberState) - {MemberState.JOINED}


@pytest.mark.parametrize("page", TABLES)
def test_the_page_has_the_table(page: str) -> None:
    assert TABLES[page]() in (ROOT / "docs/concepts" / page).read_text(), "make it anew: python scripts/state_tables.py"


def test_the_script_makes_it_anew(tmp_path: Path) -> None:
    for page, table in TABLES.items():
        head, rule, _, *rows = table().splitlines()
        (tmp_path / page).write_text("\n".join(["before\n", head, rule, "| OLD | | | |", *rows, "", "after\n"]))
    subprocess.run([sys.executable, ROOT / "scripts/state_tables.py", tmp_path], check=True, cwd=ROOT)
    for page, table in TABLES.items():
        assert (tmp_path / page).read_text() == f"before\n\n{table()}\nafter\n"
