"""What a run has learned is not given up: who has its model is waited for, and comes back with it."""

import json

import pytest

from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import Evicted, Go, Refused, Stop, StopRun
from lsgd.server.coordinator import Coordinator
from lsgd.server.journal import capture, restore
from lsgd.server.reasons import Why
from lsgd.server.roster import MemberState
from tests import golden

from .helpers import Bench, started

TIMES = {"lease_s": 10.0, "server_timeout_s": 60.0}


def trained(*places: str, **settings: object) -> Bench:
    """Return a run that has made iterations, each of its workers busy with one."""
    bench = started(*places, **{**TIMES, "period": 4, "local_period": 4, **settings})
    bench.ask_all(*places)
    assert bench.ledger.count == len(places)
    return bench


def fall_silent(bench: Bench, *places: str) -> dict[str, int]:
    return {place: bench.incarnations.pop(place) for place in places}


def without_holders() -> tuple[Bench, dict[str, int]]:
    """Return a run whose two holders of the model were evicted while a newcomer waits, and what they are heard by."""
    bench = trained("00", "01", iterations=100)
    back = fall_silent(bench, "00", "01")
    bench.join("10")
    bench.ask("10")
    bench.tick(61)
    return bench, back


def test_the_last_holders_are_not_evicted_when_all_are_silent() -> None:
    bench = trained("00", "01")
    back = fall_silent(bench, "00", "01")
    bench.tick(11)
    assert set(bench.roster.members) == {"node0/worker0", "node0/worker1"}
    assert bench.codes == ["all_silent"]
    bench.tick(30)
    assert bench.notes == []
    bench.incarnations["00"] = back["00"]
    bench.tick(9)  # one is heard again, and the other has its lease
    bench.incarnations |= back
    bench.ask_all("00", "01")
    assert bench.ledger.count == 4 and isinstance(bench.got["01"][-1], Go)


@pytest.mark.parametrize(("guarded", "waits_s"), [(False, 60), (True, 90)])
def test_who_hears_nobody_says_how_long_it_waits_and_waits_as_long(guarded: bool, waits_s: int) -> None:
    bench = trained("00", "10", "20", patience_s=90.0)
    bench.state.tenure.guarded = guarded
    fall_silent(bench, "00", "10", "20")
    bench.tick(11)
    assert golden.text("reasons.waits_in_all", waits_s=waits_s) in bench.notes[0]
    bench.tick(waits_s - 12)
    assert len(bench.roster.members) == 3
    bench.tick(2)
    assert not bench.roster.members


def test_holders_that_fall_silent_together_are_not_evicted_one_by_one() -> None:
    bench = trained("00", "01")
    back = fall_silent(bench, "01")
    bench.tick(2)
    back |= fall_silent(bench, "00")
    bench.tick(9)  # one's lease is over, and the other has not been heard for most of its own
    assert len(bench.roster.members) == 2 and bench.notes == []
    bench.tick(2)
    assert len(bench.roster.members) == 2 and bench.codes == ["all_silent"]
    bench.incarnations |= back
    bench.ask_all("00", "01")
    assert bench.ledger.count == 4


def test_a_silent_worker_is_evicted_while_another_has_the_model() -> None:
    bench = trained("00", "01")
    fall_silent(bench, "01")
    bench.tick(11)
    assert "leaves.silent" in bench.codes


def test_a_newcomer_that_is_heard_does_not_cost_the_model() -> None:
    bench = trained("00")
    back = fall_silent(bench, "00")
    bench.join("10")
    bench.ask("10")
    bench.tick(50)
    assert bench.member("10").held and "node0/worker0" in bench.roster.members
    bench.incarnations |= back
    while "10" not in bench.ask("00"):
        pass
    round = bench.round("00", "10")
    assert (round.source, round.new) == (0, (1,))


def test_holders_that_were_evicted_come_back_with_the_model() -> None:
    bench, back = without_holders()
    assert set(bench.roster.members) == {"node1/worker0"} and bench.member("10").held
    assert bench.waits(1) == "model_lost"
    bench.incarnations |= back
    bench.heartbeat("01")
    assert bench.codes == ["back"]
    assert bench.member("01").state is MemberState.STRAGGLER
    bench.ask("00")  # another one has the model, so that this one is to join anew
    assert isinstance(bench.only("00"), Evicted)
    bench.ask("01")
    round = bench.round("01", "10")
    assert (round.source, round.new, round.count) == (0, (1,), 2)  # what the other one has made is lost
    assert bench.roster.made["node0/worker1"] == 0


def test_an_evicted_holder_that_others_have_gone_on_without_has_an_older_model() -> None:
    bench = trained("00", "10", iterations=100)
    back = fall_silent(bench, "10")
    bench.tick(11)
    bench.join("01")
    bench.ask("01")
    while "01" not in bench.ask("00"):
        pass
    round = bench.round("00", "01")
    bench.complete("00", round.id)
    bench.leave("00", failed=True)
    bench.incarnations |= back
    bench.heartbeat("10")
    assert bench.notes == [Why.BACK(worker="node1/worker0", model="an older model of the run")]
    bench.complete("01", round.id)
    bench.ask("10")
    while "10" not in bench.ask("01"):
        pass
    round = bench.round("01", "10")
    assert (round.source, round.new) == (0, (1,))


def test_an_evicted_holder_that_is_back_is_kept_when_the_server_is_started_again() -> None:
    bench, back = without_holders()
    bench.incarnations |= back
    bench.heartbeat("01")
    saved = json.loads(json.dumps(capture(bench.state, bench.now)))
    bench.coordinator = Coordinator(restore(saved, bench.now))
    assert bench.member("01").state is MemberState.STRAGGLER
    bench.ask("10", same=True)
    bench.ask("01")
    round = bench.round("01", "10")
    assert (round.source, round.new, round.count) == (0, (1,), 2)


def test_who_left_by_itself_does_not_come_back() -> None:
    bench = trained("00")
    bench.leave("00")
    bench.heartbeat("00")
    assert not bench.roster.members
    bench.ask("00")
    assert isinstance(bench.only("00"), Evicted)


@pytest.mark.parametrize("same", [False, True])
def test_an_evicted_holder_comes_back_to_a_server_that_was_started_again(same: bool) -> None:
    bench = trained("00")
    bench.tick(1)
    back = fall_silent(bench, "00")
    bench.tick(61)
    bench.coordinator = Coordinator(restore(capture(bench.state, bench.now), bench.now))
    bench.incarnations |= back
    bench.ask("00", same=same)
    assert bench.round("00").count == 2 - same


def test_newcomers_alone_go_back_to_the_checkpoint_of_the_most_iterations() -> None:
    bench = trained("00", "01")
    bench.leave("00", did=True)
    bench.leave("01", did=True)
    assert bench.ledger.count == 4
    bench.join("10", resumed=2)
    bench.ask("10")
    assert bench.notes[0] == (Why.GONE_BACK(count=4, resumed=2, lost=2))
    round = bench.round("10")
    assert (round.count, round.source, round.new) == (2, 0, ())
    assert bench.ledger.count == 2


def test_a_run_without_a_model_waits_for_a_worker_with_a_checkpoint_and_then_fails() -> None:
    bench = trained("00", "01", join_timeout_s=100.0)
    bench.leave("00", did=True)
    bench.leave("01", did=True)
    bench.join("00", incarnation=2)
    assert not bench.ask("00")
    assert bench.notes[0].startswith(golden.text("reasons.model_lost"))
    bench.tick(99)
    assert bench.member("00").held
    bench.tick(2)
    (refused,) = bench.got["00"]
    assert isinstance(refused, Refused) and refused.reason.code == "model_lost"
    assert bench.state.failed == bench.state.stopping == refused.reason


def test_a_run_whose_workers_are_all_there_without_a_model_fails_at_once() -> None:
    bench = trained("00")
    bench.leave("00", did=True)
    bench.join("00", incarnation=2)
    bench.ask("00")
    assert isinstance(bench.got["00"][-1], Refused)
    assert bench.join("01")["01"] == [Refused(bench.state.failed)], "it is told of the failure too"
    bench.leave("00")
    assert bench.state.over


def test_a_plan_may_let_a_lost_run_begin_anew() -> None:
    bench = trained("00", restart_from_scratch=True)
    bench.leave("00", did=True)
    bench.join("00", incarnation=2)
    bench.ask("00")
    assert bench.notes[0] == (Why.BEGUN_ANEW(count=2))
    assert bench.round("00").count == 0 and bench.ledger.count == 0


def test_an_older_model_of_the_run_is_better_than_none() -> None:
    bench = started("00", "01", **TIMES, period=1, local_period=1)
    bench.pause("01")
    bench.ask("00")
    bench.complete_all("00")
    bench.join("10")
    bench.ask("10")
    bench.leave("00", did=True)
    assert bench.member("10").held  # for who paused, whose model is a round old
    bench.ask("01", did=False)
    round = bench.round("01", "10")
    assert (round.source, round.new, round.count) == (0, (1,), 1)


def test_who_has_an_older_model_makes_the_last_iteration_and_no_newcomer() -> None:
    bench = started("01", "10", **TIMES, period=1, local_period=1, iterations=3)
    bench.pause("10", did=False)
    bench.ask("01")
    bench.ask("01")
    bench.complete_all("01")
    bench.join("00")
    bench.ask("00")
    bench.leave("01", did=True)
    assert bench.ledger.count == 3 and bench.member("00").held
    bench.ask("10", did=False)
    assert bench.round("10").count == 2


def test_a_stop_waits_for_the_model_and_then_fails_the_run() -> None:
    bench = trained("00", patience_s=20.0)
    back = fall_silent(bench, "00")
    bench.join("10")
    bench.ask("10")
    bench.tick(30)
    bench.say(StopRun("enough"))
    bench.tick(15)
    assert not bench.book.final and not bench.state.failed
    bench.tick(10)
    assert isinstance(bench.got["10"][-1], Refused)
    bench.incarnations |= back
    bench.ask("00")  # too late, but it is told, and keeps its model
    assert isinstance(bench.only("00"), Refused)


def test_a_stop_waits_for_a_straggler_that_alone_has_the_model() -> None:
    bench = trained("00", patience_s=20.0)
    bench.join("10")
    bench.ask("10")
    bench.tick(25)
    assert bench.member("10").held
    bench.say(StopRun("enough"))
    bench.tick(1)
    assert bench.member("00").state is MemberState.STRAGGLER and not bench.book.final
    bench.ask("00")
    assert isinstance(bench.got["00"][-1], Stop) and bench.round_of("10").source == 0


def test_a_run_goes_back_to_the_phase_of_its_checkpoint() -> None:
    phases = (PlanPhase(LocalSettings(period=3, delay=2), 4), PlanPhase(LeaderSettings(period=4, local_period=4)))
    bench = Bench("00", plan=Plan(RunSettings(workers=1, lease_s=10.0), phases))
    bench.ask("00")
    for _ in range(5):
        bench.complete_all("00") if bench.member("00").round else None
        bench.now += 1.0
        bench.ask("00")
    assert (bench.state.phases.number, bench.ledger.count) == (1, 5)
    bench.leave("00", did=True)
    bench.join("00", incarnation=2, resumed=3)
    bench.ask("00")
    assert (bench.state.phases.number, bench.ledger.count) == (0, 3)
    assert bench.round("00").algorithm.startswith('{"name": "local"')
    assert "phase" in bench.codes and bench.state.phases.pace.delay == 2
    assert bench.state.phases.pace.to_json()["steps_s"] == []
