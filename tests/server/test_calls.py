"""Calls that all workers make together: one answer for all, whoever dies in between."""

import json
import math
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol import wants
from lsgd.protocol.messages import Evicted, Met, NodeLeave, Request, Stop, StopRun, Waiting
from lsgd.server.journal import capture, restore
from lsgd.server.report import entry
from lsgd.server.roster import MemberState
from lsgd.settings import AlgorithmSettings
from tests import golden

from ..search import examples
from .helpers import Bench, make_plan, started
from .simulated_run import Faults, SimulatedRun


def meet(bench: Bench, place: str, number: int = 1, **values: float) -> None:
    """Make a call, or repeat it."""
    member = bench.roster.members.get(bench.who(place)[0])
    again = member is not None and member.call is not None and member.call.number == number
    same = again and member.round is None and member.held
    bench.ask(place, same=same, did=not same and bench.seqs[place] > 0, wants=wants.Call(number, values))


def test_rounds_continue_without_a_caller_that_has_other_weights_than_it_trains() -> None:
    bench = started("00", "01", period=4)
    bench.ask("01", wants=wants.Call(1, aside=True))
    assert bench.member("01").state is MemberState.PAUSED
    while bench.member("00").round is None:
        bench.ask("00")
    assert bench.round("00").generation.members == ("node0/worker0",)
    bench.complete_all("00")
    bench.ask("00", wants=wants.Call(1))
    assert all(isinstance(bench.only(place), Met) for place in ("00", "01"))
    assert bench.member("01").state is MemberState.BUSY


def test_the_mean_comes_when_all_have_come() -> None:
    bench = started("00", "01", "10")
    meet(bench, "00", val=1.0)
    meet(bench, "00", val=1.0)
    assert bench.only("00").reason.code == "meeting"  # type: ignore[union-attr]
    assert "node0/worker1, node1/worker0" in bench.only("00").reason  # type: ignore[union-attr]
    meet(bench, "10", val=6.0)
    meet(bench, "01", val=2.0)
    assert bench.got == {place: [Met(1, {"val": 3.0}, 3)] for place in ("00", "01", "10")}


def test_means_are_told_with_the_next_global_round() -> None:
    bench = started("00", "01", period=4)
    for number, vals in enumerate([(1.0, 3.0), (5.0, math.inf)], 1):
        for place, val in zip(("00", "01"), vals, strict=True):
            meet(bench, place, number, **{"val": val, f"n{number}": 0.0})
    while bench.member("00").round is None:
        bench.ask_all("00", "01")
    bench.complete_all("00", "01")
    bench.ask_all("00", "01")
    while bench.member("00").round is None:
        bench.ask_all("00", "01")
    *_, with_means, without = bench.state.book.elections
    assert with_means.means == {"val": math.inf, "n2": 0.0, "n1": 0.0} and without.means == {}
    assert entry(with_means)["means"] == {"val": None, "n2": 0.0, "n1": 0.0}


@pytest.mark.parametrize("algorithm", [LocalSettings(period=4), AllReduceSettings()], ids=["local", "allreduce"])
def test_who_leaves_a_call_for_a_pause_is_waited_for_in_it(algorithm: AlgorithmSettings) -> None:
    """With gradient methods who waits in a call pauses anyway."""
    bench = started("00", "01", algorithm=algorithm)
    meet(bench, "00", val=1.0)
    bench.pause("00", did=False)  # interrupted, to evaluate
    meet(bench, "01", val=2.0)
    assert not any(isinstance(answer, Met) for answer in bench.got.get("01", []))
    meet(bench, "00", val=3.0)
    assert bench.got == {place: [Met(1, {"val": 2.5}, 2)] for place in ("00", "01")}


@pytest.mark.parametrize(
    ("numbers", "mean"),
    [((math.inf, -math.inf), math.nan), ((1.7e308, 1.7e308), math.inf), ((math.nan, 1.0), math.nan)],
)
def test_no_numbers_are_too_much_for_the_server(numbers: tuple[float, float], mean: float) -> None:
    bench = started("00", "01")
    for place, number in zip(("00", "01"), numbers, strict=True):
        meet(bench, place, val=number)
    first, second = bench.only("00"), bench.only("01")
    assert isinstance(first, Met) and isinstance(second, Met)
    assert first.values == second.values == {"val": pytest.approx(mean, nan_ok=True)}


def test_a_barrier_is_a_meeting_without_numbers_even_before_the_first_iteration() -> None:
    bench = Bench("00", "01")
    meet(bench, "00")
    meet(bench, "01")
    assert bench.only("00") == bench.only("01") == Met(1, {}, 2)


def test_a_lost_answer_is_given_again_and_an_old_one_changes_nothing() -> None:
    bench = started("00", "01")
    for place, value in (("00", 1.0), ("01", 3.0)):
        meet(bench, place, v=value)
    meet(bench, "01", v=3.0)
    assert bench.got == {"01": [Met(1, {"v": 2.0}, 2)]}
    meet(bench, "00", 2, v=5.0)
    meet(bench, "00", 2, v=5.0)
    assert isinstance(bench.only("00"), Waiting)
    meet(bench, "01", v=3.0)  # it has not heard of the first one yet
    assert bench.got == {"01": [Met(1, {"v": 2.0}, 2)]}
    meet(bench, "01", 2, v=7.0)
    assert bench.only("00") == bench.only("01") == Met(2, {"v": 6.0}, 2)


@pytest.mark.parametrize("algorithm", [LocalSettings(period=1), LocalSettings(period=4), AllReduceSettings()])
def test_the_round_after_a_call_waits_for_everybody(algorithm: AlgorithmSettings) -> None:
    bench = started("00", "10", algorithm=algorithm)
    while bench.ledger.tokens:
        bench.ask_all("00", "10")
    for place in ("00", "10"):
        meet(bench, place)
    assert bench.only("00") == bench.only("10") == Met(1, {}, 2)
    bench.ask("00", did=False)
    assert not bench.got and bench.waits() == "busy"
    bench.ask("10", did=False)
    order = bench.round("00", "10")
    assert not order.new and order.generation.number == 1, "all have the run's model, and nobody was away"


def test_who_goes_on_alone_after_a_call_takes_no_iteration_with_it() -> None:
    """The invariants are checked after each message: grants come from the queue, the last ones too."""
    bench = started("00", "10", algorithm=LocalSettings(period=64), iterations=100)
    bench.ask_all("00", "10")
    for place in ("00", "10"):
        meet(bench, place)
    left = bench.ledger.tokens
    bench.ask("00", did=False, wants=wants.Call(2))
    bench.tick(2 * bench.state.patience_s)
    assert bench.member("10").state is MemberState.BUSY and bench.ledger.tokens == left, "the call alone waits for it"
    bench.ask("10", did=False, wants=wants.Call(2))
    assert bench.only("00") == Met(2, {}, 2)
    bench.ask("00", did=False, wants=wants.Round())
    bench.tick(2 * bench.state.patience_s)
    assert bench.member("10").state is MemberState.STRAGGLER and bench.member("10").granted == 0
    assert bench.ledger.tokens == left


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_what_others_called_before_a_newcomer_came_is_answered_alone(first: bool) -> None:
    """As a barrier at the start of a script, whose other workers have long trained."""
    bench = started("00", "01")
    bench.ask_all("00", "01")
    bench.join("02")
    if first:
        meet(bench, "02")
        meet(bench, "00", val=1.0)
    else:
        meet(bench, "00", val=1.0)
        meet(bench, "02")
    assert bench.got["02"] == [Met(1, {}, 1)] and "00" not in bench.got
    meet(bench, "01", val=3.0)
    meet(bench, "02", 2, val=5.0)
    assert bench.got == {
        "00": [Met(1, {"val": 3.0}, 3)],
        "01": [Met(1, {"val": 3.0}, 3)],
        "02": [Met(2, {"val": 3.0}, 3)],
    }


def test_a_newcomer_that_is_in_a_round_is_answered_after_it() -> None:
    bench = started("00", "01")
    bench.ask_all("00", "01")
    bench.join("02")
    meet(bench, "02")
    while not bench.member("02").round:
        for place in ("00", "01"):
            if not bench.member(place).held and bench.member(place).round is None:
                bench.ask(place)
    bench.complete_all("00", "01")
    meet(bench, "00", val=1.0)
    assert not bench.got
    bench.complete_all("02")
    bench.ask("02", did=False, wants=wants.Call(1))
    assert bench.got == {"02": [Met(1, {}, 1)]}


def test_an_answer_that_was_lost_before_a_stop_is_given_after_the_next_one() -> None:
    bench = started("00", "01")
    for place in ("00", "01"):
        meet(bench, place)
    meet(bench, "00", 2)
    bench.say(StopRun("enough"))
    assert bench.got["00"] == [Met(2, {}, 1)]
    bench.ask("01", same=True, wants=wants.Call(1))
    assert bench.only("01") == Met(1, {}, 2)


def test_one_who_does_not_go_on_after_a_call_is_waited_for_as_ever() -> None:
    bench = started("00", "10", algorithm=LocalSettings(period=1))
    for place in ("00", "10"):
        meet(bench, place)
    bench.ask("00", did=False)
    bench.tick(bench.state.patience_s)
    assert bench.member("10").state is MemberState.STRAGGLER
    assert bench.round_of("00").id == 2


@pytest.mark.parametrize("came", [True, False])
def test_one_who_dies_is_neither_waited_for_nor_counted(came) -> None:
    bench = started("00", "01", "02")
    if came:
        meet(bench, "02", v=100.0)
    for place, value in (("00", 1.0), ("01", 3.0)):
        meet(bench, place, v=value)
    assert came or not bench.got
    if not came:
        bench.leave("02", failed=True)
        assert all(Met(1, {"v": 2.0}, 2) in bench.got[place] for place in ("00", "01"))
    else:
        assert bench.only("00") == Met(1, {"v": 104 / 3}, 3)


def test_one_who_came_and_died_before_the_last_does_not_count() -> None:
    bench = started("00", "01", "02")
    meet(bench, "02", v=100.0)
    bench.leave("02", failed=True)
    bench.join("02", incarnation=2)
    for place, value in (("00", 1.0), ("01", 3.0)):
        meet(bench, place, v=value)
    meet(bench, "02", v=5.0)
    assert bench.only("00") == Met(1, {"v": 3.0}, 3)


def test_one_who_has_finished_is_not_waited_for() -> None:
    bench = started("00", "01")
    meet(bench, "01", v=1.0)
    bench.ask("00", wants=wants.Round(), steps=9)
    assert Met(1, {"v": 1.0}, 1) in bench.got["01"]


def test_when_the_run_stops_nobody_else_comes() -> None:
    bench = started("00", "01", "02")
    bench.pause("00")
    meet(bench, "00", v=1.0)
    bench.say(StopRun("enough"))
    assert Met(1, {"v": 1.0}, 1) in bench.got["00"]


def test_who_is_paused_in_a_call_hears_that_its_node_leaves() -> None:
    bench = started("00", "10", algorithm=AllReduceSettings())
    meet(bench, "10", v=1.0)
    bench.say(NodeLeave(1, 5, "node1 is to end"))
    assert bench.only("10") == Stop(2, None, "node1 is to end")
    assert bench.member("10").state is MemberState.ENDED
    meet(bench, "00")  # another call
    assert bench.only("00") == Met(1, {}, 1)


def test_different_calls_are_an_error_for_the_second() -> None:
    bench = started("00", "01")
    meet(bench, "00", val=1.0)
    meet(bench, "01")
    met = bench.only("01")
    assert isinstance(met, Met) and golden.text("reasons.other_call") in met.error
    for _ in range(2):  # the answer was lost, and then the server
        bench.ask("01", same=True, wants=wants.Call(1))
        assert bench.only("01") == met
        bench.coordinator.state = restore(json.loads(json.dumps(capture(bench.state, bench.now))), bench.now)
    bench.ask("00", same=True, wants=wants.Call(1, {"val": 1.0}))
    meet(bench, "01", 2, val=3.0)
    assert bench.only("00") == Met(1, {"val": 2.0}, 2)


def test_a_process_that_is_no_member_is_told_so() -> None:
    bench = started("00", "01")
    request = Request("node0/worker1", 77, 1, 0, 0, 0, None, wants.Call(1))
    ((_, _, answer),) = bench.coordinator.handle(request, bench.now).answers
    assert isinstance(answer, Evicted)


def test_a_restarted_server_gives_the_same_answer() -> None:
    bench = started("00", "01")

    def restart() -> None:
        bench.coordinator.state = restore(capture(bench.state, bench.now), bench.now)

    meet(bench, "00", v=1.0)
    restart()
    meet(bench, "01", v=3.0)
    assert not bench.got, "not before all have asked again"
    meet(bench, "00", v=1.0)
    answer = Met(1, {"v": 2.0}, 2)
    assert bench.got == {"00": [answer], "01": [answer]}
    restart()
    meet(bench, "00", v=1.0)
    assert bench.got == {"00": [answer]}


def test_a_caller_takes_part_in_rounds_until_all_have_come() -> None:
    bench = started("00", "01")
    meet(bench, "00", v=1.0)
    while not bench.member("00").round:
        bench.ask("01")
    assert bench.member("00").round is bench.member("01").round, "whose model a newcomer could take"
    bench.complete_all("00", "01")
    meet(bench, "00", v=1.0)
    assert bench.member("00").held
    meet(bench, "01", v=3.0)
    assert bench.only("00") == bench.only("01") == Met(1, {"v": 2.0}, 2)


def before_gradients(*places: str) -> Bench:
    """Return a run in the last round before a phase that exchanges gradients."""
    phases = (PlanPhase(LocalSettings(period=1), 2 * len(places)), PlanPhase(AllReduceSettings()))
    bench = started(*places, plan=Plan(RunSettings(workers=len(places)), phases))
    bench.ask_all(*places)
    bench.complete_all(*places)
    return bench


def test_who_waits_in_a_call_stays_in_the_run_when_a_phase_of_gradients_begins() -> None:
    bench = before_gradients("00", "01")
    meet(bench, "00", v=1.0)
    bench.ask("01")
    assert bench.state.phases.algorithm.name == "allreduce"
    assert bench.round("01").generation.members == ("node0/worker1",)
    assert bench.member("00").state is MemberState.PAUSED
    bench.complete_all("01")
    meet(bench, "01", v=3.0)
    assert bench.only("00") == bench.only("01") == Met(1, {"v": 2.0}, 2)


def test_who_has_the_model_alone_and_waits_in_a_call_stays_when_a_phase_of_gradients_begins() -> None:
    bench = before_gradients("00", "01")
    bench.join("02")
    bench.ask("00")
    bench.leave("01")  # and so the other makes its iteration
    meet(bench, "00", v=1.0)
    bench.ask("02")
    assert bench.member("00").state is MemberState.PAUSED and bench.member("02").held
    bench.tick()
    assert bench.only("00") == Met(1, {"v": 1.0}, 1), "the newcomer needs its model first"
    bench.ask("00", did=False)
    assert bench.round("00", "02").new == (1,)


def test_a_newcomer_that_needs_the_model_of_a_caller_is_not_waited_for() -> None:
    bench = started("00", "01", "02", algorithm=AllReduceSettings())
    for place in ("01", "02"):
        bench.leave(place, failed=True)
        bench.join(place, incarnation=2)
    bench.ask("01")
    meet(bench, "00", v=1.0)
    assert bench.member("01").held and not bench.got, "another one may have the model"
    bench.ask("02")
    assert bench.got == {"00": [Met(1, {"v": 1.0}, 1)]}
    bench.ask("00", did=False)
    assert bench.round("00", "01", "02").new == (1, 2)


@pytest.mark.no_cover
@examples(15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 1 << 16), st.floats(0, 0.01))
def test_all_get_one_answer_over_a_bad_network_with_kills(sizes: list[int], seed: int, crash: float) -> None:
    faults = Faults(0.05, 0.1, 0.5, crash=crash, exchange_timeout_s=30.0, kill=0.05)
    run = SimulatedRun(make_plan(period=8, local_period=4, workers=sum(sizes)), sizes, seed, faults)
    run.own_steps, run.meet_every = 40, 10
    run.go()
    answers = defaultdict(set)
    for worker in run.workers:
        for number, met in enumerate(worker.met):
            assert not met.error and 1 <= met.workers <= len(run.workers)
            answers[number].add((Fraction(met.values["value"]), met.workers))
    if not crash and not run.stragglers:
        assert all(len(worker.met) >= 3 for worker in run.workers)
        assert all(len(given) == 1 for given in answers.values())
