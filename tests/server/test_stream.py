"""The stream of events: what a run tells, how much of it is kept, and what whoever comes late has missed."""

import math

import pytest

from lsgd.errors import ProtocolError
from lsgd.protocol.events import (
    Event,
    GenerationBegan,
    Happening,
    Note,
    RoundCompleted,
    RoundFailed,
    RoundOrdered,
    RunChanged,
    SettingsChanged,
    WorkerChanged,
    WorkerJoined,
    decode_event,
    encode_event,
)
from lsgd.protocol.fields import packed
from lsgd.protocol.messages import MAX_LOGGED, MAX_NBYTES, MAX_OWN, Completed, Heartbeat, Leave, encode
from lsgd.server import stream as streams
from lsgd.server.report import progress
from lsgd.server.stream import Stream
from tests import golden

from .helpers import Bench


class Told(Bench):
    """A bench that keeps what the coordinator tells the stream."""

    def act(self, decision):
        self.told: list[Happening] = [*getattr(self, "told", []), *decision.happened]
        assert decision.notes == [what.words for what in decision.happened if isinstance(what, Note)]
        return super().act(decision)

    def take(self, *kinds: type) -> list[Happening]:
        """Return what was told since the last call, of these kinds, and forget it."""
        told, self.told = self.told, []
        return [what for what in told if isinstance(what, kinds)]


def events_of(stream: Stream, after: int = 0) -> list[Event]:
    answer = stream.after(after)
    return [decode_event(answer.first + i, item) for i, item in enumerate(answer.items)]


def test_a_run_tells_of_its_workers_rounds_and_states() -> None:
    bench = Told("00", "01", patience_s=5.0, iterations=100, period=1, local_period=1)
    joined = bench.take(WorkerJoined)
    assert joined == [WorkerJoined(f"node0/worker{i}", 0, "10.0.0.1", "") for i in range(2)]

    bench.ask_all("00", "01", w00=0.5, w01=0.25)
    changed, began, ordered, running = bench.take(GenerationBegan, RoundOrdered, RunChanged, WorkerChanged)[1:]
    assert changed == WorkerChanged("node0/worker1", "held", "", "")
    assert began.generation.members == ("node0/worker0", "node0/worker1")
    losses = {"node0/worker0": 0.5, "node0/worker1": 0.25}
    assert ordered == RoundOrdered(1, "global", -1, "node0/worker1", 0, 0.0, losses) == bench.book.elections[-1]
    assert (running.state, running.code) == ("running", "started")

    bench.now += 0.5
    for place, sent_nbytes in (("00", 100), ("01", 50)):
        bench.say(Completed(*bench.who(place), 1, sent_nbytes=sent_nbytes))
    assert bench.take(RoundCompleted) == [RoundCompleted(1, 0.5, 150)]

    bench.ask("00")
    bench.tick(6.0)
    (straggler,) = bench.take(WorkerChanged)
    assert (straggler.worker, straggler.state, straggler.code) == ("node0/worker1", "straggler", "evicted")
    bench.pause("00", did=False)
    (paused,) = bench.take(WorkerChanged)
    assert (paused.state, paused.code) == ("away", "pauses")
    bench.leave("01", failed=True, reason="out of memory")
    left, note = bench.take(WorkerChanged, Note)
    assert (left.worker, left.state, left.code) == ("node0/worker1", "left", "failed")
    assert note.code == "leaves.failed"

    bench.coordinator.change({"iterations": "50"})
    bench.coordinator.stop("enough")
    bench.tick()
    assert bench.take(SettingsChanged, RunChanged) == [
        SettingsChanged({"iterations": "50"}),
        RunChanged("stopping", "ordered", "enough"),
    ]


def test_a_failed_round_is_told_and_a_new_period_with_the_next_progress() -> None:
    bench = Told("00", "01", period=8)
    bench.ask_all("00", "01")
    bench.take()
    bench.fail("00", 1, "peer closed")
    (failed,) = bench.take(RoundFailed)
    assert (failed.round, failed.code) == (1, "error") and "peer closed" in failed.reason
    bench.coordinator.change({"period": "4", "local_period": "4"})
    bench.ask("00", same=True, dropped=1)
    bench.ask("01", same=True, dropped=1)
    told = progress(bench.state, bench.state.now).run
    assert (told.period, told.period_reason) == (4, "as planned")


def test_bytes_that_a_member_did_not_say_are_unknown() -> None:
    bench = Told("00", "01")
    bench.ask_all("00", "01")
    bench.say(Completed(*bench.who("00"), 1, sent_nbytes=100))
    bench.committed["01"] = 1
    bench.ask("01")  # its Completed was lost
    assert bench.take(RoundCompleted) == [RoundCompleted(1, 0.0, None)]


def test_progress_has_each_worker_and_nothing_absurd() -> None:
    bench = Told("00", "01")
    bench.ask_all("00", "01", w00=math.inf)
    bench.say(Heartbeat(*bench.who("00"), 1.5, math.nan, math.inf, -1, 7))
    found = progress(bench.state, bench.now + 2.0)
    assert (found.run.state, found.run.seconds, found.run.count) == ("running", 2.0, 0)
    first, second = found.workers
    assert (first.worker, first.rank, first.state, first.loss) == ("node0/worker0", 0, "live", None)
    spent = (first.compute_s, first.waiting_s, first.exchange_s, first.sent_nbytes, first.received_nbytes)
    assert spent == (1.5, 0.0, 0.0, 0, 7)
    assert (second.compute_s, second.heard_s) == (0.0, 2.0)
    (event,) = [decode_event(1, encode_event(3.0, found))]
    assert event == Event(1, 3.0, found)


def test_what_scripts_log_is_the_mean_of_live_workers_and_bounded() -> None:
    bench = Told("00", "01", "02")
    bench.ask_all("00", "01", "02")
    spent = (0.0, 0.0, 0.0, 0, 0)
    many = {f"n{i:02}": 1.0 for i in range(2 * (MAX_LOGGED + MAX_OWN))}
    bench.say(Heartbeat(*bench.who("00"), *spent, {"accuracy": 0.5, "": math.nan, "x" * 65: 1.0}))
    bench.say(Heartbeat(*bench.who("01"), *spent, {"accuracy": 1.0, "big": 1e308}))
    bench.say(Heartbeat(*bench.who("02"), *spent, {"big": 1e308}))
    assert progress(bench.state, bench.now).logged == {"accuracy": 0.75}
    bench.say(Heartbeat(*bench.who("01"), *spent, many))
    found = progress(bench.state, bench.now).logged
    assert len(found) == MAX_LOGGED + MAX_OWN and found["accuracy"] == 0.5
    bench.say(Leave(*bench.who("00"), 0, False, "done"))
    assert "accuracy" not in progress(bench.state, bench.now).logged


def test_what_is_new_comes_after_a_number() -> None:
    stream = Stream(clock=lambda: 12.5)
    stream.add(Note("", str(number)) for number in range(1, 6))
    assert [(e.seq, e.time, e.what.words) for e in events_of(stream, 3)] == [(4, 12.5, "4"), (5, 12.5, "5")]
    assert stream.after(3).last == 5 and stream.after(3).lost == 0
    for absurd in (5, 6, 1 << 62):
        assert stream.after(absurd).items == ()
    assert len(stream.after(-(1 << 62)).items) == 5
    assert Stream().epoch != stream.epoch


def test_an_event_that_cannot_be_encoded_leaves_a_note() -> None:
    stream = Stream()
    stream.add([RoundCompleted(1, None, 1 << 64), Note("", "\ud800"), Note("", "b")])
    words = [event.what.words for event in events_of(stream, 0)]
    assert words == [golden.text("messages.round_completed_overflow"), *words[1:2], "b"]
    assert words[1].startswith(golden.text("messages.note_unicode"))


def test_who_comes_late_is_told_how_much_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(streams, "MAX_EVENTS", 16)
    stream = Stream()
    for number in range(1, 101):
        stream.add([Note("", str(number))])
        kept = stream.last - stream.after(0).lost
        assert min(number, 13) <= kept <= 16
    answer = stream.after(10)
    assert answer.first == 10 + answer.lost + 1
    assert [e.what.words for e in events_of(stream, 10)] == [str(n) for n in range(answer.first, 101)]


def test_what_is_kept_and_answered_is_bounded_in_bytes(monkeypatch) -> None:
    monkeypatch.setattr(streams, "MAX_KEPT_NBYTES", 1 << 20)
    stream, size = Stream(), 10_000
    stream.add(Note("", "x" * size) for _ in range(300))
    assert (1 << 20) * 0.8 < (300 - stream.after(0).lost) * size < 1 << 20
    after, answers = 0, 0
    while after < stream.last:
        answer = stream.after(after)
        assert len(encode(answer)) < MAX_NBYTES and answer.items
        after, answers = answer.first + len(answer.items) - 1, answers + 1
    assert answers > 2
    stream.add([Note("", "x" * streams.MAX_ANSWER_NBYTES)])
    assert len(stream.after(stream.last - 1).items) == 1  # one that is larger than an answer comes alone


@pytest.mark.parametrize("fields", [[], [1.0], [1.0, 99], [1.0, 10, "a"], [1.0, 10, "a", 1], [1, 10, "a", "b"], 5])
def test_what_is_no_event_is_refused(fields) -> None:
    with pytest.raises(ProtocolError):
        decode_event(1, packed(fields))
