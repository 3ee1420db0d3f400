"""The channel against a listener of ours: what it sends again, what ends a wait, and how it survives the server."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lsgd.client.control import channel as module
from lsgd.client.control.channel import Channel
from lsgd.errors import EvictedError, ExchangeError, JoinError, RunOverError, ServerLostError
from lsgd.protocol.messages import (
    Done,
    Evicted,
    GenerationOver,
    GivenUp,
    Go,
    Heartbeat,
    Over,
    Recall,
    Refused,
    Request,
    StatusQuery,
    Waiting,
    decode,
    encode,
)
from lsgd.protocol.sockets import Listener, Poller

from ..integration.running import until

OTHER_RUN = "the global server has begun another run (R2) and does not know this one (R1): it was started without"


class Server:
    """The local server's side of one channel; the test says what it answers."""

    def __init__(self, address: str) -> None:
        self.listener = Listener(address)
        self.peer = b""
        self.got: list[Any] = []

    def hear(self) -> list[Any]:
        Poller(self.listener).wait(0.02)
        for peer, frames in self.listener.receive():
            self.peer = peer
            self.got += map(decode, frames)
        return self.got

    def hears(self, count: int, kind: type = Request) -> None:
        until(lambda: sum(isinstance(m, kind) for m in self.hear()) >= count, f"{count} {kind.__name__} come")

    def say(self, *messages: Any) -> None:
        frames = [m if isinstance(m, bytes) else encode(m) for m in messages]
        assert self.listener.send(self.peer, frames)

    def close(self) -> None:
        self.listener.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESEND_S", 0.1)
    monkeypatch.setattr(module, "SAY_EVERY_S", 0.2)


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    made = Server(f"ipc://{tmp_path}/s")
    yield made
    made.close()


@pytest.fixture
def channel(server: Server) -> Iterator[Channel]:
    made = Channel(server.listener.address, 7, silence_s=20.0)
    yield made
    made.close()


@pytest.fixture
def ask(channel: Channel) -> Iterator[Callable[..., Any]]:
    """Ask for an iteration in another thread; returns the future."""
    with ThreadPoolExecutor(4) as threads:

        def ask(seq: int = 1, **options: Any) -> Any:
            return threads.submit(
                channel.ask,
                request(seq),
                lambda m: isinstance(m, Go) and m.seq == seq,
                what="waits",
                **options,
            )

        yield ask


def request(seq: int) -> Request:
    return Request("node0/worker0", 7, seq, 0, 0, 0, None)


def go(seq: int) -> Go:
    return Go(seq, None, 0.5, "a token is left")


def test_a_question_is_sent_again_until_its_own_answer_comes(server, ask) -> None:
    answer = ask(3)
    server.hears(3)
    assert server.got == [request(3)] * len(server.got)
    server.say(go(2), Waiting(3, "not yet"))
    assert not answer.done()
    server.say(go(3), go(3))
    assert answer.result(10) == go(3)


def test_an_end_of_the_run_is_no_refusal(server, ask) -> None:
    answer = ask()
    server.hears(1)
    server.say(Over("lsgd stop"), Refused("too late"))
    with pytest.raises(RunOverError, match=r"^the run is over: lsgd stop$") as raised:
        answer.result(10)
    assert isinstance(raised.value, JoinError)
    assert raised.value.code == 0, "a script that does not handle it ends well"


def test_a_wait_ends_when_the_local_server_says_that_no_answer_will_come(server, ask) -> None:
    answer = ask()
    server.hears(1)
    server.say(Waiting(1, "for others"), GivenUp())
    with pytest.raises(ServerLostError, match="and its servers have ended or were given up"):
        answer.result(10)


def test_two_threads_may_ask_at_once(server, ask) -> None:
    first, second = ask(1), ask(2)
    until(lambda: {m.seq for m in server.hear()} == {1, 2}, "both questions come")
    server.say(go(2), go(1))
    assert (first.result(10).seq, second.result(10).seq) == (1, 2)


def test_what_was_expected_is_kept_until_it_is_asked_for(server, channel) -> None:
    expected = channel.expect(lambda m: isinstance(m, Go) and m.seq == 4)
    channel.send(request(4))
    server.hears(1)
    server.say(go(3), go(4))
    until(lambda: expected.answered is not None, "the answer comes")
    assert channel.ask(request(4), expected, what="waits", timeout_s=5.0) == go(4)
    forgotten = channel.expect(lambda m: isinstance(m, Go) and m.seq == 5)
    channel.forget(forgotten)
    server.say(go(5), Recall())
    until(channel.recalled, "the recall comes")
    assert forgotten.answered is None and not channel.recalled()


def test_silence_ends_a_wait_with_the_line_to_type(server, channel, ask) -> None:
    channel.silence_s = 0.5
    with pytest.raises(ServerLostError, match=f"silent for .*lsgd-server --local --listen {channel.address}"):
        ask().result(10)


def test_waiting_is_no_silence_and_its_reason_is_said(server, channel, ask, caplog) -> None:
    channel.silence_s = 0.6
    answer = ask()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        server.hears(1)
        server.say(Waiting(1, "the next round waits for node1/worker3"))
    server.say(go(1))
    assert answer.result(10) == go(1)
    assert any(m.endswith("the next round waits for node1/worker3") for m in caplog.messages)


def test_an_absent_global_server_ends_a_wait_in_time_with_the_line_to_type(server, channel, ask) -> None:
    channel.global_silence_s = 0.6
    line = "the global server at tcp://a:1 has been silent for 9 s; start it again there"
    waits, other = ask(1), ask(2, silence_s=20.0)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        server.hears(1)
        server.say(Waiting(2, line, away=True))
    with pytest.raises(ServerLostError, match=f"waits for 1 s, and {line}"):
        waits.result(10)
    server.say(go(2))
    assert other.result(10) == go(2)


def test_a_global_server_that_is_heard_again_in_time_ends_no_wait(server, channel, ask, monkeypatch) -> None:
    monkeypatch.setattr(module, "time", clock := Clock())
    channel.global_silence_s = 0.8
    answer = ask()
    server.hears(1)
    for _ in range(4):
        clock.now += 0.3
        server.say(Waiting(1, "away", away=True))
        until(lambda: channel._heard_at == clock.now, "it has heard the local server")
        clock.now += 0.3
        server.say(Waiting(1, "the next round waits for node1/worker3"))
        until(lambda: channel._global_heard_at == clock.now, "it has heard the global server")
    clock.now += 0.15  # so that it asks again, and looks at the times before
    server.hears(len(server.got) + 1)
    server.say(go(1))
    assert answer.result(10) == go(1)


def test_a_deadline_ends_a_wait_with_what_it_waited_for(server, ask) -> None:
    answer = ask(timeout_s=0.5)
    server.hears(1)
    server.say(Waiting(1, "2 of 3 workers have joined"))
    with pytest.raises(ExchangeError, match=r"waits for 0\.5 s: 2 of 3 workers have joined"):
        answer.result(10)


def test_a_refusal_ends_every_wait(server, ask) -> None:
    first, second = ask(1), ask(2)
    server.hears(2)
    server.say(Refused("the models differ"), Refused("node0/worker0 is not in the run"))
    for answer in (first, second):
        with pytest.raises(JoinError, match="the models differ"):
            answer.result(10)


def test_the_end_of_a_generation_ends_only_what_is_of_it(server, channel, ask) -> None:
    of_it, of_another, of_none = ask(1, generation=4), ask(2, generation=5), ask(3)
    until(lambda: {m.seq for m in server.hear()} == {1, 2, 3}, "all come")
    server.say(GenerationOver(4, "node1/worker0 left"))
    with pytest.raises(ExchangeError, match="generation 4 is over: node1/worker0 left"):
        of_it.result(10)
    assert channel.generation_over(4) == "node1/worker0 left"
    assert channel.generation_over(5) == ""
    server.say(go(2), go(3))
    assert (of_another.result(10).seq, of_none.result(10).seq) == (2, 3)


def test_a_message_that_is_none_is_dropped(server, ask, caplog) -> None:
    answer = ask()
    server.hears(1)
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        server.say(b"junk", go(1))
        assert answer.result(10) == go(1)
    assert "invalid message from the local server" in caplog.text


def test_messages_keep_their_order_while_the_server_is_away(server, channel, tmp_path) -> None:
    channel.send(Done("node0/worker0", 7, 1, True, ""))
    server.hears(1, Done)
    address = channel.address
    server.close()
    # What goes into a connection that has just ended is lost, and what must not be is acknowledged.
    until(lambda: channel.send(StatusQuery(8)) or len(channel._outbox) >= 3, "it knows that the server is away")
    for round in range(2, 50):
        channel.send(Done("node0/worker0", 7, round, True, ""))
    again = Server(address)
    try:
        again.hears(48, Done)
        rounds = [m.round for m in again.got if isinstance(m, Done)]
        assert rounds == sorted(rounds) and rounds[-1] == 49
    finally:
        server.listener = again.listener


class Clock:
    """Stands for the module ``time``; it moves when it is told to."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_heartbeat_comes_every_second_whatever_the_worker_is_busy_with(server, monkeypatch) -> None:
    monkeypatch.setattr(module, "time", clock := Clock())
    channel = Channel(server.listener.address, 7, silence_s=20.0)
    channel.start_heartbeat("node0/worker0")
    for beats in range(1, 4):
        server.hears(beats, Heartbeat)
        channel.send(StatusQuery(beats))  # the thread comes past the heartbeat before it sends this
        server.hears(beats, StatusQuery)
        assert server.got.count(Heartbeat("node0/worker0", 7)) == beats
        clock.now += 1.0
    channel.close()


def test_what_was_sent_before_the_close_arrives(server) -> None:
    channel = Channel(server.listener.address, 8, silence_s=1.0)
    for _ in range(20):
        channel.send(StatusQuery(8))
    channel.close()
    server.hears(20, StatusQuery)


def test_closing_ends_the_thread_even_with_no_server(tmp_path) -> None:
    before = threading.active_count()
    channel = Channel(f"ipc://{tmp_path}/nobody", 9, silence_s=1.0)
    channel.send(StatusQuery(9))
    channel.close()
    assert threading.active_count() == before


def test_a_server_with_another_run_counts_as_away(server, channel, ask) -> None:
    channel.run, channel.global_silence_s = "R1", 1.0
    asked = ask()
    server.hears(1)
    until(lambda: server.say(Evicted("who?", "R2")) or (server.hear() and asked.done()), "it gives up")
    with pytest.raises(ServerLostError, match=re.escape(OTHER_RUN)):
        asked.result(0)


def test_of_its_own_run_it_is_evicted(server, channel, ask) -> None:
    channel.run = "R1"
    asked = ask()
    server.hears(1)
    server.say(Evicted("it was silent", "R1"))
    with pytest.raises(EvictedError, match="it was silent"):
        asked.result(5)


def test_it_says_that_the_local_server_is_silent_whatever_that_said_before(server, channel, ask, caplog) -> None:
    ask()
    server.hears(1)
    server.say(Waiting(1, "the global server has been silent", away=True))
    until(lambda: "the local server at" in caplog.text, "it says which server is silent")
    channel.silence_s = 0.0  # the question waits no longer
