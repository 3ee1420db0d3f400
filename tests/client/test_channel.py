"""What a channel sends again, what ends a wait, and how it survives the local server.

Waits take no time: the clock moves whenever somebody waits. A few tests have a real socket and its thread.
"""

import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lsgd.client.control import channel as module
from lsgd.client.control.channel import SAY_EVERY_S, Channel, Clock
from lsgd.client.control.waiting import Notice
from lsgd.errors import EvictedError, ExchangeError, JoinError, RunOverError, ServerLostError
from lsgd.protocol.messages import (
    Completed,
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
from lsgd.protocol.sockets import Listener, wait_for
from tests import golden

from ..integration.running import until

OTHER_RUN = "the global server has begun another run (R2) and does not know this one (R1): it was started without"


class World(Clock):
    """A clock, and the local server's side of a channel on it.

    Attributes:
        got: messages of the channel, and when they came, in seconds from the start.
        away: whether the local server is away.
        frozen_s: for how long this process is frozen in its next wait.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.got: list[tuple[float, Any]] = []
        self.away = False
        self.frozen_s = 0.0
        self._says: list[tuple[float, bytes]] = []
        self.channel = Channel("ipc:///s", 7, silence_s=20.0, clock=self, link=self)

    def at(self, seconds: float, *messages: Any) -> None:
        """Let the server say this then."""
        self._says += [(seconds, m if isinstance(m, bytes) else encode(m)) for m in messages]

    def ask(self, seq: int = 1, **options: Any) -> Any:
        """Ask for an iteration."""
        return self.channel.ask(request(seq), lambda m: isinstance(m, Go) and m.seq == seq, what="waits", **options)

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(round(seconds * 10)):
            self.seconds += 0.1
            self.channel.turn()

    def times(self, kind: type) -> list[float]:
        """Return when messages of this kind came, in whole seconds."""
        return [int(seconds) for seconds, message in self.got if isinstance(message, kind)]

    # -- the clock ---------------------------------------------------------------------------------------------

    def now(self) -> float:
        return 1000.0 + self.seconds

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        assert self.seconds < 3600, "it waits for ever"
        self.channel.turn()
        self.seconds += seconds + self.frozen_s
        self.frozen_s = 0.0

    # -- the link ----------------------------------------------------------------------------------------------

    def send(self, frames: list[bytes]) -> bool:
        self.got += [] if self.away else [(self.seconds, decode(frame)) for frame in frames]
        return not self.away

    def receive(self) -> Iterable[Sequence[bytes]]:
        due = [frame for seconds, frame in self._says if seconds <= self.seconds]
        self._says = [each for each in self._says if each[0] > self.seconds]
        return [due] * bool(due)

    def close(self) -> None:
        pass


@pytest.fixture
def world() -> World:
    return World()


def request(seq: int) -> Request:
    return Request("node0/worker0", 7, seq, 0, 0, 0, None)


def go(seq: int) -> Go:
    return Go(seq, None, 0.5)


def test_a_question_is_sent_again_until_its_own_answer_comes(world) -> None:
    world.at(2.5, go(2), Waiting(3, "not yet"))
    world.at(3.5, go(3), go(3))
    assert world.ask(3) == go(3)
    assert world.times(Request) == [0, 1, 2, 3]
    assert [message for _, message in world.got] == 4 * [request(3)]


def test_an_end_of_the_run_is_no_refusal(world) -> None:
    world.at(0.5, Over("lsgd stop"), Refused("too late"))
    with pytest.raises(RunOverError, match=golden.pattern("channel.run_over")) as raised:
        world.ask()
    assert isinstance(raised.value, JoinError)
    assert raised.value.code == 69, "a script that does not handle it ends with a code of its own, without a traceback"


def test_a_wait_ends_when_the_local_server_says_that_no_answer_will_come(world) -> None:
    world.at(1.0, Waiting(1, "for others"), GivenUp())
    with pytest.raises(ServerLostError, match=golden.pattern("channel.servers_given_up")):
        world.ask()


def test_what_was_expected_is_kept_until_it_is_asked_for(world) -> None:
    channel = world.channel
    expected = channel.expect(lambda m: isinstance(m, Go) and m.seq == 4)
    channel.send(request(4))
    world.at(0.0, go(3), go(4))
    channel.turn()
    assert channel.ask(request(4), expected, what="waits", timeout_s=5.0) == go(4)
    forgotten = channel.expect(lambda m: isinstance(m, Go) and m.seq == 5)
    channel.forget(forgotten)
    world.at(0.0, go(5), Recall())
    channel.turn()
    assert channel.recalled() and not channel.recalled()
    assert forgotten.answered is None


def test_silence_ends_a_wait_with_the_line_to_type(world) -> None:
    with pytest.raises(ServerLostError, match=golden.pattern("channel.join_timeout")):
        world.ask()
    assert 20 < world.seconds < 21


def test_a_time_in_which_this_process_was_frozen_is_no_silence(world) -> None:
    world.at(5.0, go(1))
    world.frozen_s = 100.0
    assert world.ask() == go(1)
    world.frozen_s = 100.0
    began = world.seconds
    with pytest.raises(ServerLostError, match="silent for 20 s"):
        world.ask(2)
    assert 120 < world.seconds - began < 121


def test_waiting_is_no_silence_but_it_is_said_who_is_silent(world, caplog) -> None:
    for seconds in range(1, 100, 10):
        world.at(seconds, Waiting(1, "the next round waits for node1/worker3"))
    world.at(100.0, go(1))
    assert world.ask() == go(1)
    assert golden.text("channel.silent_server") in caplog.messages


def test_the_reason_to_wait_is_said_ever_more_rarely_while_the_local_server_repeats_it(world, caplog) -> None:
    for seconds in range(1, 170):
        world.at(seconds, Waiting(1, "the next round waits for node1/worker3"))
    world.at(170.5, go(1))
    assert world.ask() == go(1)
    said = [
        re.fullmatch(r"waits for (\d+) s: the next round waits for node1/worker3", text) for text in caplog.messages
    ]
    assert [int(text[1]) for text in said] == pytest.approx([SAY_EVERY_S, 20, 40, 80, 140], abs=3)


class Rounds(World):
    """Its server answers each question with a round, half a second later, and a repeated one also with a reason."""

    def send(self, frames: list[bytes]) -> bool:
        known = {m.seq for _, m in self.got if isinstance(m, Request)}
        for message in map(decode, frames):
            if isinstance(message, Request) and message.seq in known:
                self.at(self.seconds, Waiting(message.seq, "it waits for node1/worker0 in mean()"))
            elif isinstance(message, Request):
                known.add(message.seq)
                self.at(self.seconds + 0.5, Go(message.seq, None, 0.0))
        return super().send(frames)


def test_a_wait_with_rounds_in_it_says_for_whom(caplog) -> None:
    world, notice = Rounds(), Notice()
    for seq in range(1, 100):
        world.ask(seq, notice=notice)
    assert world.seconds > 25.0
    said = [text for text in caplog.messages if text.startswith("waits for ")]
    assert len(said) >= 2
    assert all(re.fullmatch(golden.pattern("channel.waits_for_mean"), text) for text in said)


def test_what_an_earlier_question_waited_for_is_no_reason(world, caplog) -> None:
    world.at(1.0, Waiting(1, "1 of 2 workers have joined"), go(1))
    assert world.ask() == go(1)
    world.at(world.seconds + SAY_EVERY_S - 1, GenerationOver(4, "node1/worker0 left"))
    world.at(world.seconds + SAY_EVERY_S + 1, go(2))
    assert world.ask(2) == go(2)
    assert caplog.messages[-1] == golden.text("channel.no_word", seconds=f"{SAY_EVERY_S:g}")


@pytest.mark.parametrize("silence_s", [None, 5.0])
def test_an_absent_global_server_ends_a_wait_in_time_with_the_line_to_type(world, silence_s) -> None:
    world.channel.silence.global_s = 60.0
    line = "the global server at tcp://a:1 has been silent for 9 s; start it again there"
    for seconds in range(100):
        world.at(seconds, Waiting(1, line, away=True))
    limit = silence_s or 60
    with pytest.raises(ServerLostError, match=f"waits for {limit:.0f} s, and {line}"):
        world.ask(silence_s=silence_s)
    assert limit < world.seconds < limit + 1


def test_a_global_server_that_is_heard_again_in_time_ends_no_wait(world) -> None:
    world.channel.silence.global_s = 60.0
    for seconds in range(300):
        world.at(seconds, Waiting(1, "of node1/worker3" if seconds % 50 == 0 else "away", away=seconds % 50 > 0))
    world.at(300, go(1))
    assert world.ask() == go(1)


def test_a_deadline_ends_a_wait_with_what_it_waited_for(world) -> None:
    world.at(1.0, Waiting(1, "2 of 3 workers have joined"))
    with pytest.raises(ExchangeError, match=golden.pattern("channel.waits_for_workers")):
        world.ask(timeout_s=3.5)
    assert 3.5 < world.seconds < 4


def test_a_refusal_ends_every_wait_with_the_first_reason(world) -> None:
    world.at(0.0, Refused("the models differ"), Refused("node0/worker0 is not in the run"))
    for seq in (1, 2):
        with pytest.raises(JoinError, match="the models differ"):
            world.ask(seq)


def test_the_end_of_a_generation_ends_only_what_is_of_it(world) -> None:
    world.at(1.0, GenerationOver(4, "node1/worker0 left"))
    world.at(2.0, go(2))
    assert world.ask(2, generation=5) == go(2)
    with pytest.raises(
        ExchangeError, match=golden.pattern("reasons.generation_over", number=4, worker="node1/worker0")
    ):
        world.ask(1, generation=4)
    assert world.channel.endings.generation_over(4) == "node1/worker0 left"
    assert world.channel.endings.generation_over(5) == ""
    world.at(world.seconds + 1, go(3))
    assert world.ask(3) == go(3)


@pytest.mark.parametrize("message", [GivenUp(), Refused("the models differ"), Evicted("silent for 15 s", "")])
def test_where_no_answer_will_come_an_exchange_is_over_too(world, message) -> None:
    """Nobody else would free a worker from a collective without a deadline."""
    over: list[int] = []
    world.channel.endings.when_over = over.append
    world.at(1.0, message)
    with pytest.raises((JoinError, ServerLostError, EvictedError)):
        world.ask(1)
    assert over == [sys.maxsize]


def test_a_message_that_is_none_is_dropped(world, caplog) -> None:
    world.at(0.5, b"junk", go(1))
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        assert world.ask() == go(1)
    assert golden.text("channel.invalid_message") in caplog.text


def test_a_heartbeat_comes_every_second_also_between_questions(world) -> None:
    world.channel.signs.live_as("node0/worker0")
    world.passes(5.5)
    world.at(8.0, go(1))
    world.ask()
    assert world.times(Heartbeat) == list(range(9))
    assert world.got[0][1] == Heartbeat("node0/worker0", 7)


@pytest.mark.parametrize(("lease_s", "every_s"), [(15.0, 1.0), (5.0, 1.0), (2.0, 0.4), (1.0, 0.2)])
def test_a_short_lease_has_five_heartbeats(world, lease_s: float, every_s: float) -> None:
    world.channel.signs.lease_s = lease_s
    world.channel.signs.live_as("node0/worker0")
    world.passes(4.9)  # with a turn each 0.1 s
    times = [seconds for seconds, message in world.got if isinstance(message, Heartbeat)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) >= 4 and every_s - 1e-6 <= min(gaps) <= max(gaps) <= every_s + 0.1 + 1e-6


def test_nothing_is_lost_while_the_local_server_is_away(world) -> None:
    world.away = True
    for round in range(1, 50):
        world.channel.send(Completed("node0/worker0", 7, round))
        world.passes(0.2)
    world.away = False
    world.passes(0.1)
    assert [message.round for _, message in world.got] == list(range(1, 50))


def test_a_server_with_another_run_counts_as_away(world) -> None:
    world.channel.endings.run, world.channel.silence.global_s = "R1", 60.0
    for seconds in range(100):
        world.at(seconds, Evicted("who?", "R2"))
    with pytest.raises(ServerLostError, match=re.escape(OTHER_RUN)):
        world.ask()
    assert 60 < world.seconds < 61


def test_of_its_own_run_it_is_evicted(world) -> None:
    world.channel.endings.run = "R1"
    world.at(1.0, Evicted("it was silent", "R1"))
    with pytest.raises(EvictedError, match="it was silent"):
        world.ask()


# -- a real socket, served by a thread ------------------------------------------------------------------------


class Server:
    """The local server's side of one channel; the test says what it answers."""

    def __init__(self, address: str) -> None:
        self.listener = Listener(address)
        self.peer = b""
        self.got: list[Any] = []

    def hear(self) -> list[Any]:
        wait_for(0.02, self.listener)
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


def test_two_threads_may_ask_at_once(server, ask) -> None:
    first, second = ask(1), ask(2)
    until(lambda: {m.seq for m in server.hear()} == {1, 2}, "both questions come")
    server.say(go(2), go(1))
    assert (first.result(10).seq, second.result(10).seq) == (1, 2)


def test_messages_keep_their_order_while_the_server_is_away(server, channel, monkeypatch) -> None:
    channel.send(Completed("node0/worker0", 7, 1))
    server.hears(1, Completed)
    address, turn, sent = channel.address, channel.turn, list[bool]()
    monkeypatch.setattr(channel, "turn", lambda: sent.append(turn()) or sent[-1])
    server.close()
    # What goes into a connection that has just ended is lost, and what must not be is acknowledged.
    until(lambda: channel.send(StatusQuery(8)) or False in sent, "it knows that the server is away")
    for round in range(2, 50):
        channel.send(Completed("node0/worker0", 7, round))
    again = Server(address)
    try:
        again.hears(48, Completed)
        rounds = [m.round for m in again.got if isinstance(m, Completed)]
        assert rounds == sorted(rounds) and rounds[-1] == 49
    finally:
        server.listener = again.listener


def test_what_was_sent_before_the_close_arrives(server, monkeypatch) -> None:
    monkeypatch.setattr(module, "CLOSE_WITHIN_S", 20.0)  # in which it connects, too
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
