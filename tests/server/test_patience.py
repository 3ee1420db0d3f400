"""What becomes of a worker that keeps all others waiting: it is evicted from rounds, and comes back by asking."""

import json

import pytest

from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import GenerationOver, Go, NodeLeave, Stop, StopRun, Waiting
from lsgd.server.coordinator import Coordinator
from lsgd.server.journal import capture, restore
from lsgd.server.next_step import waits_for
from lsgd.server.reasons import Why
from lsgd.server.report import report
from lsgd.server.roster import MemberState

from .helpers import Bench, Lockstep, check_invariants, make_plan


def started(*places: str, **settings: object) -> Bench:
    """Return a bench whose first round is completed, so that each worker has an iteration to make."""
    bench = Bench(*places, **{"patience_s": 30.0, "lease_s": 10.0, **settings})
    bench.ask_all(*places)
    bench.complete_all(*places)
    return bench


def with_a_straggler(*, asks: tuple[str, ...] = ("00", "02"), late: str = "01", **settings: object) -> Bench:
    """Return one of two periods in which a worker is evicted, and the others are in their next round."""
    bench = started(*sorted({*asks, late}), **{"period": 1, "local_period": 1, **settings})
    bench.ask_all(*asks)
    bench.tick(30.0)
    assert bench.member(late).state is MemberState.STRAGGLER
    return bench


def test_the_round_starts_without_who_kept_all_others_waiting_and_both_sides_hear_why() -> None:
    bench = started("00", "01", "02", period=1, local_period=1)
    bench.ask("00")
    bench.tick(20.0)
    bench.ask("02")
    bench.tick(29.0)
    assert bench.member("00").held and bench.member("01").state is MemberState.BUSY
    bench.tick(1.0)
    told = "node0/worker1 is evicted from round 2: the others waited 30 s for it"
    assert bench.notes[:2] == [
        told,
        Why.GENERATION(number=2, workers="2 workers", nodes="1 node", transport="tcp", why=f" ({told})"),
    ]
    assert bench.got["01"] == [GenerationOver(1, told)]
    for place in ("00", "02"):
        over, go = bench.got[place]
        assert over == GenerationOver(1, told)
        assert go.round.generation.members == ("node0/worker0", "node0/worker2") and go.round.new == ()
    states = {m["worker"]: m["state"] for m in json.loads(report(bench.state, bench.now))["members"]}
    assert states == {"node0/worker0": "live", "node0/worker1": "straggler", "node0/worker2": "live"}


def test_what_it_made_is_lost_when_it_comes_back_because_it_takes_the_model_over() -> None:
    bench = with_a_straggler(iterations=100)
    assert bench.ledger.count == 2
    bench.ask("01")
    assert bench.ledger.count == 2 and "01" not in bench.got and bench.codes == ["loses"]
    assert bench.member("01").held and not bench.member("01").synced
    bench.complete_all("00", "02")
    bench.ask_all("00", "02")
    round = bench.round("00", "01", "02")
    assert round.new == (1,) and round.source == 0


def test_it_costs_the_others_their_patience_once() -> None:
    bench = with_a_straggler()
    for _ in range(3):
        bench.complete_all("00", "02")
        bench.ask_all("00", "02")
        bench.round("00", "02")
    assert bench.member("01").state is MemberState.STRAGGLER


def test_patience_of_0_has_no_end() -> None:
    bench = started("00", "01", patience_s=0.0, period=1, local_period=1)
    bench.ask("00")
    bench.tick(1000.0)
    assert bench.member("00").held and bench.member("01").state is MemberState.BUSY


def test_while_others_go_on_nobody_is_late() -> None:
    bench = started("00", "01", "02", period=8, local_period=8)
    for _ in range(4):
        bench.ask("00")
        bench.tick(29.0)
    assert {bench.member(place).state for place in ("00", "01", "02")} == {MemberState.BUSY}


def test_who_is_in_an_open_round_is_not_late_until_it_has_failed() -> None:
    bench = Bench("00", "01", patience_s=30.0)
    bench.ask_all("00", "01")
    bench.complete("00", 1)
    bench.ask("00")  # a token is left
    for _ in range(14):
        bench.ask("00")
    assert bench.member("00").held
    bench.tick(100.0)
    assert bench.member("01").state is MemberState.BUSY and bench.book.open
    bench.complete("01", 1)
    bench.tick(29.0)
    assert bench.member("01").state is MemberState.BUSY
    bench.tick(1.0)
    assert bench.member("01").state is MemberState.STRAGGLER


def test_lockstep_leaves_out_who_never_comes_to_its_round_and_takes_it_in_again() -> None:
    bench = Bench("00", "01", "02", plan=make_plan(algorithm=Lockstep(), workers=3, patience_s=30.0))
    bench.ask_all("00", "01", "02")
    for place in ("00", "02"):
        bench.fail(place, 1, "timed out")
        bench.ask(place, same=True, dropped=1)
    bench.tick(30.0)
    assert bench.round_of("00").generation.members == ("node0/worker0", "node0/worker2")
    bench.ask("01", same=True)  # it asks for what it has been answered, and hears that this is over
    assert isinstance(bench.got["01"][0], GenerationOver)
    bench.ask("01", same=True, dropped=1)
    assert bench.member("01").held and bench.ledger.count == 0
    bench.complete_all("00", "02")
    bench.ask_all("00", "02")
    assert bench.round("00", "01", "02").new == (1,)


@pytest.mark.parametrize("how", ["asks", "pauses", "leaves", "dies"])
def test_the_limit_is_kept_with_an_iteration_that_is_out(how: str) -> None:
    bench = with_a_straggler(iterations=8)
    for _ in range(2):
        bench.complete_all("00", "02")
        bench.ask_all("00", "02")
    assert bench.only("00").round is None  # the seventh; the eighth is with the one that is late
    bench.ask("00")
    assert bench.ledger.count == 7
    assert bench.state.stopping == (Why.REST_IS_OUT(count=7, limit=8, who="node0/worker1"))
    final = bench.round("00", "02")
    assert final.final
    if how == "asks":
        assert not bench.ask("01")
    elif how == "pauses":
        bench.pause("01")
    elif how == "leaves":
        bench.leave("01", did=True)
    else:
        bench.incarnations.pop("01")
        bench.tick(11.0)
    assert bench.ledger.count == 7, "what it has made comes too late for the consensus"
    bench.complete_all("00", "02")
    if how == "asks":
        assert bench.only("01") == Stop(2, None, bench.state.stopping, late=True)


def test_who_is_welcomed_and_has_not_asked_before_the_last_round_is_late() -> None:
    """So the worker that saves for all does not overwrite the consensus with what it has begun with."""
    bench = started("00", "01", iterations=8)
    bench.leave("00", failed=True)
    bench.join("00", incarnation=2)
    bench.say(StopRun("enough"))
    bench.ask("01")
    bench.complete_all("01")
    bench.ask("00")
    assert bench.only("00") == Stop(1, None, "enough", late=True)


def test_a_grant_that_comes_back_unused_is_granted_again() -> None:
    bench = with_a_straggler(iterations=8)
    bench.ask("01", did=False)
    assert bench.ledger.count == 2 and bench.ledger.tokens == 0
    for _ in range(2):
        bench.complete_all(*(p for p in ("00", "01", "02") if bench.member(p).round))
        bench.ask_all("00", "02", *(["01"] if bench.member("01").state is MemberState.BUSY else []))
    assert bench.ledger.count == 7
    assert isinstance(bench.only("00"), Go) and bench.only("00").round is None  # the eighth
    assert not bench.state.stopping


def test_the_only_ones_with_the_model_are_waited_for_but_not_by_the_last_round() -> None:
    bench = started("00", period=1, local_period=1)
    bench.join("01")
    bench.ask("01")
    bench.tick(100.0)
    assert bench.member("01").held and bench.member("00").state is MemberState.BUSY
    bench.say(StopRun("enough"))
    bench.tick(1.0)
    assert bench.member("00").state is MemberState.STRAGGLER and not bench.book.final
    assert waits_for(bench.state, bench.now + 1) == (Why.MODEL_AWAY(who="node0/worker0"))
    bench.tick(30.0)
    assert bench.round_of("01").final and bench.ledger.count == 0  # nothing was learned


def test_a_first_round_that_failed_leaves_no_model_to_wait_for() -> None:
    bench = Bench("00", "01", patience_s=30.0)
    bench.ask_all("00", "01")
    bench.fail("00", 1)
    bench.ask("00", same=True, dropped=1)
    bench.tick(30.0)
    assert bench.round_of("00").generation.members == ("node0/worker0",)


def test_the_last_round_does_not_wait_longer_for_it() -> None:
    bench = started("00", "01", "02")
    bench.say(StopRun("enough"))
    bench.ask_all("00", "02")
    bench.tick(30.0)
    assert bench.round_of("00").final and bench.round_of("02").final
    assert "evicted" in bench.codes


def test_a_phase_ends_without_the_iterations_that_are_out() -> None:
    phases = (PlanPhase(LocalSettings(period=1), 6), PlanPhase(LeaderSettings(period=8, local_period=8)))
    plan = Plan(RunSettings(workers=3, iterations=100, patience_s=30.0), phases)
    bench = with_a_straggler(plan=plan)
    assert (bench.ledger.count, bench.state.phases.number) == (2, 0)
    bench.complete_all("00", "02")
    bench.ask_all("00", "02")  # four are made, one is out, one is left
    assert bench.state.phases.number == 0
    bench.ask(next(p for p in ("00", "02") if bench.member(p).state is MemberState.BUSY))
    assert (bench.ledger.count, bench.state.phases.number) == (5, 1)
    bench.ask("01")
    assert bench.ledger.count == 5, "the next phase has no place for it"


def test_its_node_leaves_while_it_is_late() -> None:
    bench = with_a_straggler()
    bench.say(NodeLeave(0, 5, "node0 is to end"))
    bench.ask("01")
    assert bench.only("01") == Stop(2, None, "node0 is to end") and bench.ledger.count == 2


def test_several_are_evicted_together_and_a_newcomer_is_no_reason_to_wait_longer() -> None:
    bench = started("00", "01", "02", "03", "04", "05", period=1, local_period=1)
    bench.ask("00")
    bench.tick(30.0)
    assert bench.notes[0] == (
        Why.EVICTED(
            who="node0/worker1, node0/worker2, node0/worker3, node0/worker4 and 1 more",
            are="are",
            id=2,
            patience_s=30,
            them="them",
        )
    )
    assert bench.ledger.count == 1


def test_a_server_that_was_frozen_itself_has_not_waited() -> None:
    bench = started("00", "01", period=1, local_period=1)
    bench.ask("00")
    bench.now += 100.0
    bench.tick(29.0)
    assert bench.member("01").state is MemberState.BUSY
    bench.tick(1.0)
    assert bench.member("01").state is MemberState.STRAGGLER


def reborn(bench: Bench) -> Bench:
    saved = json.loads(json.dumps(capture(bench.state, bench.now)))
    bench.coordinator = Coordinator(restore(saved, bench.now))
    check_invariants(bench.state)
    return bench


@pytest.mark.parametrize("did", [True, False])
def test_one_that_is_late_still_is_when_the_server_was_started_again(did: bool) -> None:
    bench = reborn(with_a_straggler(iterations=100))
    assert bench.member("01").state is MemberState.STRAGGLER and bench.member("01").granted == 1
    before = bench.state.changes
    bench.ask("01", did=did)
    assert bench.member("01").held and bench.ledger.count == 2
    assert bench.state.changes > before
    bench.complete_all("00", "02")
    bench.ask_all("00", "02")
    assert bench.round("00", "01", "02").new == (1,)


def test_what_one_may_have_made_before_the_server_died_is_set_aside() -> None:
    bench = started("00", "01", iterations=12, period=4, local_period=4)
    saved = capture(bench.state, bench.now)
    for _ in range(4):
        bench.ask("01")  # it goes on, and the journal hears nothing of it
    assert (bench.ledger.count, bench.ledger.tokens) == (4, 2)
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(saved)), bench.now))
    bench.ask("00")
    assert isinstance(bench.ask("00", same=True)["00"][-1], Waiting)
    reborn(bench)
    bench.ask("00", same=True)
    bench.tick(30.0)
    # Of twelve, one is made, one was granted, and what the first eight have left beside the one made may be out.
    assert (bench.ledger.count, bench.member("01").granted) == (1, 8)
    assert bench.ledger.tokens + 1 <= 12 - 1 - 8
    bench.ask("01")
    assert bench.ledger.count - bench.ledger.base == 6 and bench.member("01").granted == 0
    assert bench.ledger.count == 1


def test_a_round_that_nobody_moves_in_fails_by_a_deadline_of_its_own() -> None:
    bench = started("00", "01", "02", period=1, local_period=1, exchange_timeout_s=6.0)
    bench.ask_all("00", "01", "02")
    bench.complete_all("00", "02")
    bench.ask_all("00", "02")
    bench.tick(89.0)  # its exchange may have ten steps of 6 s
    assert not bench.notes and bench.member("01").state is MemberState.BUSY
    bench.tick(1.0)
    assert bench.codes[0] == "round_fails.stuck"
    assert bench.got["01"][0] == GenerationOver(1, Why.STUCK(who="node0/worker1", longest_s=90))
    bench.tick(30.0)
    assert bench.member("01").state is MemberState.STRAGGLER
    assert bench.round("00", "02").new == ()


def with_a_long_transfer() -> Bench:
    """Return a bench in which all have completed a round but one, which moves bytes for longer than any deadline."""
    bench = started("00", "01", "02", period=1, local_period=1, exchange_timeout_s=6.0)
    bench.ask_all("00", "01", "02")
    bench.complete_all("00", "02")
    bench.transfer("01", 300)
    assert [*bench.book.open] == [2] and bench.book.failures == 0 and bench.member("01").round
    return bench


def test_a_round_in_which_bytes_move_takes_as_long_as_it_needs() -> None:
    bench = with_a_long_transfer()
    bench.complete("01", 2)
    assert not bench.book.open and bench.book.failures == 0


@pytest.mark.parametrize("says", ["the same", "nothing"])
def test_the_deadline_of_a_round_begins_when_its_transfer_ends_or_stands_still(says: str) -> None:
    bench = with_a_long_transfer()
    if says == "nothing":
        bench.transfers.clear()
    bench.tick(88.0)
    assert not bench.notes and bench.book.open
    bench.tick(2.0)
    assert bench.codes[0] == "round_fails.stuck"


def test_who_falls_silent_in_a_transfer_keeps_its_round_open_for_five_heartbeats_only() -> None:
    bench = with_a_long_transfer()
    bench.incarnations.pop("01")
    bench.tick(6.0)
    assert bench.codes[:2] == ["left_out.silent", "round_fails.fell_silent.silent"] and not bench.book.open


def test_a_transfer_outside_a_round_keeps_no_round_open() -> None:
    bench = started("00", "01", "02", period=1, local_period=1, exchange_timeout_s=6.0)
    bench.ask_all("00", "01", "02")
    bench.complete_all("00", "02")
    bench.transfer("00", 91)
    assert not bench.book.open and bench.book.failures == 1


def test_without_patience_no_round_fails_by_time() -> None:
    bench = started("00", "01", period=1, local_period=1, exchange_timeout_s=1.0, patience_s=0.0)
    bench.ask_all("00", "01")
    bench.tick(1000.0)
    assert not bench.notes and len(bench.book.open) == 1
