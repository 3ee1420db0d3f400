"""What waits of each peer is handed out in order, in turns, and within bounds."""

from collections.abc import Callable

from lsgd.protocol.frames import MAX_CHUNK, MAX_WAITING_NBYTES, Inbox, pack
from lsgd.protocol.messages import MAX_NBYTES
from tests import golden

NEVER = 1e9


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def ticking(step_s: float = 1.0) -> Callable[[], float]:
    """Return a clock that goes on by a step whenever it is read."""
    times = iter(range(1 << 30))
    return lambda: next(times) * step_s


def test_a_peers_frames_come_in_order_whatever_parts_they_came_in() -> None:
    inbox = Inbox()
    frames = numbers(1000)
    for part in [*pack(frames[:400]), *frames[400:500], *pack(frames[500:])]:
        inbox.put(b"one", part)
    chunks = list(inbox.drain(NEVER))
    assert [frame for _, chunk in chunks for frame in chunk] == frames
    assert max(len(chunk) for _, chunk in chunks) == MAX_CHUNK
    assert not inbox


def test_who_sends_little_does_not_wait_for_who_sends_much() -> None:
    inbox = Inbox()
    (much,) = pack(numbers(60_000))
    inbox.put(b"much", much)
    inbox.put(b"little", b"a word")
    handed_out = list(inbox.drain(NEVER))
    assert [peer for peer, _ in handed_out[:3]] == [b"much", b"little", b"much"]


def test_a_turn_ends_in_time_and_the_next_one_goes_on_where_it_ended() -> None:
    inbox = Inbox(ticking())
    (part,) = pack(numbers(10 * MAX_CHUNK))
    inbox.put(b"much", part)
    first = [frame for _, chunk in inbox.drain(2.0) for frame in chunk]
    assert first == numbers(3 * MAX_CHUNK) and inbox
    inbox.put(b"much", b"later")
    inbox.put(b"little", b"a word")
    rest = list(inbox.drain(NEVER))
    assert [frame for peer, chunk in rest if peer == b"much" for frame in chunk] == [
        *numbers(7 * MAX_CHUNK, 3 * MAX_CHUNK),
        b"later",
    ]
    assert [peer for peer, _ in rest[:2]] == [b"much", b"little"]


def test_a_turn_that_begins_late_gets_something_done() -> None:
    inbox = Inbox(ticking())
    inbox.put(b"one", b"a word")
    assert list(inbox.drain(-1.0)) == [(b"one", [b"a word"])]


def test_what_one_peer_piles_up_is_dropped_and_said_and_others_lose_nothing() -> None:
    inbox, part = Inbox(), bytes(MAX_NBYTES)
    kept = MAX_WAITING_NBYTES // MAX_NBYTES
    for _ in range(kept + 5):
        inbox.put(b"much", part)
    inbox.put(b"little", b"a word")
    assert sum(len(chunk) for peer, chunk in inbox.drain(NEVER) if peer == b"much") == kept
    assert list(inbox.losses()) == [golden.text("server.dropped_many")]
    assert list(inbox.losses()) == []
    inbox.put(b"much", b"heard again")
    assert list(inbox.drain(NEVER)) == [(b"much", [b"heard again"])]
