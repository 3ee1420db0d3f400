"""The view of a run: what a report and events make of it, and that its history stays small."""

import json
from dataclasses import replace

import pytest

from lsgd.protocol.events import (
    Event,
    GenerationBegan,
    Note,
    RoundCompleted,
    RoundFailed,
    RoundOrdered,
    RunChanged,
    RunProgress,
    SettingsChanged,
    Summary,
    WorkerChanged,
    WorkerJoined,
    WorkerProgress,
)
from lsgd.protocol.messages import Generation
from lsgd.watch.history import Series
from lsgd.watch.reader import Batch
from lsgd.watch.view import MAX_LINES, MAX_POINTS, MAX_ROUNDS, RunView, WorkerView

REPORT = {
    **{"run": "r", "state": "waiting", "reason": "why", "code": "joining", "algorithm": "leader", "period": 8},
    **{"period_reason": "as planned", "count": 0, "iterations": 1000, "progress": 0.0, "loss": None, "seconds": 0.0},
    **{"rounds_local": 0, "rounds_global": 0, "generation": 0, "nodes": 0, "members": [], "leaders": []},
    "stream": {"epoch": "e", "last": 0},
}
WHO = "node0/worker0"
OTHER = "node0/worker1"


class Bench:
    """A view, and events that are numbered and a second apart."""

    def __init__(self, **report):
        self.view, self.seq = RunView(REPORT | report), 0

    def tell(self, *told):
        for what in told:
            self.seq += 1
            self.view.fold(Event(self.seq, 1000.0 + self.seq, what))
        return self.view


def order(number, losses=None):
    return RoundOrdered(number, "global", -1, WHO, number * 8, float(number), losses or {WHO: 0.5})


def summary(count, **more):
    run = Summary("r", "running", "busy", "why", "leader", iterations=1000, count=count, seconds=float(count))
    return replace(run, **({"progress": count / 1000, "period": 8, "loss": 0.5} | more))


def progress_of(count, *workers, logged=(), **more):
    return RunProgress(summary(count, **more), workers, dict(logged))


def at(name, done, spent_s=0.0, nbytes=0, state="live"):
    return WorkerProgress(name, 0, state, done, 0.5, 0.25, spent_s, 2 * spent_s, 3 * spent_s, nbytes, nbytes // 2)


def progress(count, compute_s, sent=0, state="live"):
    worker = WorkerProgress(WHO, 0, state, count, 0.5, 0.1, compute_s, 1.0, 2.0, sent, 0)
    return RunProgress(summary(count), (worker,))


def test_events_change_what_is_the_case() -> None:
    bench = Bench()
    view = bench.tell(
        WorkerJoined(WHO, 0, "10.0.0.1", ""),
        GenerationBegan(Generation.of(1, [(0, 0)], "tcp"), "", ""),
        order(1, {WHO: 0.5, "node0/worker1": float("nan")}),
        RoundCompleted(1, 0.25, 100),
        order(2),
        RoundFailed(2, "error", "peer closed"),
        SettingsChanged({"keep": "0.1"}),
        Note("period", "period 16"),
    )
    assert view.workers[WHO].rank == 0
    assert (view.settings, view.workers[WHO].times_leader) == ({"keep": "0.1"}, 2)
    now = summary(16, period=16, delay=5, period_reason="a round takes long", algorithm="diloco", loss=0.5)
    assert bench.tell(RunProgress(now, ())).now == now
    over = bench.tell(RunChanged("over", "enough", "seen enough")).now
    assert over == replace(now, state="over", code="enough", reason="seen enough")
    first, second = view.rounds
    assert (first.state, first.took_s, first.sent_nbytes) == ("completed", 0.25, 100)
    assert (second.state, second.reason) == ("failed", "peer closed")
    assert [line.words for line in view.log] == ["period 16"]


def test_rate_and_time_left_follow_the_last_seconds() -> None:
    bench = Bench()
    view = bench.tell(progress(0, 0.0))
    assert (view.rate, view.left_s) == (None, None)
    view = bench.tell(*(progress(10 * n, 0.5 * n) for n in range(1, 51)))
    assert view.rate == 10.0 and view.left_s == 50.0
    view = bench.tell(*(progress(500, 25.0) for _ in range(40)))
    assert (view.rate, view.left_s) == (0.0, None)
    view = bench.tell(*(progress(n, 25.0) for n in (400, 420)))  # it went back to a checkpoint
    assert view.rate == 20.0


@pytest.mark.parametrize("back_s", [0.0, 1.0, 35.0, 700.0])
def test_the_pace_begins_anew_where_the_servers_clock_was_set_back(back_s: float) -> None:
    view = RunView(REPORT)
    times = [0.0, 40.0, *(40.0 - back_s + second for second in range(3))]
    rates = []
    for number, (time, count) in enumerate(zip(times, (0, 40, 41, 51, 61), strict=True), 1):
        view.fold(Event(number, 1000.0 + time, progress_of(count)))
        rates.append((view.rate, view.left_s))
    assert rates[1][0] == 1.0 and rates[2] == (None, None)
    assert [rate for rate, _ in rates[3:]] == [10.0, 10.0] and rates[4][1] == pytest.approx(93.9)


def test_the_time_left_is_steady_where_rounds_take_long_and_leaves_out_how_long_workers_were_awaited() -> None:
    bench, made, off = Bench(), 200.0, list[float]()
    bench.tell(*(progress_of(200, state="waiting", code="waiting") for _ in range(60)))  # resumed, of 1000
    seconds = range(600)
    for second in seconds:  # 40 s of each minute train, and 20 s exchange: 1 iteration a second in the mean
        made += 1.5 * (second % 60 < 40)
        view = bench.tell(progress_of(int(made)))
        if second >= 180:
            assert view.left_s is not None
            off.append(view.left_s / (1000 - made))
    assert 0.8 < min(off) and max(off) < 1.25


def test_totals_go_on_where_another_process_begins_at_zero() -> None:
    view = Bench().tell(progress(1, 5.0, 100), progress(2, 6.0, 200), progress(3, 1.0, 10), progress(4, 2.0, 20))
    totals = list(view.workers[WHO].totals)
    assert [t.compute_s for t in totals] == [5.0, 6.0, 7.0, 8.0]
    assert [t.sent_nbytes for t in totals] == [100, 200, 210, 220]


def test_gaps_are_the_times_that_a_worker_was_away() -> None:
    view = Bench().tell(
        WorkerChanged(WHO, "held", "", ""),
        WorkerChanged(WHO, "straggler", "evicted", "slow"),
        WorkerChanged(WHO, "left", "silent", "dead"),
        WorkerJoined(WHO, 0, "10.0.0.1", ""),
        WorkerChanged(WHO, "live", "", ""),
    )
    gaps = [(gap.state, gap.code, gap.begin, gap.end) for gap in view.workers[WHO].gaps]
    assert gaps == [("straggler", "evicted", 1002.0, 1003.0), ("left", "silent", 1003.0, 1004.0)]


def test_a_gap_ends_with_the_next_progress_although_events_were_lost() -> None:
    view = Bench().tell(WorkerChanged(WHO, "straggler", "evicted", "slow"), progress(1, 1.0, state="straggler"))
    assert [gap.end for gap in view.workers[WHO].gaps] == [None]
    view.fold(Event(9, 1009.0, progress(2, 2.0, state="held")))
    assert [(gap.begin, gap.end) for gap in view.workers[WHO].gaps] == [(1001.0, 1009.0)]


def test_rounds_keep_their_times_when_the_server_is_started_again() -> None:
    entry = {"round": 1, "scope": "global", "node": -1, "worker": WHO, "count": 8, "seconds": 1.0, "losses": {}}
    bench = Bench(leaders=[entry, entry | {"round": 2, "seconds": 3.0}], stream={"epoch": "e", "last": 2})
    bench.tell(Note("", "a line"))
    assert [each.time for each in bench.view.rounds] == [None, None]
    view = bench.tell(progress(12, 1.0), order(3))  # 12 s after the first round, at 1002
    assert [each.time for each in view.rounds] == [991.0, 993.0, 1003.0]
    report = REPORT | {"leaders": [entry | {"round": 4, "seconds": 14.0}], "stream": {"epoch": "f", "last": 1}}
    view.apply(Batch(connected=True, report=report, restarted=True))
    view.fold(Event(1, 1090.0, order(4)))  # a new stream begins with its rounds
    view.fold(Event(2, 1100.0, progress(15, 1.0)))
    assert [each.time for each in view.rounds] == [991.0, 993.0, 1003.0, 1099.0]


def test_what_a_report_includes_is_history_only() -> None:
    member = {"worker": WHO, "node": 0, "rank": 3, "state": "live", "reason": "", "code": "", "done": 9, "loss": 0.1}
    members = [member | {"times_leader": 4, "heard_s_ago": 0.0}]
    bench = Bench(stream={"epoch": "e", "last": 3}, state="running", members=members)
    view = bench.tell(WorkerChanged(WHO, "straggler", "evicted", ""), order(1), order(2))
    assert (view.workers[WHO].state, view.workers[WHO].times_leader) == ("live", 4)
    assert [each.round for each in view.rounds] == [1, 2] and len(view.workers[WHO].gaps) == 1
    view = bench.tell(order(3))
    assert view.workers[WHO].times_leader == 5


def test_after_a_restart_the_history_stays_and_another_run_begins_anew() -> None:
    bench = Bench()
    view = bench.tell(order(1), order(2), Note("", "before"))
    entry = {"round": 2, "scope": "global", "node": -1, "worker": WHO, "count": 16, "seconds": 2.0, "losses": {}}
    leaders = [entry, entry | {"round": 3}]
    restarted = json.loads(json.dumps(REPORT | {"leaders": leaders, "stream": {"epoch": "f", "last": 0}}))
    view.apply(Batch(connected=True, report=restarted, restarted=True))
    assert [each.round for each in view.rounds] == [1, 2, 3] and len(view.log) == 1
    view.apply(Batch(connected=True, report=restarted | {"run": "another", "leaders": []}, lost=2))
    assert (view.now.run, list(view.rounds), len(view.log), view.connected) == ("another", [], 0, True)


def test_a_series_is_even_and_has_its_last_point() -> None:
    series: Series[int] = Series(8)
    for number in range(1000):
        series.add(number)
        points = list(series)
        assert len(points) <= 9 and points[0] == 0 and points[-1] == number == series.last
        assert points[:-1] == list(range(0, number, series.step))


def test_six_hours_stay_small() -> None:
    bench = Bench()
    for number in range(1, 6 * 3600):
        bench.tell(order(number), RoundCompleted(number, 0.1, 1), progress(number, float(number)), Note("", "line"))
    view = bench.view
    assert len(view.rounds) <= MAX_ROUNDS + 1 and len(view.log) == MAX_LINES
    totals = list(view.workers[WHO].totals)
    assert MAX_POINTS / 2 < len(totals) <= MAX_POINTS + 1
    assert totals[-1].compute_s == 6 * 3600 - 1  # totals lose nothing where points are left out


def test_a_new_process_that_has_said_no_loss_yet_has_not_lost_one() -> None:
    """It begins where the one before has ended: what a name has made is a sum over its processes."""
    worker = WorkerView(WHO, state="live")

    def says(time: float, done: int, loss: float | None) -> bool:
        worker.done, worker.loss = done, loss
        worker.add(time, WorkerProgress(WHO, 0, "live", done, loss, 0.1, time, 0.0, 0.0, int(time), 0))
        return worker.lost_its_loss

    assert not any(says(*each) for each in [(1.0, 5, 0.5), (2.0, 240, 0.1), (3.0, 240, None), (4.0, 240, None)])
    assert not says(5.0, 243, 0.4) and says(6.0, 244, None)
