"""A run that goes on from checkpoints, and when members are told to write them."""

from dataclasses import replace

import pytest

from lsgd.protocol.messages import Go, Stop, StopRun
from lsgd.server.coordinator import Coordinator
from lsgd.server.journal import capture, restore
from lsgd.server.reasons import Why

from .helpers import Bench, Lockstep, greeting, make_plan


def resumed(limit: int, **counts: int) -> Bench:
    """Return a run of workers whose checkpoints are of so many iterations, all of which have asked."""
    places = [name.removeprefix("w") for name in counts]
    bench = Bench(workers=len(places), period=4, local_period=4, iterations=limit)
    for place, count in zip(places, counts.values(), strict=True):
        bench.join(place, resumed=count)
    bench.ask_all(*places)
    return bench


def test_the_count_goes_on_from_the_highest_checkpoint_and_those_without_it_take_over_the_model() -> None:
    bench = resumed(220, w00=100, w01=200, w10=0, w11=200)
    round = bench.round("00", "01", "10", "11")
    assert (round.count, round.source, round.new, round.leader) == (200, 1, (0, 2), 1)
    assert not round.checkpoint
    assert bench.notes[0] == (
        Why.RESUMED(
            count=200,
            holders="node0/worker1, node1/worker1",
            takers="; taking over their model: node0/worker0, node1/worker0",
        )
    )
    assert bench.ledger.count == 200
    bench.complete_all("00", "01", "10", "11")
    for _ in range(4):
        bench.ask_all("00", "01", "10", "11")
        if bench.member("00").round is not None:
            bench.complete_all("00", "01", "10", "11")
    assert bench.ledger.count == 216


def test_checkpoints_of_all_members_leave_no_newcomer() -> None:
    bench = resumed(0, w00=64, w01=64)
    assert bench.round("00", "01").new == ()
    assert bench.notes[0] == Why.RESUMED(count=64, holders="node0/worker0, node0/worker1", takers="")


@pytest.mark.parametrize("runs", ["abb", "bba", "bab"])
def test_of_two_runs_with_the_same_count_only_one_goes_on(runs: str) -> None:
    bench = Bench(workers=3, period=4, local_period=4)
    for place, run in zip(("00", "01", "10"), runs, strict=True):
        bench.join(place, resumed=64, resumed_run=run)
    bench.ask_all("00", "01", "10")
    round = bench.round("00", "01", "10")
    assert (round.count, round.new, runs[round.source]) == (64, (runs.index("a"),), "b")


def test_the_most_iterations_count_whoever_has_them() -> None:
    bench = Bench(workers=3, period=4, local_period=4)
    for place, count, run in (("00", 64, "a"), ("01", 65, "b"), ("10", 64, "a")):
        bench.join(place, resumed=count, resumed_run=run)
    bench.ask_all("00", "01", "10")
    round = bench.round("00", "01", "10")
    assert (round.count, round.new, round.source) == (65, (0, 2), 1)


def test_a_count_that_cannot_be_is_none() -> None:
    assert resumed(0, w00=-5).ledger.count == 0


def test_a_worker_that_comes_later_does_not_change_the_count() -> None:
    bench = resumed(0, w00=64)
    bench.complete_all("00")
    bench.join("01", resumed=640)
    bench.ask("01")
    while not isinstance(bench.got.get("01", [None])[-1], Go):
        bench.ask("00")
        if bench.member("00").round is not None and "01" not in bench.got:
            bench.complete_all("00")
    assert bench.round("00", "01").new == (1,)
    assert bench.ledger.count == 68


@pytest.mark.parametrize("algorithm", [None, Lockstep()])
def test_a_run_whose_iterations_were_all_made_says_so(algorithm: Lockstep | None) -> None:
    bench = Bench(plan=make_plan(workers=2, iterations=200, algorithm=algorithm))
    bench.join("00", resumed=200)
    bench.join("10", resumed=200)
    bench.ask_all("00", "10")
    assert bench.round("00", "10").final
    stop = bench.only("10")
    assert isinstance(stop, Stop) and stop.reason == (Why.ALL_MADE_BEFORE(limit=200))


def test_the_last_iterations_are_made_by_who_has_the_checkpoint() -> None:
    bench = resumed(202, w00=0, w01=200, w02=0)
    assert bench.round("00", "01").generation.members == ("node0/worker0", "node0/worker1")
    assert bench.round("00", "01").source == 1


def test_checkpoints_are_written_every_so_many_global_rounds_and_at_the_end() -> None:
    bench = Bench("00", "10", period=2, local_period=1, checkpoint_every=2)
    told: list[tuple[int, bool]] = []
    for _ in range(14):
        bench.ask_all("00", "10")
        for place in ("00", "10"):
            answer = bench.member(place).answer
            assert isinstance(answer, Go)
            if place == "00" and answer.round is not None and answer.round.scope == "global":
                told.append((answer.round.count, answer.round.checkpoint))
            elif answer.round is not None and answer.round.scope == "local":
                assert not answer.round.checkpoint
            if bench.member(place).round is not None:
                bench.complete_all(place)
    assert told == [(4 * n, n > 0 and n % 2 == 0) for n in range(7)]
    bench.say(StopRun("enough"))
    bench.ask_all("00", "10")
    last = bench.round("00", "10")
    assert last.final and last.checkpoint and last.count == 28


def test_a_checkpoint_that_failed_with_its_round_is_written_in_the_next() -> None:
    bench = Bench("00", "10", plan=make_plan(workers=2, algorithm=Lockstep(), checkpoint_every=1))
    bench.ask_all("00", "10")
    bench.complete_all("00", "10")
    bench.ask_all("00", "10")
    failed = bench.round("00", "10")
    assert failed.checkpoint
    bench.fail("00", failed.id)
    bench.ask("00", same=True, dropped=failed.id)
    bench.ask("10", same=True, dropped=failed.id)
    assert bench.round("00", "10").checkpoint


def rounds_at(bench: Bench, *times_s: float) -> list[bool]:
    """Make a global round at each of these times after the first; return whether each had a checkpoint."""
    begin_s, told = bench.now, []
    for time_s in times_s:
        bench.now = begin_s + time_s
        bench.ask_all("00", "10")
        told.append(bench.round("00", "10").checkpoint)
        bench.complete_all("00", "10")
    return told


def bench_of(algorithm: Lockstep | None, **settings: object) -> Bench:
    plan = make_plan(workers=2, period=1, local_period=1, algorithm=algorithm, **settings)
    return Bench("00", "10", plan=plan)


@pytest.mark.parametrize("algorithm", [None, Lockstep()])
def test_checkpoints_are_written_by_time_too(algorithm: Lockstep | None) -> None:
    times_s = (0.0, 59.0, 60.0, 61.0, 659.0, 760.0, 761.0, 1360.0)
    by_default = [False, False, True, False, False, True, False, True]
    assert rounds_at(bench_of(algorithm), *times_s) == by_default
    assert rounds_at(bench_of(algorithm, checkpoint_every_s=0.0), *times_s) == [False] * 8
    either = rounds_at(bench_of(algorithm, checkpoint_every=3), 0.0, 1.0, 2.0, 3.0, 602.0, 603.0, 604.0)
    assert either == [False, False, False, True, False, True, False]


def test_a_checkpoint_by_time_that_failed_with_its_round_is_written_in_the_next() -> None:
    bench = bench_of(None)
    assert rounds_at(bench, 0.0, 700.0 - 1) == [False, True]
    bench.now += 700
    bench.ask_all("00", "10")
    failed = bench.round("00", "10")
    assert failed.checkpoint
    bench.fail("00", failed.id)
    bench.ask("00", same=True, dropped=failed.id)
    bench.ask("10", same=True, dropped=failed.id)
    assert bench.round("00", "10").checkpoint


def test_a_server_that_was_started_again_has_a_checkpoint_written_soon() -> None:
    bench = bench_of(None)
    assert rounds_at(bench, 0.0, 1.0) == [False, False]
    bench.coordinator = Coordinator(restore(capture(bench.state, bench.now), 5.0))
    bench.now = 5.0
    assert rounds_at(bench, 1.0, 2.0) == [True, False]


def test_a_worker_that_comes_to_an_earlier_stage_is_welcomed_and_no_member() -> None:
    bench = Bench(workers=1, period=4, local_period=4)
    bench.state.run = "f00d-stage2"
    decision = bench.coordinator.handle(greeting(0, 0, 7), bench.now)
    assert [(worker, message.run) for worker, _, message in decision.answers] == [("node0/worker0", "f00d-stage2")]
    assert not bench.state.roster.members
    bench.coordinator.handle(replace(greeting(0, 0, 7), stage=2), bench.now)
    assert [*bench.state.roster.members] == ["node0/worker0"]
