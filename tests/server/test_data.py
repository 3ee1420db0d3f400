"""What members say of their data: whoever learns the same as another, or deals other data, is found."""

import json

import pytest

from lsgd.protocol.messages import Dealt, Refused
from lsgd.server.coordinator import Coordinator
from lsgd.server.data import MAX_DEALS, MAX_PASSES, MAX_SITES
from lsgd.server.journal import capture, restore
from tests import golden

from .helpers import Bench, check_invariants, started

FACTS = {"length": "100", "sampler": "at random", "seed": "0"}


def deal(bench: Bench, place: str, epoch: int = 0, drawn: str = "", where: str = "train.py:7", **facts: str) -> str:
    """Return why a member is refused that says how it deals; empty: it is not."""
    got = bench.say(Dealt(*bench.who(place), where, {**FACTS, **facts}, epoch, drawn)).get(place, [])
    return next((str(m.reason) for m in got if isinstance(m, Refused)), "")


def learned(*places: str) -> Bench:
    """Return a run in which they have learned from each other."""
    bench = started(*places, period=1, local_period=1)
    bench.ask_all(*places)
    bench.complete_all(*places)
    return bench


def test_before_anything_is_learned_the_run_fails_for_all() -> None:
    bench = started("00", "01")
    assert not deal(bench, "00")
    words = deal(bench, "01", seed="1", length="80")
    assert words.startswith(golden.text("data.divided_at"))
    assert golden.text("data.same_dataset") in words
    assert bench.state.failed == words and bench.state.failed.code == "other_deal"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"rows": "b"}, "(other rows), but"),
        ({"rows": "b"}, golden.text("data.split_before")),
        ({"order": "b"}, "(another order), but"),
        ({"order": "b"}, golden.text("data.rank_in_seed")),
        ({"sampler": "in order"}, "(sampler in order and at random), but"),
        ({"new": "x"}, "(new x and -), but"),
        ({"new": "x"}, golden.text("data.same_data")),
    ],
)
def test_what_differs_is_said_and_what_to_do(facts, said) -> None:
    bench = learned("00", "01")
    deal(bench, "00", **{name: "a" for name in facts if name in ("rows", "order")})
    assert said in deal(bench, "01", **facts)
    assert "node0/worker1" not in bench.roster.members and not bench.state.failed


def test_a_newcomer_is_compared_with_what_the_others_deal_now_or_have_dealt() -> None:
    bench = learned("00", "01")
    for place in ("00", "01"):
        assert not deal(bench, place) and not deal(bench, place, length="50")
    bench.join("02")
    assert not deal(bench, "02", length="50")
    bench.join("03")
    assert "length 60 and 100" in deal(bench, "03", length="60")
    bench.join("03", 2)
    assert "(seed 1 and 0)" in deal(bench, "03", length="50", seed="1"), "compared with what is most like it"


def test_who_comes_first_to_other_data_says_it_and_the_others_follow() -> None:
    """A script may divide other data at the same place later, or each of a list there."""
    bench = learned("00", "01")
    for place in ("00", "01"):
        assert not deal(bench, place)
    for length in range(MAX_DEALS + 3):
        assert not deal(bench, "00", length=str(length))
    assert not deal(bench, "01", length="far behind"), "what it should have dealt is forgotten"
    bench = learned("00", "01")
    assert not deal(bench, "00") and not deal(bench, "00", length="7")
    assert not deal(bench, "01") and not deal(bench, "01")
    assert "length 8 and 7" in deal(bench, "01", length="8")


def test_the_orders_of_passes_are_compared_too() -> None:
    bench = learned("00", "01", "02")
    for epoch in range(1, MAX_PASSES + 4):
        assert not deal(bench, "00", epoch, f"order {epoch}")
    assert not deal(bench, "01", 1, "another, and long ago")
    last = MAX_PASSES + 3
    assert not deal(bench, "01", last, f"order {last}")
    assert golden.text("data.order_of_pass", last=last) in (words := deal(bench, "02", last, "another"))
    assert golden.text("data.same_order") in words


def test_places_are_compared_by_themselves_and_not_without_end() -> None:
    bench = learned("00", "01")
    for line in range(MAX_SITES + 1):
        assert not deal(bench, "00", where=f"train.py:{line}", length=str(line))
    assert len(bench.state.data.sites) == MAX_SITES
    assert not deal(bench, "01", where="train.py:0"), "it is forgotten"
    assert deal(bench, "01", where=f"train.py:{MAX_SITES}")


def test_what_only_those_have_said_that_left_binds_nobody() -> None:
    bench = learned("00", "01", "02")
    deal(bench, "00")
    bench.leave("00")
    assert not deal(bench, "01", length="50") and not deal(bench, "02", length="50")
    assert not deal(bench, "02", length="60")
    bench.leave("02")
    assert golden.text("data.by_one_gone") in deal(bench, "01", length="70")


def test_another_server_goes_on_with_what_was_said() -> None:
    bench = learned("00", "01")
    deal(bench, "00", 3, "order")
    bench.data("00", "gradient", "data")
    saved = json.loads(json.dumps(capture(bench.state, bench.now), allow_nan=False))
    bench.coordinator = Coordinator(restore(saved, bench.now + 1.0))
    check_invariants(bench.state)
    assert json.loads(json.dumps(bench.state.data.to_json())) == saved["data"]
    assert golden.text("data.other_pass", number=3) in deal(bench, "01", 3, "other")


def test_a_newcomer_with_the_data_that_another_began_with_is_refused() -> None:
    bench = learned("00", "01")
    bench.data("00", "gradient", "first")
    bench.data("00", "order", "order")
    bench.data("01", "another gradient", "first")
    assert not any(isinstance(m, Refused) for m in bench.data("01", "order", "order").get("01", [])), "other noise"
    bench.join("02")
    (refused,) = bench.data("02", "order", "order")["02"]
    assert golden.text("data.same_batches") in refused.reason
    assert golden.text("data.came_later") in refused.reason
