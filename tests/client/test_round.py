"""A round in progress: the table of its states, in the code and in the documentation."""

import itertools
import re
from pathlib import Path

import pytest

from lsgd.client.iteration.round import TRANSITIONS, ActiveRound, State
from lsgd.errors import LsgdError
from lsgd.protocol.messages import Round
from tests import golden

from .bench import generation

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "worker.md"
ENDS = {State.COMMITTED, State.DROPPED}


def active(state: State) -> ActiveRound:
    return ActiveRound(Round(7, generation(1), "global", 0, (0,), 0, (), 0, False), state=state)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_a_round_changes_its_state_by_the_table_only(before, after) -> None:
    changed = active(before)
    if after in TRANSITIONS[before]:
        changed.to(after)
        assert changed.state is after
    else:
        with pytest.raises(
            LsgdError, match=golden.pattern("states.no_next_phase", before=before.name, after=after.name)
        ):
            changed.to(after)
        assert changed.state is before


def test_a_round_ends_once_and_can_end_from_everywhere() -> None:
    assert {state for state, following in TRANSITIONS.items() if not following} == ENDS
    for state in set(State) - ENDS:
        assert State.DROPPED in TRANSITIONS[state]
        assert State.COMMITTED in {last for next_ in TRANSITIONS[state] for last in (next_, *TRANSITIONS[next_])}


def test_the_design_shows_the_table() -> None:
    rows = re.findall(r"^\| `([A-Z]+)` \| (.*) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert rows == [
        (state.name, state.value, ", ".join(f"`{next_.name}`" for next_ in following) or "none")
        for state, following in TRANSITIONS.items()
    ]
