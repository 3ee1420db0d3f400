"""Scripts with loops of their own: the run is as long as those together, and ends when all have ended theirs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.protocol import wants
from lsgd.protocol.messages import Go, NodeLeave, Stop, StopRun, Waiting, Welcome
from lsgd.server.journal import capture, restore
from lsgd.server.report import summary
from lsgd.server.roster import Has, MemberState
from tests import golden

from ..search import examples
from .helpers import Bench, make_plan, started
from .served_run import ServedRun
from .simulated_run import Faults, SimulatedRun

STEPS = 40


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    """Print no lines: a thread does that, and after the test perhaps."""
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)


def train(bench: Bench, place: str, steps: int) -> None:
    """Let a worker make iterations, with whatever rounds that takes."""
    for _ in range(steps):
        bench.ask(place, steps=STEPS)
        rounds = [a.round for a in bench.got.get(place, []) if isinstance(a, Go) and a.round]
        for order in rounds:
            bench.complete(place, order.id)


def finish(bench: Bench, place: str, *others: str) -> None:
    """End a worker's loop: it takes part in one more global round, and waits for the end; others train until then."""
    bench.ask(place, wants=wants.Round(), steps=STEPS)
    while True:
        for other in others:
            if bench.member(place).round is None and not bench.member(other).held:
                bench.ask(other, steps=STEPS)
        if (opened := bench.member(place).round) is None:
            if not others:
                return
            continue
        bench.complete_all(*(p for p in (place, *others) if bench.member(p).round is opened))
        if opened.round.final:
            return
        if opened.round.scope == "global":
            bench.ask(place, did=False, wants=wants.End(), steps=STEPS)
            return
        bench.ask(place, did=False, wants=wants.Round(), steps=STEPS)


def test_one_who_has_finished_waits_outside_rounds_and_gets_the_consensus() -> None:
    bench = started("00", "01")
    finish(bench, "00", "01")
    assert bench.member("00").state is MemberState.FINISHED and bench.codes == ["finishes"]
    bench.ask("00", same=True, did=False, wants=wants.End(), steps=STEPS)
    assert golden.text("wrap.still_in_loop") in bench.only("00").reason  # type: ignore[union-attr]
    before = bench.book.ordered["global"]
    train(bench, "01", 20)
    assert bench.book.ordered["global"] > before, "the other one has its rounds"
    assert bench.state.shown == "running"
    bench.ask("01", wants=wants.Round(), steps=STEPS)
    final = bench.round_of("00")
    assert final.final and final.new == (0,), "it takes over the model of those that trained on"
    assert bench.state.stopping.code == "all_finished" and bench.round_of("01") is final


def test_when_all_have_left_the_run_has_made_all_its_iterations() -> None:
    bench = started("00", "01")
    for place in ("00", "01"):
        train(bench, place, 3)
    finish(bench, "00", "01")
    bench.ask("01", wants=wants.Round(), steps=STEPS)
    bench.complete_all("00", "01")
    bench.leave("00")
    bench.leave("01")
    found = summary(bench.state, bench.now)
    assert found.state == "over" and found.code == "all_finished" and not bench.roster.members
    assert found.iterations == found.count > 0 and found.progress == 1.0


def test_one_who_has_finished_gives_the_run_s_model_to_a_worker_that_comes_back_without_it() -> None:
    bench = started("00", "01")
    finish(bench, "00", "01")
    bench.leave("01", failed=True)
    bench.join("01", incarnation=2)
    bench.ask("01", steps=STEPS)
    order = bench.round_of("01")
    assert bench.round_of("00") is order and order.new == (1,)


def test_the_run_ends_with_the_model_of_one_who_has_finished_if_nobody_else_has_one() -> None:
    bench = started("00", "01", algorithm=AllReduceSettings())
    bench.ask("00", wants=wants.End(), steps=STEPS)
    train(bench, "01", 3)
    assert bench.member("00").has is Has.OLDER
    bench.leave("01", failed=True)
    bench.join("01", incarnation=2)
    bench.ask("01", steps=STEPS)
    final = bench.round("00", "01")
    assert bench.state.stopping.code == "holders_leave"
    assert final.final and (final.source, final.new) == (0, (1,))


def test_progress_is_the_mean_place_in_the_loops() -> None:
    bench = started("00", "01")
    assert bench.state.share(bench.now) == 0.0
    train(bench, "00", 1)
    train(bench, "01", 1)
    bench.tick(1.0)
    made = [bench.member(place).done for place in ("00", "01")]
    assert bench.state.share(bench.now) == pytest.approx(sum(made) / 2 / STEPS)
    assert bench.state.expected == 2 * STEPS


def test_a_plan_with_a_length_ends_the_run_whatever_the_loops() -> None:
    bench = started("00", "01", iterations=500)
    train(bench, "00", 3)
    assert bench.state.expected == 500 and bench.state.share(bench.now) == bench.ledger.count / 500


def test_newcomers_begin_where_the_others_are() -> None:
    bench = started("00", "01")
    for place in ("00", "01"):
        train(bench, place, 8)
    there = bench.member("00").step, bench.member("01").step
    bench.join("02")
    assert isinstance(bench.only("02"), Welcome) and bench.only("02").step == sum(there) // 2


def test_the_only_worker_begins_again_where_it_was() -> None:
    bench = started("00")
    train(bench, "00", 8)
    done = bench.member("00").done
    bench.leave("00", failed=True)
    bench.join("00", incarnation=2)
    assert bench.only("00").step == done


def test_a_resumed_run_begins_at_its_share_of_the_checkpoint() -> None:
    bench = Bench(workers=2)
    for place in ("00", "01"):
        bench.join(place, resumed=60, resumed_run="before")
    assert [bench.got[place][0].step for place in ("00", "01")] == [30, 30]


def test_exactly_one_worker_saves_whoever_joins_or_is_replaced() -> None:
    bench = started("01", "00")
    assert bench.state.gathering.first == "node0/worker0"
    bench.leave("00", failed=True)
    for place, incarnation in (("00", 2), ("02", 1)):
        bench.join(place, incarnation)
        assert bench.only(place).first == "node0/worker0"


def one_finishes_after_another_has_failed() -> Bench:
    bench = started("00", "01", lease_s=10.0)
    train(bench, "01", 1)
    bench.leave("01", failed=True, reason="its process has ended")
    train(bench, "00", 3)
    finish(bench, "00")
    return bench


def test_who_failed_in_the_middle_has_time_to_come_back() -> None:
    bench = one_finishes_after_another_has_failed()
    bench.tick(15.0)
    assert bench.state.shown == "running"
    before, end = bench.roster.left["node0/worker1"].step, bench.member("00").step
    (welcome,) = bench.join("01", incarnation=2)["01"]
    assert isinstance(welcome, Welcome) and welcome.step == before < end
    bench.ask("01", steps=STEPS)
    assert bench.round("00", "01").new == (1,), "who has finished gives it the model"
    bench.complete_all("00", "01")
    bench.ask("00", did=False, wants=wants.End(), steps=STEPS)
    train(bench, "01", 5)
    assert bench.state.shown == "running"


def test_who_failed_and_does_not_come_back_is_not_waited_for() -> None:
    bench = one_finishes_after_another_has_failed()
    bench.tick(25.0)
    assert bench.round_of("00").final


def test_who_leaves_in_order_is_not_waited_for() -> None:
    bench = started("00", "01", lease_s=10.0)
    train(bench, "01", 1)
    finish(bench, "00")
    bench.leave("01")
    assert bench.round_of("00").final


def test_a_worker_that_hangs_holds_up_the_end_for_a_while_only() -> None:
    bench = started("00", "01", patience_s=5.0)
    finish(bench, "00", "01")
    bench.tick(40.0)
    assert bench.member("01").state is MemberState.BUSY and bench.state.shown == "running"
    bench.tick(15.0)
    assert bench.state.stopping.code == "stalled" and bench.round_of("00").final


@pytest.mark.parametrize(("how", "ends"), [("hangs", True), ("pauses", False)])
def test_one_that_hangs_before_another_ends_its_loop_is_waited_for_as_long(how: str, ends: bool) -> None:
    """One that evaluates may take longer: who leaves does not end the run for it."""
    bench = started("00", "01", patience_s=5.0)
    if how == "pauses":
        bench.pause("01")
    bench.ask("00", wants=wants.Round(), steps=STEPS)
    bench.tick(45.0)
    assert bench.member("00").held and bench.state.shown == "running"
    bench.tick(15.0)
    assert (bench.state.shown == "stopping") == ends
    if ends:
        assert bench.state.stopping.code == "stalled" and bench.round_of("00").final


def test_a_round_in_which_bytes_move_does_not_end_the_run_of_those_that_have_finished() -> None:
    bench = started("00", "01", "02", patience_s=5.0)
    finish(bench, "00", "01", "02")
    while bench.member("01").round is None:
        train(bench, "01", 1) if not bench.member("01").held else bench.ask("02", steps=STEPS)
    bench.transfer("01", 60)
    assert bench.state.shown == "running" and bench.member("01").round
    bench.transfers.clear()
    bench.tick(51.0)
    assert bench.state.stopping.code == "stalled"


def test_who_trains_on_and_asks_ahead_does_not_end_the_run_of_those_that_have_finished() -> None:
    bench = started("00", "01", patience_s=5.0, period=100, local_period=100)
    finish(bench, "00", "01")
    assert bench.ask_ahead("01") is not None
    for _ in range(10):
        bench.tick(10.0)
        assert bench.ask_ahead("01", did=1) is not None
    assert bench.state.shown == "running" and bench.member("00").state is MemberState.FINISHED
    bench.tick(51.0)
    assert bench.state.stopping.code == "stalled"


@pytest.mark.parametrize("ends", ["the operator", "its node"])
def test_a_finished_worker_hears_of_any_other_end(ends) -> None:
    bench = started("00", "01")
    finish(bench, "00", "01")
    if ends == "the operator":
        bench.say(StopRun("enough"))
        assert bench.member("00").state is MemberState.HELD
        bench.ask("01", steps=STEPS)
        assert bench.round_of("00").final
    else:
        bench.say(NodeLeave(0, 1, "the node ends"))
        assert isinstance(bench.only("00"), Stop)


def test_where_models_are_identical_no_other_round_is_needed() -> None:
    bench = started("00", "01", plan=make_plan(algorithm=AllReduceSettings(), workers=2))
    bench.ask("00", wants=wants.End(), steps=STEPS)
    assert bench.member("00").state is MemberState.FINISHED
    bench.ask("01", steps=STEPS)
    assert bench.round("01").generation.members == ("node0/worker1",)


def test_a_last_round_that_fails_is_made_again_by_those_that_have_finished() -> None:
    bench = started("00", "01", "02")
    bench.ask("00", wants=wants.Round(), steps=STEPS)
    finish(bench, "01", "02")
    bench.complete_all("00")
    bench.ask("00", did=False, wants=wants.End(), steps=STEPS)
    assert bench.member("00").state is bench.member("01").state is MemberState.FINISHED
    bench.leave("02")
    final = bench.round_of("00")
    assert final.final and bench.round_of("01") is final
    bench.fail("00", final.id)
    for place in ("00", "01"):
        bench.ask(place, same=True, dropped=final.id, wants=wants.End(), steps=STEPS)
    again = bench.round_of("00")
    assert again.final and bench.round_of("01") is again


def test_a_restarted_server_knows_who_has_finished() -> None:
    bench = started("00", "01")
    finish(bench, "00", "01")
    bench.coordinator.state = restore(capture(bench.state, bench.now), bench.now)
    assert bench.state.gathering.first == "node0/worker0"
    assert bench.state.expected == 2 * STEPS - (STEPS - bench.done["00"])
    bench.ask("00", same=True, did=False, wants=wants.End(), steps=STEPS)
    assert isinstance(bench.only("00"), Waiting)
    bench.ask("01", wants=wants.Round(), steps=STEPS)
    assert bench.round_of("00").final


def test_a_restarted_server_gives_one_who_has_finished_no_iterations() -> None:
    bench = started("00", "01")
    finish(bench, "00", "01")
    bench.coordinator.state = restore(capture(bench.state, bench.now), bench.now)
    bench.leave("01")
    assert bench.round_of("00").final


queues = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def run_of(sizes: list[int], seed: int, faults: Faults | None = None, **settings: object) -> SimulatedRun:
    plan = make_plan(period=8, local_period=4, workers=sum(sizes), **settings)
    run = SimulatedRun(plan, sizes, seed, faults)
    run.own_steps = STEPS
    return run


@examples(15)
@given(queues, st.integers(0, 1 << 16), st.integers(0, 2))
def test_all_make_their_own_steps_and_hold_the_consensus(sizes: list[int], seed: int, lookahead: int) -> None:
    run = run_of(sizes, seed, Faults(delay_s=0.3, double=0.1, pause=0.02), lookahead=lookahead).go()
    assert [w.done for w in run.workers] == [STEPS] * len(run.workers)
    assert run.reported == STEPS * sum(sizes) and not run.failed
    assert run.state.ledger.count <= run.learned
    (final,) = {w.stopped_with.id for w in run.workers if w.stopped_with}
    assert all(w.stopped_with for w in run.workers) and run.rounds[final].final


@pytest.mark.no_cover
@examples(30)
@given(queues, st.integers(0, 1 << 16), st.floats(0, 0.1), st.floats(0, 0.02))
def test_whatever_goes_wrong_the_run_ends(sizes: list[int], seed: int, lose: float, crash: float) -> None:
    faults = Faults(lose, 0.1, 0.5, 0.02, 0.02, crash=crash, exchange=0.02, kill=0.02)
    run = run_of(sizes, seed, faults, patience_s=5.0).go()
    crashed = [w for w in run.workers if not w.stopped_with and not w.refused]
    assert all(w.done <= STEPS for w in run.workers)
    assert len(crashed) < len(run.workers) or crash


def test_a_killed_worker_that_comes_back_makes_the_rest_of_its_loop() -> None:
    run = ServedRun(make_plan(period=8, local_period=4, workers=2, lease_s=10.0), [2])
    run.own_steps = STEPS
    run._tick()
    run.trains(30)
    victim = run.workers[1]
    victim.end()
    run.until(lambda: len(run.state.roster.members) == 1)
    run.add(0, 1)
    run.until(lambda: run.state.over)
    assert run.workers[2].began > 0 and run.workers[2].began + run.workers[2].done == STEPS
    assert {w.stopped_with.final for w in (run.workers[0], run.workers[2])} == {True}
    assert run.state.gathering.first == "node0/worker0"
