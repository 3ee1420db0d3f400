"""Workers that leave before the end of the run: a last round, and the consensus where all of them leave."""

import pytest

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.protocol import wants
from lsgd.protocol.messages import Go, Stop
from lsgd.server.reasons import Why
from lsgd.server.rounds import MAX_FAILED_ROUNDS
from tests import golden

from .helpers import Bench, started


def leave_after(bench: Bench, *places: str) -> None:
    for place in places:
        bench.leave(place)


def test_all_that_leave_make_the_consensus() -> None:
    bench = started("00", "01", "10", "11")
    for place in ("00", "01", "10"):
        assert not bench.ask(place, wants=wants.Round())  # though there are tokens
    order = bench.round_of("00") if bench.ask("11", wants=wants.Round()) else None
    assert order is not None and order.final and order.scope == "global"
    assert all(isinstance(bench.only(place), Stop) for place in ("00", "01", "10", "11"))
    assert Why.ALL_LEAVE(count=4) in bench.state.stopping
    bench.complete_all("00", "01", "10", "11")
    leave_after(bench, "00", "01", "10", "11")
    bench.tick()
    assert bench.state.over and bench.ledger.count == 4


def test_one_that_leaves_takes_part_in_the_next_global_round_and_its_tokens_go_to_the_others() -> None:
    bench = started("00", "10", period=4, local_period=4)
    assert not bench.ask("10", wants=wants.Round())
    while not bench.got.get("10"):
        bench.ask("00")
    order = bench.round("00", "10")
    assert order.scope == "global" and not order.final
    bench.complete_all("00", "10")
    assert bench.ledger.count == 8
    bench.leave("10")
    assert bench.ledger.count == 8
    while bench.ask("00")["00"][-1].round is None:
        pass
    assert bench.round("00").generation.members == ("node0/worker0",)
    assert bench.ledger.count == 16  # of the period of two


def test_a_local_round_is_made_before_and_the_last_request_comes_again() -> None:
    bench = started("00", "01", "10", period=8, local_period=2)
    assert not bench.ask("00", wants=wants.Round())
    while not bench.got.get("00"):
        bench.ask("01")
    assert bench.round("00", "01").scope == "local"
    bench.complete_all("00", "01")
    assert not bench.ask("00", did=False, wants=wants.Round())
    assert not bench.state.stopping


def test_where_models_are_identical_the_others_go_on_at_once() -> None:
    bench = started("00", "01", algorithm=AllReduceSettings())
    bench.ask("00", wants=wants.Round())
    bench.ask("01")
    stop, go = bench.only("00"), bench.only("01")
    assert isinstance(stop, Stop) and stop.round is None and not stop.failed and stop.reason.code == "goes_on"
    assert isinstance(go, Go) and go.round is not None and go.round.generation.members == ("node0/worker1",)
    bench.leave("00")
    bench.complete_all("01")
    bench.ask("01", wants=wants.Round())
    assert bench.round("01").final


def test_where_only_newcomers_stay_they_get_the_model_and_the_run_ends() -> None:
    bench = started("00", algorithm=AllReduceSettings())
    bench.join("01")
    bench.ask("01")
    bench.ask("00", wants=wants.Round())
    order = bench.round("00", "01")
    assert order.final and order.new == (1,) and golden.text("reasons.holders_leave") in bench.state.stopping


@pytest.mark.parametrize("comes", ["back", "never"])
def test_the_last_that_have_the_model_wait_for_one_that_goes_on(comes) -> None:
    bench = started("00", "10")
    bench.pause("10")
    assert not bench.ask("00", wants=wants.Round())
    assert bench.waits() == "last_holders"
    assert not bench.tick(500.0)
    if comes == "back":
        bench.ask("10", did=False)
        while "00" not in bench.got:
            bench.ask("10")
        assert not bench.round_of("00").final
    else:
        bench.leave("10")
        assert bench.round_of("00").final


def test_a_run_whose_last_round_keeps_failing_ends_in_vain_and_says_so() -> None:
    bench = started("00", "01", period=1, local_period=1, iterations=4)
    for _ in range(2):
        bench.ask_all("00", "01")
        bench.complete_all(*(place for place in ("00", "01") if not bench.book.final and bench.member(place).round))
    for _ in range(MAX_FAILED_ROUNDS):
        order = bench.member("00").round.round
        assert order.final and bench.state.stopping.code == "all_made"
        bench.fail("00", order.id)
        for place in ("00", "01"):
            bench.ask(place, same=True, dropped=order.id)
    assert bench.state.closed and bench.state.stopping.code == "rounds_fail.error"
    assert bench.only("01") == Stop(3, None, bench.state.stopping, failed=True)
    bench.leave("00")
    assert bench.state.stopping.code == "rounds_fail.error"


def test_a_request_after_a_restart_says_again_that_it_is_the_last() -> None:
    bench = started("00")
    bench.ask("00", wants=wants.Round())
    assert bench.round("00").final
    bench.fail("00", bench.member("00").round.round.id)
    bench.ask("00", same=True, dropped=2, wants=wants.Round())
    assert bench.round("00").final
