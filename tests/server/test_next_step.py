"""What a run does next when all its live members are held: a value, which changes nothing."""

import json

import pytest

from lsgd.algorithms import ALGORITHMS
from lsgd.protocol import wants
from lsgd.protocol.messages import Request
from lsgd.server import next_step, scheduler, waits
from lsgd.server.journal import capture
from lsgd.server.next_step import Close, EndRun, Final, GoBack, LimitWait, Lost, Serve, Step, Train
from lsgd.server.roster import Has
from lsgd.server.rounds import MAX_FAILED_ROUNDS
from lsgd.server.waits import Wait

from .helpers import Bench, Lockstep, started


def step_after(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *places: str, want: wants.Want = wants.STEP
) -> Step | Wait:
    """Return what the run does once these members have asked; nobody carries it out."""
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "advance", lambda state: None)
        for place in places:
            seq, done = bench.seqs[place] + 1, bench.done[place] + (bench.seqs[place] > 0)
            request = Request(*bench.who(place), seq, done, bench.committed[place], 0, None, want)
            bench.coordinator.handle(request, bench.now)
    before = json.dumps(capture(bench.state, bench.now))
    step = next_step.choose(bench.state)
    again = next_step.choose(bench.state)
    assert json.dumps(capture(bench.state, bench.now)) == before
    assert type(step) is type(again)
    return step


def test_a_new_run_goes_back_to_its_beginning_and_trains(monkeypatch) -> None:
    bench = Bench("00", "01", period=8, local_period=8)
    step = step_after(bench, monkeypatch, "00", "01")
    assert isinstance(step, Train)
    assert [m.worker for m in step.members] == ["node0/worker0", "node0/worker1"]
    assert (step.tokens, step.leaving, step.stretch.number) == (16, [], 0)


def test_a_resumed_run_goes_back_to_its_checkpoint(monkeypatch) -> None:
    bench = Bench(workers=1)
    bench.join("00", resumed=40, resumed_run="before")
    step = step_after(bench, monkeypatch, "00")
    assert isinstance(step, GoBack) and step.origin.iterations == 40


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"iterations": 2}, "all_made"),
        ({"iterations": 3, "algorithm": Lockstep()}, "rest_too_small"),
    ],
)
def test_a_run_that_has_made_its_iterations_ends(monkeypatch, settings, code) -> None:
    bench = started("00", "01", period=1, local_period=1, **settings)
    step = step_after(bench, monkeypatch, "00", "01")
    assert isinstance(step, EndRun) and step.reason.code == code


def test_the_last_iterations_are_served_without_a_round(monkeypatch) -> None:
    bench = started("00", "01", period=1, local_period=1, iterations=3)
    step = step_after(bench, monkeypatch, "00", "01")
    assert isinstance(step, Serve) and step.tokens == 1


@pytest.mark.parametrize("name", ["leader", "allreduce"])
def test_a_run_that_all_leave_ends(monkeypatch, name) -> None:
    bench = started("00", "01", algorithm=ALGORITHMS[name]())
    step = step_after(bench, monkeypatch, "00", "01", want=wants.Round())
    assert isinstance(step, EndRun) and step.reason.code == "all_leave"


def test_a_run_that_stops_makes_the_final_round_unless_rounds_keep_failing(monkeypatch) -> None:
    bench = started("00", "01", period=1, local_period=1)
    bench.coordinator.stop("enough")
    step = step_after(bench, monkeypatch, "00", "01")
    assert isinstance(step, Final) and len(step.members) == 2
    bench.book.failures = MAX_FAILED_ROUNDS
    assert isinstance(next_step.choose(bench.state), Close)


def test_a_run_that_stops_waits_for_who_paused(monkeypatch) -> None:
    bench = started("00", "01", period=1, local_period=1)
    bench.pause("01")
    bench.coordinator.stop("enough")
    assert isinstance(step_after(bench, monkeypatch, "00"), LimitWait)
    bench.tick()
    assert next_step.choose(bench.state) == Wait(waits.paused)


@pytest.mark.parametrize("scratch", [False, True])
def test_a_run_whose_model_is_lost_fails_or_starts_over(monkeypatch, scratch) -> None:
    bench = started("00", "01", period=1, local_period=1, restart_from_scratch=scratch)
    bench.ask("00")
    assert isinstance(step_after(bench, monkeypatch, "01"), Train)
    for member in bench.roster.members.values():
        member.has = Has.NOTHING
    step = next_step.choose(bench.state)
    assert isinstance(step, GoBack) if scratch else isinstance(step, Lost) and step.fails
