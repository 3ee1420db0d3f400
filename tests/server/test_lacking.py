"""A newcomer that lacks parts of the run's model takes part in rounds, and in nothing else."""

import pytest

from lsgd.protocol.messages import Go, Heartbeat
from lsgd.server.next_step import waits_for
from lsgd.server.reasons import Why
from lsgd.server.roster import Has
from tests import golden

from .helpers import Bench, started
from .test_memento import reborn


def with_a_late_one(**settings: object) -> Bench:
    """Return a run of two workers and a third one, which has taken part in a round but lacks parts of the model."""
    bench = started(
        "00", "01", **{"period": 4, "local_period": 4, "lease_s": 10.0, "server_timeout_s": 60.0, **settings}
    )
    bench.join("10")
    bench.ask("10")
    train(bench)
    assert bench.round("00", "01", "10").new == (2,)
    bench.complete_all("00", "01")
    bench.complete("10", bench.member("10").round.round.id, lacking=True)
    return bench


def train(bench: Bench) -> int:
    """Let the first two train until a round is ordered; return how many iterations they have made."""
    before = bench.ledger.count
    while bench.member("00").round is None:
        for place in ("00", "01"):
            if not bench.member(place).held:
                bench.ask(place)
    return bench.ledger.count - before


def ask(bench: Bench, *, lacking: bool = True) -> dict:
    return bench.ask("10", did=False, lacking=lacking)


def test_it_stays_a_newcomer_without_iterations_until_it_has_all() -> None:
    bench = with_a_late_one()
    assert not ask(bench) and bench.member("10").held
    train(bench)
    assert bench.round("00", "01", "10").new == (2,)
    bench.complete_all("00", "01")
    bench.complete("10", bench.member("10").round.round.id, lacking=True)
    ask(bench)
    assert train(bench) <= 8  # those that train make as many as without it
    round = bench.round("00", "01", "10")
    assert round.new == (2,) and round.source != 2
    bench.complete_all("00", "01", "10")
    assert isinstance(bench.ask("10", did=True)["10"][0], Go)


def test_how_far_it_is_can_be_seen_while_the_others_train() -> None:
    bench = with_a_late_one()
    ask(bench)
    bench.say(Heartbeat(*bench.who("10"), transfer="29.4 of 100.0 MB with node0/worker0 at 9.41 Mbit/s"))
    assert str(waits_for(bench.state, bench.now + 1)) == (
        Why.CATCHES_UP(who="node1/worker0", transfer=golden.text("reasons.moved_29"))
    )
    bench.tick(500.0)  # nobody is evicted because it waits
    assert not any(code.startswith("evict") for code in bench.codes)


def test_a_request_says_it_too_if_the_word_about_the_round_is_lost() -> None:
    bench = started("00", "01", period=4, local_period=4)
    bench.join("10")
    bench.ask("10")
    train(bench)
    bench.committed["10"] = bench.member("10").round.round.id
    ask(bench)
    assert bench.member("10").has is Has.PARTS


@pytest.mark.parametrize("again", [False, True])
def test_alone_it_has_no_model_of_the_run(again: bool) -> None:
    bench = with_a_late_one(iterations=1000)
    ask(bench)
    if again:
        reborn(bench)
        bench.ask("10", same=True, lacking=True)
    bench.leave("00")
    bench.leave("01")
    assert "model_lost" in bench.codes
    assert bench.member("10").round is None
