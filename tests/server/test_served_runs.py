"""What befalls a run, with the real global server in virtual time; tests/integration has one real run of each kind."""

from dataclasses import replace

import pytest

from lsgd.protocol.events import Note, decode_event
from lsgd.protocol.messages import PROTOCOL, EventsQuery, Join, Pause, StopRun, Upward, encode
from lsgd.server.feed import FOLLOWS_FOR_S
from lsgd.server.state import SILENCE_S
from lsgd.server.stream import Stream
from lsgd.watch.view import RunView

from .helpers import make_plan
from .served_run import ServedRun
from .simulated_run import Faults, SimulatedWorker

LEASE_S = 10.0


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    """Print no lines: a thread does that, and after the test perhaps."""
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)


def begun(queues: list[int], *, seed: int = 0, faults: Faults | None = None, **settings: object) -> ServedRun:
    """Return a run that trains, in rounds of 12 iterations of each worker, local ones after 4."""
    settings = {"workers": sum(queues), "lease_s": LEASE_S, "patience_s": 60.0} | settings
    run = ServedRun(make_plan(period=12, local_period=4, **settings), queues, seed, faults)
    run._tick()
    run.trains(60)
    return run


def finish(run: ServedRun) -> int:
    """End a run at a limit a little later; return its count, which is what its workers have made."""
    limit = run.state.ledger.count + 60
    run.coordinator.change({"iterations": str(limit)})
    run.until(lambda: run.state.over)
    assert run.state.ledger.count == limit
    return limit


def live(run: ServedRun) -> list[str]:
    return sorted(m.worker for m in run.state.roster.members.values() if m.live)


def codes(run: ServedRun) -> list[str]:
    return [note.code for note in run.notes]


def view_of(stream: Stream) -> RunView:
    """Return what somebody sees who has followed the run from its beginning."""
    view, after = RunView(), 0
    while (answer := stream.after(after)).items:
        for item in answer.items:
            after += 1
            view.fold(decode_event(after, item))
    return view


def test_at_the_end_a_view_has_the_count_of_the_run() -> None:
    run = begun([2, 1])
    limit = finish(run)
    view = view_of(run.server._feed.stream)
    assert (view.now.state, view.now.count) == ("over", limit)
    assert sum(worker.done for worker in view.workers.values()) == limit
    assert {worker.state for worker in view.workers.values()} == {"left"}


@pytest.mark.parametrize(("resumed", "lines"), [(0, 2), (60, 0)])
def test_the_rounds_of_the_plan_are_told_to_a_run_that_begins_with_it(resumed, lines) -> None:
    class Run(ServedRun):
        def upward(self, worker: SimulatedWorker, message: Upward) -> None:
            super().upward(worker, replace(message, resumed=resumed) if isinstance(message, Join) else message)

    run = Run(make_plan(workers=2, iterations=120), [1, 1])
    run._tick()
    run.until(lambda: run.state.over)
    items = run.server._feed.stream.after(0).items
    events = [decode_event(number, item).what for number, item in enumerate(items)]
    told = [what.words for what in events if isinstance(what, Note)]
    assert sum("by its plan" in words or "that is few" in words for words in told) == lines
    assert run.state.ledger.count == 120


def test_the_server_waits_for_those_who_follow_the_run_to_hear_its_end(monkeypatch) -> None:
    run = begun([1])

    def ask(after: int) -> None:
        run.listener.arrived.append((b"operator#1", [encode(EventsQuery(PROTOCOL, after))]))
        run.server._receive(run.now)

    finish(run)
    assert not run.server._feed.is_read(run.now)
    monkeypatch.setattr("lsgd.server.stream.MAX_ANSWER_EVENTS", 16)
    ask(0)
    assert run.server._feed.is_read(run.now)
    while run.server._feed.is_read(run.now):  # an answer holds a part of the stream
        last = run.server._feed.last_of(b"operator#1")
        assert 0 < last < run.server._feed.stream.last
        assert not run.server._feed.is_read(run.now + FOLLOWS_FOR_S)  # it has given up
        ask(last)


@pytest.mark.parametrize("seed", range(5))
def test_a_global_server_killed_20_times_in_one_run(seed) -> None:
    run = begun([2, 1], seed=seed)
    rounds = 0
    for _ in range(20):
        run.kill()
        run.trains(20)
        made = max(run.rounds)
        assert made > rounds and run.state.roster.generation.number == 1
        rounds = made
    assert finish(run) == run.steps == sum(worker.done for worker in run.workers)
    assert run.kills == 20 and not run.failed
    assert run.journal.writes >= len(run.rounds)


@pytest.mark.parametrize("seed", range(3))
def test_kills_over_a_network_that_loses_doubles_and_delays(seed) -> None:
    run = begun([2, 2], seed=seed, faults=Faults(lose=0.1, double=0.1, delay_s=0.5, exchange_timeout_s=30.0))
    for _ in range(10):
        run.kill()
        run.trains(20)
    assert finish(run) == run.steps
    assert run.state.roster.generation.number == 1, "nobody was missed"


def test_a_worker_that_dies_is_left_out_after_five_heartbeats_and_evicted_after_its_lease() -> None:
    run = begun([3])
    run.workers[2].end()
    assert run.until(lambda: len(live(run)) == 2) < SILENCE_S + 1
    run.until(lambda: run.state.roster.generation.number == 2)
    assert LEASE_S - SILENCE_S - 2 < run.until(lambda: len(run.state.roster.members) == 2) < LEASE_S
    run.trains(60)
    run.add(0, 2)
    run.until(lambda: run.state.roster.generation.number == 3)
    run.trains(60)
    finish(run)
    assert all(worker.stopped_with is not None for worker in run.workers if worker is not run.workers[2])


def test_a_worker_that_computes_for_too_long_is_evicted_and_comes_back() -> None:
    run = begun([2])
    slow = run.workers[1]
    slow.step_s, before = 200.0, slow.step_s  # it beats all the time
    run.until(lambda: "evicted" in codes(run))
    slow.step_s = before
    run.until(lambda: len(live(run)) == 1)
    run.trains(60)
    run.until(lambda: len(live(run)) == 2)
    assert finish(run) == run.learned


def test_a_pause_that_is_not_heard_costs_the_others_their_patience(monkeypatch) -> None:
    run = begun([2], patience_s=1.0)
    away, upward = run.workers[1], run.upward
    monkeypatch.setattr(run, "upward", lambda who, word: None if isinstance(word, Pause) else upward(who, word))
    away.pauses = 1.0
    run.until(lambda: "evicted" in codes(run))
    away.pauses = 0.0
    run.until(lambda: len(live(run)) == 2)
    run.trains(60)
    assert finish(run) == run.learned


def test_a_node_that_is_cut_off_is_evicted_and_the_others_train_on() -> None:
    run = begun([2, 2])
    run.cut.add(1)
    run.until(lambda: live(run) == ["node0/worker0", "node0/worker1"])
    run.trains(60)
    run.cut.clear()
    run.until(lambda: all(worker.state == "gone" for worker in run.workers[2:]))
    assert all(worker.refused for worker in run.workers[2:]), "they are told that they are out"
    for index in (0, 1):
        run.add(1, index)
    run.until(lambda: len(live(run)) == 4)
    run.trains(60)
    finish(run)


@pytest.mark.parametrize("cut_s", [SILENCE_S - 1.0, LEASE_S - 2.0])
def test_a_link_that_is_cut_for_less_than_a_lease_costs_no_member(cut_s: float) -> None:
    run = begun([2, 2])
    run.cut.add(1)
    end = run.now + cut_s
    run.until(lambda: run.now > end)
    run.cut.clear()
    run.until(lambda: len(live(run)) == 4)
    run.trains(60)
    assert (run.state.roster.generation.number == 1) == (cut_s < SILENCE_S)
    assert not run.state.roster.left
    assert finish(run) == run.steps or cut_s > SILENCE_S, "what it made alone meanwhile, the others make again"


def test_silence_of_all_costs_no_run_its_model() -> None:
    """A frozen local server: those that fall silent with it stay in the run, whoever was heard last."""
    run = begun([2])
    run.cut.add(0)
    run.until(lambda: "all_silent" in {note.code for note in run.notes}, 2 * LEASE_S)
    end = run.now + 5 * LEASE_S
    run.until(lambda: run.now > end)
    assert len(live(run)) == 2
    run.cut.clear()
    run.trains(60)
    assert run.state.roster.generation.number == 1
    assert finish(run) == run.steps


def test_a_server_without_the_journal_of_the_run_does_not_begin_another() -> None:
    run = begun([2])
    run.forget()
    run.until(lambda: all(worker.state == "gone" for worker in run.workers))
    assert all(worker.refused for worker in run.workers)
    assert run.state.run == "another" and run.state.ledger.count == 0


def test_a_server_killed_when_the_run_is_told_to_stop_ends_it_when_it_is_back() -> None:
    run = begun([2, 1])
    run.server._act(run.coordinator.handle(StopRun("enough"), run.now))
    run.server._keep(run.now)
    run.kill()
    run.until(lambda: run.state.over)
    assert run.state.stopping.startswith("enough") and run.state.ledger.count == run.steps
