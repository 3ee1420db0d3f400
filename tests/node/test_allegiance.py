"""Whom a node follows: the table that its local server and its launcher hold to."""

import pytest

from lsgd.node.allegiance import RETIRES_S, TRANSITIONS, Allegiance, Event, State

ENDS = {State.CLOSING, State.LEAVING}


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_a_node_moves_as_the_table_says_and_in_no_other_way(state: State, event: Event) -> None:
    before = Allegiance(state, 5.0)
    after = before.upon(event, 7.0, "other" if event is Event.STRANGER else "")
    assert before.may(event) is (event in TRANSITIONS[state])
    if not before.may(event):
        assert after is before
    else:
        wanted = TRANSITIONS[state][event]
        assert (after.state, after.since) == (wanted, 5.0 if wanted is state else 7.0)
        assert after.stranger == ("other" if event is Event.STRANGER else "")


def test_every_state_is_reached_and_left_but_for_the_last_ones() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {state for state in State if not TRANSITIONS[state]} == ENDS
    begins = {State.FOLLOWING, State.SERVING}
    assert {after for ways in TRANSITIONS.values() for after in ways.values()} | begins == set(State)
    assert all(Event.END in ways for state, ways in TRANSITIONS.items() if state not in ENDS)


def test_servers_begin_when_a_node_takes_over_and_only_then() -> None:
    begun = {(b, a) for b, ways in TRANSITIONS.items() for a in ways.values() if a.servers and not b.servers}
    assert {after for _, after in begun} == {State.CLAIMING}


def test_whatever_says_that_the_run_is_served_elsewhere_ends_what_was_started() -> None:
    for event in (Event.WELCOME, Event.FOLLOW, Event.GIVES_WAY, Event.VAIN, Event.FAILED, Event.END):
        assert not Allegiance(State.CLAIMING).upon(event, 1.0).state.servers


def test_a_node_remembers_that_another_run_has_begun_while_it_takes_over() -> None:
    node = Allegiance(State.SEARCHING, 1.0).upon(Event.STRANGER, 2.0, "other")
    for event in (Event.DUE, Event.FAILED, Event.DUE):
        node = node.upon(event, 3.0)
        assert node.stranger == "other"
    assert node.upon(Event.UP, 4.0) == Allegiance(State.SERVING, 4.0)


@pytest.mark.parametrize("state", State)
def test_time_alone_ends_what_has_a_limit_and_notices_a_silence(state: State) -> None:
    node = Allegiance(state, 5.0)
    soon, late = (node.at(5.0 + s, 0.0, 2.0) for s in (RETIRES_S - 0.1, RETIRES_S))
    assert soon is node and (late is node) is (state not in (State.RETIRING, State.FENCED))
    assert (node.at(5.0, 2.0, 2.0) is node) is (state is not State.FOLLOWING)
