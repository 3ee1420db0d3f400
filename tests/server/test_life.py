"""The states of a run: the table that it holds to, and what the other tests do not come to."""

import pytest

from lsgd.protocol.messages import Refused, Waiting, Welcome
from lsgd.server.life import TRANSITIONS, Life, LifeState

from .helpers import Bench, started


@pytest.mark.parametrize("before", LifeState)
@pytest.mark.parametrize("after", LifeState)
def test_a_run_moves_as_the_table_says_and_in_no_other_way(before: LifeState, after: LifeState) -> None:
    life = Life(before, 1.0)
    if after in TRANSITIONS[before]:
        life.move(after, 2.0)
        assert (life.state, life.since) == (after, 2.0)
    else:
        with pytest.raises(RuntimeError, match=f"{before.name} cannot become {after.name}"):
            life.move(after, 2.0)
        assert (life.state, life.since) == (before, 1.0)


def test_every_state_follows_another_and_each_comes_to_an_end() -> None:
    assert {after for ways in TRANSITIONS.values() for after in ways} == set(LifeState)
    ends = {LifeState.OVER}
    for _ in LifeState:
        ends |= {state for state, ways in TRANSITIONS.items() if ends & set(ways)}
    assert ends == set(LifeState)


def test_a_run_gathers_again_when_it_has_welcomed_all_and_too_few_came() -> None:
    bench = Bench("00", "01", join_timeout_s=30)
    assert bench.state.life.state is LifeState.WELCOMING
    bench.leave("01")
    refused = bench.tick(31.0)["00"]
    assert any(isinstance(answer, Refused) for answer in refused)
    assert bench.state.life.state is LifeState.GATHERING and bench.state.shown == "waiting"
    assert isinstance(bench.join("00", incarnation=7)["00"][0], Waiting)
    assert isinstance(bench.join("01", incarnation=7)["00"][0], Welcome)


def test_a_run_that_has_failed_may_fail_again() -> None:
    bench = started("00", "01", "02")
    for place in ("00", "01", "02"):
        bench.data(place, "digest")
    assert bench.state.life.state is LifeState.CLOSED and bench.state.failed.code == "same_batches"
    assert any(isinstance(answer, Refused) for answer in bench.got["02"])
