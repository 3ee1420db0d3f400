"""A worker's step: the table that it holds to."""

import pytest

from lsgd.client.iteration.step import TRANSITIONS, Event, Step, StepState
from lsgd.errors import LsgdError
from tests import golden


@pytest.mark.parametrize("before", StepState)
@pytest.mark.parametrize("event", Event)
def test_a_step_moves_as_the_table_says_and_in_no_other_way(before: StepState, event: Event) -> None:
    step = Step("node0/worker0")
    step.state = before
    if (after := TRANSITIONS.get((before, event))) is not None:
        assert step.advance(event) is step.state is after
    else:
        with pytest.raises(
            LsgdError, match=golden.pattern("states.no_next_step", before=before.name, event=event.name)
        ):
            step.advance(event)
        assert step.state is before


def test_all_states_follow_from_the_first_and_all_but_the_last_two_are_left() -> None:
    reached, last = {Step().state}, set[StepState]()
    while reached != last:
        last = set(reached)
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in last}
    assert reached == set(StepState)
    assert {before for before, _ in TRANSITIONS} == set(StepState) - {StepState.DONE, StepState.LEFT}
    assert {event for _, event in TRANSITIONS} == set(Event)


@pytest.mark.parametrize("before", StepState)
def test_every_state_leads_to_the_end_of_the_worker(before: StepState) -> None:
    """So an error of the script, or Ctrl-C, finds a way out of any of them."""
    out = {StepState.DONE, StepState.LEFT}
    for _ in StepState:
        out |= {state for (state, _), after in TRANSITIONS.items() if after in out}
    assert before in out


def test_a_plain_iteration() -> None:
    step, seen = Step(), []
    for event in (Event.ASK, Event.GRANT, Event.BEGIN, Event.STEP, Event.CLOSE, Event.ACT):
        seen.append((step.advance(event), step.is_granted, step.is_open, step.is_over))
    assert seen == [
        (StepState.ROUND, False, False, False),
        (StepState.GRANTED, True, False, False),
        (StepState.BEGUN, True, True, False),
        (StepState.STEPPED, True, True, False),
        (StepState.COUNTED, False, False, False),
        (StepState.AWAY, False, False, False),
    ]
