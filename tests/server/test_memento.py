"""A coordinator captured as JSON and restored: what it still knows, and that it grants nothing it must not."""

import json
from typing import Any

import pytest

from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.errors import ConfigError
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.events import RoundCompleted
from lsgd.protocol.messages import (
    Completed,
    Data,
    Evicted,
    Go,
    NodeLeave,
    Refused,
    Stop,
    StopRun,
    Term,
    Waiting,
    Welcome,
)
from lsgd.server.coordinator import Coordinator
from lsgd.server.journal import VERSION, capture, restore, taken_over
from lsgd.server.report import report
from lsgd.server.roster import MemberState
from tests import golden

from .helpers import Bench, check_invariants, greeting

REBOOTED_S = 3.0
"""The clock of a machine that has just started; the bench's begins at 100 s."""


def reborn(bench: Bench, now: float | None = None) -> Bench:
    """Kill the coordinator of a bench and start it again from what the journal would have."""
    saved = json.loads(json.dumps(capture(bench.state, bench.now), allow_nan=False))
    bench.now = bench.now + 1.0 if now is None else now
    elections = bench.book.elections
    bench.coordinator = Coordinator(restore(saved, bench.now))
    bench.book.elections.extend(elections)
    check_invariants(bench.state)
    assert json.loads(json.dumps(capture(bench.state, bench.now)))["open"] == saved["open"]
    return bench


def started(*places: str, **settings: Any) -> Bench:
    bench = Bench(*places, **settings)
    bench.ask_all(*places)
    bench.round(*places)
    return bench


def test_an_open_round_is_answered_the_same_in_the_same_generation() -> None:
    bench = started("00", "01", iterations=100)
    before = bench.only("01")
    bench.complete("00", 1)
    reborn(bench)
    assert isinstance(bench.ask("01", same=True)["01"][0], Go)
    after = bench.only("01")
    assert (after.seq, after.round) == (before.seq, before.round)
    assert after.round.generation.number == 1
    bench.ask("00")
    bench.complete("01", 1)
    assert not bench.book.open
    bench.ask("01")
    assert bench.round("00", "01").id == 2
    assert bench.roster.generation.number == 1
    assert bench.ledger.count == 2


def test_nothing_is_granted_before_all_have_said_what_they_did() -> None:
    bench = started("00", "01", iterations=100, period=8)
    bench.complete_all("00", "01")
    bench.ask("00")
    assert bench.only("00").round is None  # a token was left
    reborn(bench)
    bench.ask("00")
    assert "00" not in bench.got
    bench.ask("00", same=True)
    assert isinstance(bench.only("00"), Waiting)
    bench.ask("01")
    assert bench.ledger.count == 3
    assert bench.round("00", "01").id == 2


def test_the_limit_is_exact_with_a_grant_that_the_journal_does_not_know() -> None:
    bench = started("00", "01", iterations=4, period=8)
    bench.complete_all("00", "01")
    bench.ask("00")
    assert isinstance(bench.only("00"), Go)  # the third; the fourth is left
    reborn(bench)
    bench.ask("01")  # has done the second
    bench.ask("00")  # and the third
    going = [place for place, answers in bench.got.items() if isinstance(answers[-1], Go)]
    assert len(going) == 1 and bench.ledger.count == 3


def test_a_pause_after_an_answer_that_the_journal_does_not_know_lets_the_others_go_on() -> None:
    bench = started("00", "01", iterations=100, period=8)
    bench.complete_all("00", "01")
    kept, before = capture(bench.state, bench.now), bench.state.changes
    bench.ask("00")
    assert isinstance(bench.only("00"), Go) and bench.state.changes == before
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(kept)), bench.now))
    bench.pause("00")
    assert len(bench.roster.within(MemberState.PAUSED)) == 1
    bench.ask("01")
    assert bench.round("01").generation.members == ("node0/worker1",)
    assert bench.ledger.count == 1 and bench.ledger.count - bench.ledger.base == 3


def test_a_paused_worker_is_still_away_and_its_return_is_kept() -> None:
    bench = started("00", "01", iterations=100, period=8)
    bench.complete_all("00", "01")
    before = bench.state.changes
    bench.pause("01")
    assert bench.state.changes > before
    reborn(bench)
    assert len(bench.roster.within(MemberState.PAUSED)) == 1
    before = bench.state.changes
    bench.ask("01", did=False)
    assert bench.state.changes > before and not bench.roster.within(MemberState.PAUSED)


@pytest.mark.parametrize("now", [REBOOTED_S, 1e6])
def test_leases_begin_anew_and_still_end(now: float) -> None:
    bench = reborn(started("00", "01", lease_s=10.0), now)
    bench.tick(9.0)
    assert len(bench.roster.members) == 2
    bench.incarnations.pop("01")
    bench.tick(11.0)
    assert list(bench.roster.members) == ["node0/worker0"]
    assert any(code.startswith("round_fails") for code in bench.codes)


def test_those_who_wait_for_others_are_not_given_up_at_once() -> None:
    bench = reborn(Bench("00", workers=2, join_timeout_s=600.0), 1e6)
    bench.tick(1.0)
    assert "node0/worker0" in bench.roster.members
    bench.join("01")
    assert {type(answers[0]) for answers in bench.got.values()} == {Welcome}
    bench.ask_all("00", "01")
    bench.round("00", "01")


def test_the_bytes_of_a_round_are_those_since_the_one_before() -> None:
    bench = started("00", period=1, local_period=1)
    bench.say(Completed(*bench.who("00"), 1, sent_nbytes=100))
    bench.committed["00"] = 1
    bench.ask("00")
    reborn(bench)
    decision = bench.coordinator.handle(Completed(*bench.who("00"), 2, sent_nbytes=130), bench.now)
    assert [e.sent_nbytes for e in decision.happened if isinstance(e, RoundCompleted)] == [30]


def test_who_has_left_stays_out_and_is_counted() -> None:
    bench = started("00", "01", "10", iterations=100)
    bench.complete_all("00", "01", "10")
    bench.leave("10", did=True)
    reborn(bench)
    assert bench.ledger.count == 1
    assert isinstance(bench.say(greeting(1, 0))["10"][0], Refused)
    assert isinstance(bench.ask("10")["10"][0], Evicted)
    members = {m["worker"]: m for m in json.loads(report(bench.state, bench.now))["members"]}
    assert members["node1/worker0"]["state"] == "left" and members["node1/worker0"]["done"] == 1
    bench.join("10", incarnation=2)
    bench.ask_all("10", "00", "01")
    assert bench.round("00", "01", "10").generation.number == 2


def test_a_failed_round_is_not_given_again() -> None:
    bench = started("00", "01")
    bench.fail("00", 1)
    reborn(bench)
    assert bench.roster.broken and bench.book.failures == 1
    bench.ask("00", same=True, dropped=1)
    bench.ask("01", same=True, dropped=1)
    round = bench.round("00", "01")
    assert (round.id, round.generation.number) == (2, 2)


def test_a_node_that_leaves_and_the_same_data_are_remembered() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.complete_all("00", "10")
    bench.ask_all("00", "10")
    bench.complete_all("00", "10")
    bench.data("00", "d1")
    bench.say(NodeLeave(1, 5, "node1 is to end"))
    reborn(bench)
    bench.ask("10")
    assert bench.only("10") == Stop(3, None, "node1 is to end")
    bench.join("11")
    refused = bench.say(Data(*bench.who("11"), "d1"))["11"][0]
    assert isinstance(refused, Refused) and refused.reason.code == "same_batches"


def test_a_stop_that_was_lost_with_the_server_is_given_again() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.complete_all("00", "10")
    bench.say(NodeLeave(1, 5, "node1 is to end"))
    stop = bench.ask("10")["10"]
    assert bench.member("10").state is MemberState.ENDED
    reborn(bench)
    assert bench.ask("10", same=True)["10"] == stop == [Stop(2, None, "node1 is to end")]
    assert bench.member("10").state is MemberState.ENDED


def test_a_stop_the_last_round_and_the_end_go_on() -> None:
    bench = started("00", "01")
    bench.complete_all("00", "01")
    bench.say(StopRun("enough"))
    reborn(bench)
    bench.ask_all("00", "01")
    final = bench.round("00", "01")
    assert final.final
    bench.complete("00", final.id)
    reborn(bench)
    assert not bench.state.closed
    bench.ask("01", same=True)
    assert bench.only("01") == Stop(2, final, "enough")
    bench.complete("01", final.id)
    assert bench.state.closed
    reborn(bench, REBOOTED_S)
    assert bench.state.closed and not bench.state.over
    bench.leave("00")
    bench.leave("01")
    assert bench.state.over and bench.ledger.count == 2


def test_an_end_that_nobody_leaves_is_over_in_time() -> None:
    bench = started("00")
    bench.complete_all("00")
    bench.say(StopRun("enough"))
    bench.ask("00")
    bench.complete("00", 2)
    reborn(bench, REBOOTED_S)
    bench.tick(11.0)
    assert bench.state.over


def test_phase_changed_settings_and_the_time_go_on() -> None:
    planned = (PlanPhase(LocalSettings(period=1), 4), PlanPhase(LeaderSettings(period=8, local_period=8)))
    plan = Plan(RunSettings(workers=2, iterations=100, seconds=1000.0), planned)
    bench = started("00", "01", plan=plan)
    for _ in range(2):
        bench.complete_all("00", "01")
        bench.ask_all("00", "01")
    bench.coordinator.change({"period": "16"})
    bench.coordinator.change({"iterations": "50"})
    bench.now += 30.0
    bench.tick()
    reborn(bench, REBOOTED_S)
    phases = bench.state.phases
    assert (phases.number, phases.algorithm.name, phases.schedule.period) == (1, "leader", 8)
    assert phases.next_algorithm.period == 16
    assert bench.book.averages, "the phase has begun, and its first round is open"
    assert bench.state.plan.run.iterations == 50
    assert bench.state.share(bench.now) == pytest.approx(max(4 / 50, 30 / 1000))
    assert bench.state.plan.phases == planned


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s.update(version=1), golden.pattern("journal.of_version_1", ours=VERSION)),
        (lambda s: s.pop("members"), golden.pattern("journal.no_state_by", error="KeyError")),
        (lambda s: s["open"][0].update(waiting=["nobody"]), golden.pattern("journal.no_state_by", error="KeyError")),
        (lambda s: s["members"][0].update(state="ASLEEP"), golden.pattern("journal.no_state_by", error="KeyError")),
        (lambda s: s["members"][0]["join"].pop("gpu"), golden.pattern("journal.no_state_by", error="TypeError")),
        (lambda s: s["generation"].update(node_sizes=[7]), golden.pattern("journal.two_members")),
        (lambda s: s.update(plan="{"), golden.pattern("journal.no_json")),
        (lambda s: s.update(algorithm={"name": "hope"}), "algorithm 'hope' is unknown"),
    ],
)
def test_what_is_no_state_is_refused(spoil: Any, told: str) -> None:
    state = json.loads(json.dumps(capture(started("00", "01").state, 100.0)))
    spoil(state)
    with pytest.raises(ConfigError, match=told):
        restore(state, 0.0)


@pytest.mark.parametrize(
    "copy", [{}, {"generation": {}}, {"generation": {}, "broken": []}, {"generation": {}, "broken": 7}]
)
def test_a_copy_that_is_no_state_is_refused(copy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("journal.no_state")):
        taken_over(copy, (Term(1, 0), Term(2, 1)))
