"""Iterations that are asked for before the last ones are made."""

import pytest

from lsgd.protocol import wants
from lsgd.protocol.messages import Go, NodeLeave, Pause, Recall, Request, Stop, StopRun
from lsgd.server.roster import MemberState

from .helpers import Bench, Lockstep, Waiting, started


def test_what_is_asked_for_ahead_is_granted_beside_what_is_to_be_made() -> None:
    bench = started("00", "01", period=4, local_period=4)
    assert bench.ledger.tokens == 6
    assert bench.ask_ahead("00") == Go(2, None, 0.0)
    assert (bench.member("00").granted, bench.ledger.tokens) == (2, 5)
    # The next one says that the first is made; the second is being made.
    assert bench.ask_ahead("00", did=1) is not None
    assert (bench.ledger.count, bench.member("00").granted, bench.ledger.tokens) == (1, 2, 4)


def test_no_more_is_granted_ahead_than_the_plan_says() -> None:
    bench = started("00", period=100, local_period=100)
    assert bench.ask_ahead("00") is not None
    assert bench.ask_ahead("00") is None and bench.member("00").granted == 2
    none = started("00", period=100, local_period=100, lookahead=0)
    assert none.ask_ahead("00") is None


def test_a_grant_ahead_is_a_quarter_of_an_equal_share_at_most() -> None:
    bench = started("00", "01", "10", period=41, local_period=41, lookahead=50)
    assert bench.ledger.tokens == 120
    granted = [bench.ask_ahead("00"), bench.ask_ahead("01"), bench.ask_ahead("10")]
    assert [go.iterations for go in granted if go] == [10, 9, 8]
    few = started("00", "01", "10", period=45, local_period=9, lookahead=50)
    go = few.ask_ahead("00")
    assert go is not None and go.iterations == 2  # of the 16 that its group has


def test_a_request_ahead_that_finds_no_token_is_forgotten_and_asked_again_when_nothing_is_left() -> None:
    bench = started("00", "01", period=1, local_period=1)
    assert bench.ask_ahead("00") is None and bench.got == {}
    assert bench.member("00").state is MemberState.BUSY and bench.member("00").seq == 1
    bench.ask("00")
    assert bench.member("00").state is MemberState.HELD and bench.member("00").seq == 2
    assert bench.round(*bench.ask("01")).scope == "global"


def test_a_grant_ahead_that_was_lost_is_given_again_and_what_was_made_counts_once() -> None:
    bench = started("00", "01", period=9, local_period=9, lookahead=2)
    granted = bench.ask_ahead("00")
    bench.done["00"] += 1
    assert bench.ask("00", same=True)["00"] == [granted]
    assert granted is not None and granted.iterations == 2
    assert (bench.ledger.count, bench.member("00").granted) == (1, 2)
    assert bench.ask("00", same=True)["00"] == [granted]
    assert (bench.ledger.count, bench.ledger.tokens) == (1, 14)


def test_a_request_ahead_that_comes_late_changes_nothing() -> None:
    bench = started("00", "01", period=9, local_period=9)
    bench.ask("00")
    late = Request(*bench.who("00"), 2, 0, 1, 0, None, wants=wants.More())
    assert bench.say(late) == {} and bench.member("00").granted == 1
    bench.ask("00")
    bench.pause("00")
    assert bench.say(Request(*bench.who("00"), 9, 0, 1, 0, None, wants=wants.More())) == {}
    assert bench.member("00").state is MemberState.PAUSED and bench.ledger.count == 3


def test_nothing_is_granted_ahead_in_a_round_that_is_not_completed() -> None:
    bench = Bench("00", "01")
    bench.ask_all("00", "01")
    assert bench.ask_ahead("00") is None
    bench.complete("00", 1)
    assert bench.ask_ahead("00") is not None
    bench.committed["01"] = 1  # its word of that is lost
    assert bench.ask_ahead("01") is not None and not bench.book.open


def test_where_every_iteration_is_a_round_nothing_is_granted_ahead() -> None:
    bench = started("00", "01", algorithm=Lockstep())
    assert bench.ask_ahead("00") is None


@pytest.mark.parametrize("how", ["asks", "pauses", "leaves", "dies"])
def test_what_was_granted_ahead_and_not_made_goes_back(how: str) -> None:
    bench = started("00", "01", period=41, local_period=41, lookahead=9)
    granted = bench.ask_ahead("00")
    assert granted is not None and (granted.iterations, bench.ledger.tokens) == (9, 71)
    if how == "asks":  # it was asked for what it has, and has made three
        bench.done["00"] += 2
        bench.ask("00")
        assert bench.member("00").granted == 1 and bench.ledger.tokens == 80 - 2 - 1
    elif how == "pauses":
        bench.say(Pause(*bench.who("00"), 3, 3, 1))
        assert bench.ledger.tokens == 80 - 2
    elif how == "leaves":
        bench.leave("00", did=True)
        assert bench.ledger.tokens == 80
    else:
        bench.incarnations.pop("00")
        bench.tick(20.0)
        assert bench.ledger.tokens == 80 + 1
    assert bench.ledger.count == {"asks": 3, "pauses": 3, "leaves": 1, "dies": 0}[how]


def test_who_has_more_than_its_next_iteration_is_asked_for_it_when_others_are_held() -> None:
    bench = started("00", "01", "10", period=18, local_period=9, lookahead=2)
    assert bench.ask_ahead("01") is not None and bench.ask_ahead("10") is not None
    assert bench.member("01").granted == 3
    while bench.member("00").state is MemberState.BUSY:
        bench.ask("00")
        asked = bench.got
    # Its group has no token left, so those of its group are asked, once.
    assert asked == {"01": [Recall()]}
    assert [type(answer) for answer in bench.ask("00", same=True)["00"]] == [Waiting]
    bench.ask("01")  # it has made one of three, and gives back two
    assert bench.got["00"] == [Go(bench.seqs["00"], None, 0.0)]


def test_who_has_only_its_next_iteration_is_not_asked_for_it() -> None:
    bench = started("00", "01", period=4, local_period=4)
    assert bench.ask_ahead("01") is not None
    while bench.member("00").state is MemberState.BUSY:
        bench.ask("00")
        asked = bench.got
    assert asked == {}


def test_who_has_made_what_it_was_granted_ahead_is_not_asked_for_it() -> None:
    bench = started("00", "01", "10", period=18, local_period=9, lookahead=2)
    assert bench.ask_ahead("01") is not None and bench.member("01").granted == 3
    bench.say(Request(*bench.who("01"), bench.seqs["01"], 1, 1, 0, None, wants=wants.More()))  # it has made one of them
    assert bench.member("01").granted == 2
    while bench.member("00").state is MemberState.BUSY:
        bench.ask("00")
    assert "01" not in bench.got


def test_a_stop_and_the_end_of_a_node_ask_for_what_was_granted_ahead() -> None:
    bench = started("00", "10", period=41, local_period=41, lookahead=9)
    assert bench.ask_ahead("00") is not None and bench.ask_ahead("10") is not None
    assert bench.say(NodeLeave(0, 1, "the machine goes down")) == {"00": [Recall()]}
    assert bench.ask_ahead("00", did=1) is None  # a node that goes gets no more
    assert bench.say(StopRun("enough")) == {"10": [Recall()]}
    bench.ask("00")
    assert isinstance(bench.only("00"), Stop)
    bench.ask("10")
    assert bench.round_of("10").final and bench.ledger.count == 1  # the other one's two are in no model


def test_who_trains_and_asks_ahead_is_no_straggler_while_another_waits() -> None:
    bench = started("00", "01", period=100, local_period=100, patience_s=30.0)
    bench.ask("00", wants=wants.Round())
    assert bench.ask_ahead("01") is not None
    for _ in range(5):
        bench.tick(20.0)
        assert bench.ask_ahead("01", did=1) is not None
    assert bench.member("01").state is MemberState.BUSY and bench.member("00").held
    bench.tick(30.0)
    assert bench.member("01").state is MemberState.STRAGGLER


def test_asking_ahead_for_what_is_not_left_does_not_make_others_wait_longer() -> None:
    bench = started("00", "01", period=2, local_period=2, patience_s=30.0)
    assert bench.ask_ahead("01") is not None
    bench.ask("00")
    bench.ask("00")
    assert bench.member("00").held
    bench.tick(20.0)
    assert bench.ask_ahead("01", did=1) is None
    bench.tick(10.0)
    assert bench.member("01").state is MemberState.STRAGGLER


def test_who_is_evicted_has_what_it_was_granted_ahead_set_aside() -> None:
    bench = started("00", "01", period=3, local_period=3, iterations=8, patience_s=30.0)
    assert bench.ask_ahead("01") is not None
    while bench.member("00").state is MemberState.BUSY:
        bench.ask("00")
    bench.tick(31.0)
    assert bench.member("01").state is MemberState.STRAGGLER and bench.member("01").granted == 2
    # It says that it has made one: what is set aside for it is one less, and it gets no more before it asks.
    assert bench.ask_ahead("01", did=1) is None
    assert (bench.member("01").done, bench.member("01").granted) == (1, 1)
