"""Two machines prove that they belong together, and everybody else does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.pairing.code import TRIES, WORDS, OwnCode, new_code, parse_code
from lsgd.pairing.session import HIDE_S, End, Hello, Send, Session, State, WrongCode
from tests import golden

from .conversation import GUEST, HOST, Conversation

PAIRED = (State.PAIRED, State.PAIRED)


def started(**state: object) -> Conversation:
    """Return a conversation after the greetings."""
    conversation = Conversation(**state)
    conversation.settle()
    return conversation


@pytest.mark.parametrize("typer", [HOST, GUEST])
def test_one_code_typed_on_either_side_pairs_both(typer: bool) -> None:
    both = started()
    assert both.states() == (State.CHOOSING, State.CHOOSING)
    both.type(typer, both.codes[not typer].words)
    both.settle()
    assert both.states() == PAIRED
    assert both.kept[HOST] == both.kept[GUEST] != b""
    both.do(GUEST, both.sides[GUEST].say({"is": "applies"}))
    both.do(HOST, both.sides[HOST].say({"is": "grants", "token": "secret"}))
    both.settle()
    assert (both.heard(HOST), both.heard(GUEST)) == ([{"is": "applies"}], [{"is": "grants", "token": "secret"}])
    assert not any(b"secret" in data for _, data in both.said)


def test_codes_typed_on_both_sides_at_once_pair_them_too() -> None:
    both = started()
    both.type(HOST, both.codes[GUEST].words)
    both.type(GUEST, both.codes[HOST].words)
    both.settle()
    assert both.states() == PAIRED
    assert [code.under_way for code in both.codes.values()] == [0, 0]


def test_machines_that_have_paired_need_no_code() -> None:
    both = started(kept={HOST: b"k" * 32, GUEST: b"k" * 32})
    assert both.states() == PAIRED
    assert "ask" not in both.kinds(HOST) + both.kinds(GUEST)


@pytest.mark.parametrize(
    "kept", [{HOST: b"", GUEST: b"k" * 32}, {HOST: b"k" * 32, GUEST: b""}, {HOST: b"1", GUEST: b"2"}]
)
def test_a_machine_that_has_lost_what_it_kept_is_asked_for_a_code_again(kept: dict[bool, bytes]) -> None:
    both = started(kept=kept)
    assert both.states() == (State.CHOOSING, State.CHOOSING)
    assert both.codes[HOST].wrong == both.codes[GUEST].wrong == 0
    both.type(GUEST, both.codes[HOST].words)
    both.settle()
    assert both.states() == PAIRED and both.kept[HOST] == both.kept[GUEST]


def test_a_wrong_code_leaves_two_tries_and_a_right_one_still_pairs() -> None:
    both = started()
    both.type(GUEST, "acid acid")
    both.settle()
    assert both.kinds(GUEST) == ["ask", "ask"] and both.kinds(HOST) == ["ask", "wrong"]
    assert both.states() == (State.CHOOSING, State.CHOOSING)
    both.type(GUEST, both.codes[HOST].words)
    both.settle()
    assert both.states() == PAIRED


def test_three_wrong_codes_end_it_for_everybody_who_comes_later() -> None:
    code = OwnCode("amber fox")
    for left in (2, 1, 0):  # each from another connection
        both = started(codes={HOST: code, GUEST: OwnCode("iris fox")})
        both.type(GUEST, "acid acid")
        both.settle()
        assert [effect for effect in both.effects[HOST] if isinstance(effect, WrongCode)] == [WrongCode(left)]
    assert both.states() == (State.ENDED, State.ENDED)
    late = started(codes={HOST: code, GUEST: OwnCode("iris fox")})
    late.type(GUEST, code.words)
    late.settle()
    assert late.states() == (State.ENDED, State.ENDED) and "paired" not in late.kinds(HOST)


def test_guesses_at_the_same_time_are_no_more_than_three() -> None:
    code = OwnCode("amber fox")
    guessers = [started(codes={HOST: code, GUEST: OwnCode("iris fox")}) for _ in range(10)]
    for each in guessers:
        each.type(GUEST, "acid acid")
        each.deliver()  # all offers are there before anybody proves anything
    assert code.under_way == TRIES
    for each in guessers:
        each.settle()
    assert (code.wrong, code.under_way) == (TRIES, 0)


def test_a_try_that_is_broken_off_before_its_proof_costs_nothing_and_tells_nothing() -> None:
    both = started()
    both.type(GUEST, "acid acid")
    both.deliver()
    assert both.codes[HOST].under_way == 1
    sent = [data for side, data in both.said if side is HOST]
    assert len(sent) == 2  # its greeting, and a share that is random whatever the code is
    both.sides[HOST].lost(both.now)
    assert (both.codes[HOST].wrong, both.codes[HOST].under_way) == (0, 0)


def test_a_machine_that_only_claims_to_have_the_code_shows_nothing_of_value() -> None:
    both = started()
    both.type(GUEST, both.codes[HOST].words)  # on the guest, to a machine that does not know this code
    both.codes[HOST].words = "acid acid"
    both.settle()
    assert "paired" not in both.kinds(GUEST) + both.kinds(HOST)
    assert both.kept == {HOST: b"", GUEST: b""}


def test_what_a_listener_has_heard_opens_nothing_later() -> None:
    both = started()
    both.type(GUEST, both.codes[HOST].words)
    both.settle()
    again = Conversation(codes=both.codes)
    for side, data in both.said:
        if side is GUEST:
            again.do(HOST, again.sides[HOST].receive(data, again.now))
    assert again.sides[HOST].state is not State.PAIRED and "paired" not in again.kinds(HOST)


def test_ones_own_messages_sent_back_prove_nothing() -> None:
    both = started()
    both.type(HOST, "acid acid")
    host, sent = both.sides[HOST], both.said[-1][1]
    for _ in range(10):
        effects = host.receive(sent, both.now)
        both.do(HOST, effects)
        sent = next((effect.data for effect in effects if isinstance(effect, Send)), b"")
    assert host.state is State.ENDED and "paired" not in both.kinds(HOST)


def test_a_changed_secret_message_ends_the_conversation() -> None:
    both = started(kept={HOST: b"k" * 32, GUEST: b"k" * 32})
    (sealed,) = both.sides[GUEST].say({"is": "applies"})
    assert isinstance(sealed, Send)
    changed = bytes([sealed.data[0] ^ 1]) + sealed.data[1:]
    both.do(HOST, both.sides[HOST].receive(changed, both.now))
    assert both.kinds(HOST)[-1] == "end"


def test_what_depends_on_a_code_leaves_after_a_fixed_time() -> None:
    both = started()
    effects = [both.sides[GUEST].type("acid acid", both.now)]
    assert all(effect.pause_s == HIDE_S for many in effects for effect in many if isinstance(effect, Send))


@pytest.mark.parametrize(("messages", "after_s"), [(0, 5.0), (2, 600.0), (3, 10.0)])
def test_every_wait_has_an_end(messages: int, after_s: float) -> None:
    both = Conversation()
    for _ in range(min(messages, 2)):
        both.deliver()
    if messages == 3:
        both.type(GUEST, "acid acid")
        both.deliver()
    host = both.sides[HOST]
    assert host.tick(both.now + after_s - 0.1) == []
    (end,) = host.tick(both.now + after_s)
    assert isinstance(end, End) and f"{after_s:g} s" in end.why
    assert both.codes[HOST].under_way == 0


@given(st.lists(st.sampled_from(["deliver", "lose", "right at host", "right at guest", "wrong", "junk"]), max_size=20))
def test_whatever_happens_only_those_who_know_the_same_are_paired(events: list[str]) -> None:
    both = Conversation()
    typed_right = False
    for event in events:
        if event == "deliver":
            both.deliver()
        elif event == "lose" and both.wire:
            both.wire.pop()
        elif event == "junk":
            both.do(HOST, both.sides[HOST].receive(b"\x81\xa2is\xa5proof", both.now))
        elif event == "wrong":
            both.type(GUEST, "acid acid")
        elif event.startswith("right"):
            side = HOST if event.endswith("host") else GUEST
            typed_right = True
            both.type(side, both.codes[not side].words)
    both.settle()
    if "paired" in both.kinds(HOST) + both.kinds(GUEST):
        assert typed_right
    if both.states() == PAIRED:
        assert both.kept[HOST] == both.kept[GUEST]
    for side in (HOST, GUEST):
        both.sides[side].lost(both.now)
        assert both.codes[side].under_way == 0


@given(st.binary(max_size=200), st.integers(0, 5))
def test_junk_at_any_time_ends_this_conversation_alone(junk: bytes, at: int) -> None:
    both = Conversation()
    if at > 2:
        both.settle()
        both.type(GUEST, both.codes[HOST].words)
    for _ in range(at % 3):
        both.deliver()
    for side in (HOST, GUEST):
        both.do(side, both.sides[side].receive(junk, both.now))
        assert "paired" not in both.kinds(side) or both.kept[side]


def test_a_machine_does_not_pair_with_itself() -> None:
    own = Hello("aaaa", "alpha")
    host, guest = (Session(own, OwnCode("iris fox"), lambda identity: b"", 0.0, hosts=side) for side in (HOST, GUEST))
    (hello,) = host.start()
    assert isinstance(hello, Send)
    assert guest.receive(hello.data, 0.0) == [End(golden.text("pairing.this_machine"))]


def test_codes_are_two_of_256_words_however_they_are_typed() -> None:
    assert len(set(WORDS)) == 256
    assert all(parse_code(code) == code for code in (new_code() for _ in range(100)))
    assert parse_code("  Crimson-OTTER\n") == "crimson otter"
    with pytest.raises(Exception, match=golden.pattern("pairing.mean_otter")):
        parse_code("crimson oter")
    with pytest.raises(Exception, match="has two words"):
        parse_code("crimson")
