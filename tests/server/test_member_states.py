"""The phases of a worker: the table that the roster holds to."""

import pytest

from lsgd.server.roster import TRANSITIONS, Member, MemberState, Roster
from tests import golden

from .helpers import greeting
from .invariants import check_roster


@pytest.mark.parametrize("before", MemberState)
@pytest.mark.parametrize("after", MemberState)
def test_a_member_moves_as_the_table_says_and_in_no_other_way(before: MemberState, after: MemberState) -> None:
    member = Member(greeting(0, 0), 0.0, before)
    roster = Roster([member])
    if after is before or after in {follower for state, follower, _ in TRANSITIONS if state is before}:
        roster.move(member, after)
        assert member.state is after
    else:
        with pytest.raises(
            RuntimeError, match=golden.pattern("states.no_next_state", before=before.name, after=after.name)
        ):
            roster.move(member, after)
        assert member.state is before
    check_roster(roster)


def test_every_phase_but_the_first_follows_another() -> None:
    assert {before for before, _, _ in TRANSITIONS} == set(MemberState)
    assert {after for _, after, _ in TRANSITIONS} == set(MemberState) - {MemberState.JOINED}
