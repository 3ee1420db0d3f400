"""Broken links: whom the run continues without, in which words, for how long, and how they come back."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.protocol.messages import Go, NodeLeave, Stop, StopRun, Waiting
from lsgd.server.links import MAX_EXACT, Links, connected, pairs_of, unreachable, whole_nodes
from lsgd.server.reasons import CHECK, Why
from lsgd.server.report import report
from lsgd.server.roster import MemberState
from tests import golden

from .helpers import Bench, Lockstep, make_plan, nccl
from .test_memento import reborn

NAMES = ("node0/worker0", "node0/worker1", "node1/worker0", "node1/worker1", "node2/worker0")

# -- who is evicted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "broken", "holders", "kept"),
    [
        (3, [], {0}, {0, 1, 2}),
        (3, [(1, 2)], {0, 1, 2}, {0, 1}),  # equally large, equally many models: the lowest ranks
        (3, [(1, 2)], {2}, {0, 2}),  # equally large: the one with more models
        (3, [(0, 1), (0, 2)], {0, 1, 2}, {1, 2}),  # the larger part
        (3, [(0, 1), (0, 2)], {0}, {0}),  # the larger part has nobody with the run's model
        (3, [(0, 1), (0, 2)], set(), {1, 2}),  # nobody has it yet
        (3, [(0, 1), (0, 2), (1, 2)], {1}, {1}),
        (5, [(0, 4), (1, 4), (2, 4), (3, 4)], {0, 1, 2, 3, 4}, {0, 1, 2, 3}),
        (5, [(a, b) for a in (0, 1) for b in (2, 3, 4)], {0, 1, 2, 3, 4}, {2, 3, 4}),
        # Whoever has the fewest broken links first would keep 0 and 4 and one of 1, 2, 3, which is no more than these.
        (5, [(0, 1), (1, 2), (2, 3), (3, 4)], {0, 1, 2, 3, 4}, {0, 2, 4}),
    ],
)
def test_the_largest_part_with_the_model_is_kept(
    size: int, broken: list[tuple[int, int]], holders: set[int], kept: set[int]
) -> None:
    assert connected(size, broken, holders) == kept


@st.composite
def matrices(draw: st.DrawFn, most: int) -> tuple[int, list[tuple[int, int]], set[int]]:
    size = draw(st.integers(1, most))
    pairs = list(combinations(range(size), 2))
    broken = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return size, broken, draw(st.sets(st.integers(0, size - 1)))


def works(part: frozenset[int], broken: list[tuple[int, int]]) -> bool:
    return not any(a in part and b in part for a, b in broken)


@given(matrices(40))
def test_all_that_are_kept_reach_each_other_and_nobody_is_evicted_without_need(
    matrix: tuple[int, list[tuple[int, int]], set[int]],
) -> None:
    size, broken, holders = matrix
    kept = connected(size, broken, holders)
    assert kept and works(kept, broken)
    assert all(not works(kept | {other}, broken) for other in range(size) if other not in kept)
    assert not holders or kept & holders


@given(matrices(8))
def test_no_larger_part_with_the_model_is_connected(
    matrix: tuple[int, list[tuple[int, int]], set[int]],
) -> None:
    size, broken, holders = matrix
    parts = [frozenset(part) for n in range(1, size + 1) for part in combinations(range(size), n)]
    worth = {
        part: (bool(part & holders), len(part), len(part & holders), [-rank for rank in sorted(part)])
        for part in parts
        if works(part, broken)
    }
    kept = connected(size, broken, holders)
    assert worth[kept] == max(worth.values())


def test_many_nodes_with_links_of_their_own_are_parted_too() -> None:
    size = 2 * MAX_EXACT
    chain = [(rank, rank + 1) for rank in range(size - 1)]
    assert connected(size, chain, {5}) >= {5}
    nodes = [(a, b) for a in range(8, 16) for b in range(120, 128)]  # of 128 workers, two nodes of eight
    assert connected(128, nodes, set(range(128))) == set(range(120))


@pytest.mark.parametrize(
    ("broken", "pairs"),
    [
        ((), []),
        ((2, 1), [(1, 2)]),
        ((1, 2, 2, 1, 0), [(1, 2)]),
        ((3, 1, 0, 2), [(0, 2), (1, 3)]),
        ((1, 1, -1, 2, 0, 4, 1 << 40, 2), []),
    ],
)
def test_what_cannot_be_a_pair_of_the_generation_is_passed_over(broken, pairs) -> None:
    assert pairs_of(broken, 4) == pairs


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ([(0, 4)], Why.UNREACHABLE(pairs="node0/worker0 and node2/worker0", more="")),
        ([(0, 4), (1, 4)], Why.UNREACHABLE(pairs="node0 and node2", more="")),
        ([(0, 1)], Why.UNREACHABLE(pairs="node0/worker0 and node0/worker1", more="")),
        (
            [(0, 4), (1, 4), (2, 4)],
            Why.UNREACHABLE(pairs="node0 and node2, node1/worker0 and node2/worker0", more=""),
        ),
        (
            [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3), (2, 4)],
            Why.UNREACHABLE(
                pairs="node0/worker0 and node0/worker1, node0/worker0 and node1/worker0, "
                "node0/worker0 and node1/worker1, node0/worker1 and node1/worker1",
                more=" (and 2 more pairs)",
            ),
        ),
    ],
)
def test_the_words_name_nodes_where_no_worker_of_one_reaches_the_other(broken, words) -> None:
    assert unreachable(NAMES, broken) == words


def test_those_evicted_are_named_by_their_node_if_all_of_it_are() -> None:
    assert whole_nodes(NAMES, {0, 2, 3}) == "node0/worker0, node1"


# -- for how long ----------------------------------------------------------------------------------------------


def test_each_time_it_takes_twice_as_long_up_to_ten_times() -> None:
    links, now, waits = Links(6.0), 100.0, []
    for _ in range(6):
        waits.append(links.cut(["a"], "why", now))
        assert links.bars("a", now) and not links.bars("b", now)
        now += waits[-1]
        assert not links.bars("a", now) and links.suspects(["b", "a"], now) and not links.suspects(["b"], now)
    assert waits == [6.0, 12.0, 24.0, 48.0, 60.0, 60.0]
    now += 60.0
    assert not links.suspects(["a"], now)  # it has held for as long as the longest wait
    assert links.cut(["a"], "why", now) == 6.0
    assert Links(1000.0).cut(["a"], "why", now) == 60.0


def test_the_words_of_one_that_waits() -> None:
    links = Links(6.0)
    links.cut(["a"], "a and b cannot reach each other", 100.0)
    end = golden.text("links.without_a", check=CHECK)
    assert links.words("a", 102.0) == golden.text("links.cut_for", end=end)
    links.relent(103.0)
    assert links.words("a", 104.0) == golden.text("links.cut_until_round", end=end)
    assert Links(6.0).words("a", 0.0) == golden.text("links.until_round", end=end)


# -- in a run --------------------------------------------------------------------------------------------------


def three(**settings: object) -> Bench:
    """Return a run of three nodes in which the link between the last two broke, and the next round is a probe."""
    bench = Bench("00", "10", "20", **{"exchange_timeout_s": 10.0, "period": 1, "local_period": 1, **settings})
    bench.ask_all("00", "10", "20")
    assert bench.round("00", "10", "20").probe  # how they reach each other is not known yet
    bench.complete_all("00", "10", "20")
    bench.ask_all("00", "10", "20")
    assert not bench.round("00", "10", "20").probe
    bench.fail("00", 2, "all_reduce: waited 10.0 s, then gave up: Timed out")
    ask_again(bench, 2, "00", "10", "20")
    assert bench.round("00", "10", "20").probe
    return bench


def ask_again(bench: Bench, dropped: int, *places: str) -> None:
    for place in places:
        bench.ask(place, same=True, dropped=dropped)


def test_after_a_failed_round_the_links_are_probed_and_whoever_is_cut_off_is_evicted() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    pair = "node1 and node2 cannot reach each other"
    assert bench.notes == [
        f"round 3 failed: {pair}",
        Why.EVICTED_LINK(who="node2", wait_s=10, reason=pair, check=CHECK),
    ]
    bench.fail("20", 3, broken=(1, 2))  # all of them find the same
    assert not bench.notes
    ask_again(bench, 3, "20")
    assert bench.only("20") == Waiting(
        2, Why.CUT(why=f"{pair}, and ", worker="node2/worker0", check=CHECK, when="in 10 s")
    )
    assert '"state": "cut"' in report(bench.state, bench.now)
    ask_again(bench, 3, "00", "10")
    round = bench.round("00", "10")
    assert round.id == 4 and not round.probe and bench.book.failures == 0
    assert (
        Why.GENERATION(number=3, workers="2 workers", nodes="2 nodes", transport="tcp", why=f" ({pair})") in bench.notes
    )


def test_it_is_tried_again_later_in_a_round_that_is_probed_and_takes_over_the_model() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    ask_again(bench, 3, "20", "00", "10")
    bench.complete_all("00", "10")
    bench.ask_all("00", "10")
    bench.tick(10.0)
    assert bench.round("00", "10").id == 5 if bench.got else True
    bench.complete_all("00", "10")
    bench.ask_all("00", "10")
    round = bench.round("00", "10", "20")
    assert round.probe and round.new == (2,)
    bench.fail("20", 6, broken=(1, 2))  # it is still broken
    assert "evicted for 20 s" in bench.notes[1]
    ask_again(bench, 6, "00", "10", "20")
    bench.complete_all("00", "10")
    bench.tick(20.0)
    bench.ask_all("00", "10")
    assert bench.round("00", "10", "20").probe
    bench.complete_all("00", "10", "20")  # it is mended
    assert all(bench.member(place).synced for place in ("00", "10", "20"))


def test_a_pair_counts_only_in_a_round_that_was_to_be_probed() -> None:
    bench = nccl("00", "10")  # whose links are not tried before a failure
    bench.ask_all("00", "10")
    bench.fail("10", 1, broken=(0, 1))
    assert bench.codes == ["round_fails.error"]
    ask_again(bench, 1, "00", "10")
    bench.fail("00", 2, broken=(0, 0))
    assert bench.codes == ["round_fails.error"]
    assert bench.book.failures == 2


def test_who_has_the_runs_model_is_kept_even_where_newcomers_are_more() -> None:
    bench = Bench("30", workers=1, exchange_timeout_s=10.0, period=4, local_period=4)
    bench.ask("30")
    bench.complete("30", 1)
    for place in ("00", "10"):
        bench.join(place)
        bench.ask(place)
    for _ in range(4):
        bench.ask("30")
    bench.fail("30", 2)
    ask_again(bench, 2, "00", "10", "30")
    bench.fail("30", 3, broken=(0, 2, 1, 2))
    assert bench.notes[1].startswith(golden.text("links.evicted_two"))
    ask_again(bench, 3, "00", "10", "30")
    assert bench.round_of("30").generation.members == ("node3/worker0",)


def test_the_last_round_is_tried_with_them_and_made_without_them() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    ask_again(bench, 3, "20", "00", "10")
    bench.complete_all("00", "10")
    bench.say(StopRun("enough"))
    bench.ask_all("00", "10")
    round = bench.round("00", "10", "20")
    assert round.final and round.probe
    bench.fail("00", round.id, broken=(2, 1))
    ask_again(bench, round.id, "20", "00", "10")
    round = bench.round("00", "10")
    assert round.final
    bench.complete_all("00", "10")
    assert bench.only("20") == Stop(2, None, "enough", failed=True, late=True)
    assert bench.state.closed and not bench.state.in_vain


def test_who_is_cut_off_after_the_last_round_is_told_at_once() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    ask_again(bench, 3, "00", "10", "20")
    bench.complete_all("00", "10")
    bench.say(NodeLeave(2, 1, "node2 ends"))
    assert bench.only("20") == Stop(2, None, "node2 ends")  # it goes by itself: nothing has failed


def test_it_may_pause_and_is_cut_off_when_it_asks_again() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    ask_again(bench, 3, "20")
    bench.pause("20", did=False)
    assert len(bench.roster.within(MemberState.PAUSED)) == 1
    bench.ask("20", did=False)
    assert isinstance(bench.only("20"), Waiting) and not bench.roster.within(MemberState.PAUSED)
    bench.ask("20", same=True)
    assert bench.only("20").reason.code == "cut.unreachable"


def test_if_the_others_leave_it_goes_on_alone() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    ask_again(bench, 3, "20")
    bench.leave("00")
    bench.leave("10")
    assert bench.round_of("20").source == 0
    bench.complete("20", 4)
    bench.ask("20")
    assert isinstance(bench.only("20"), Go)  # and it may train on


def test_one_that_starts_again_meanwhile_waits_as_well() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    ask_again(bench, 3, "20")
    bench.leave("20")
    bench.join("20", incarnation=2)
    bench.ask("20")
    assert isinstance(bench.only("20"), Waiting)
    ask_again(bench, 3, "00", "10")
    assert bench.round_of("00").generation.members == ("node0/worker0", "node1/worker0")


def test_a_server_that_is_started_again_still_knows_it() -> None:
    bench = three()
    bench.fail("10", 3, broken=(1, 2))
    ask_again(bench, 3, "20")
    reborn(bench)
    ask_again(bench, 3, "20")
    assert isinstance(bench.only("20"), Waiting) and "in 10 s" in bench.only("20").reason
    ask_again(bench, 3, "00", "10")
    assert bench.round("00", "10").id == 4


def test_with_gradients_it_is_the_same() -> None:
    bench = Bench("00", "10", "20", plan=make_plan(algorithm=Lockstep(), workers=3))
    bench.ask_all("00", "10", "20")
    bench.fail("00", 1)
    ask_again(bench, 1, "00", "10", "20")
    bench.fail("20", 2, broken=(0, 2))
    ask_again(bench, 2, "00", "10", "20")
    assert isinstance(bench.only("20"), Waiting)
    assert bench.roster.generation.members == ("node0/worker0", "node1/worker0")


def test_only_the_first_round_of_a_generation_is_a_probe() -> None:
    """In later ones all have their connections: a pair that is told of all the same is no reason to part them."""
    bench = Bench("00", "10", "11", exchange_timeout_s=10.0, period=4, local_period=1)
    bench.ask_all("00", "10", "11")
    bench.fail("00", 1)
    ask_again(bench, 1, "00", "10", "11")
    bench.fail("10", 2, broken=(0, 2))
    bench.now += 10.0
    ask_again(bench, 2, "11", "00", "10")
    assert bench.round("00", "10", "11").probe
    bench.complete_all("00", "10", "11")
    bench.ask_all("10", "11")
    round = bench.round("10", "11")
    assert round.scope == "local" and not round.probe
    bench.fail("11", round.id, broken=(0, 2))
    assert bench.codes == ["round_fails.error"]


def test_one_without_the_model_does_not_wait_until_those_with_it_are_tried_again() -> None:
    bench = Bench("00", "10", workers=2, exchange_timeout_s=10.0, period=1, local_period=1)
    bench.ask_all("00", "10")
    bench.complete_all("00", "10")
    bench.join("20")
    bench.ask_all("20", "00", "10")
    bench.fail("20", 2)
    ask_again(bench, 2, "00", "10", "20")
    bench.fail("10", 3, broken=(0, 1))
    ask_again(bench, 3, "10", "20")
    bench.leave("00")
    round = bench.round("10", "20")
    assert round.probe and round.generation.members[round.source] == "node1/worker0"
    bench.fail("10", round.id, broken=(0, 1))  # and where they do not reach each other, the model goes on
    ask_again(bench, round.id, "20")
    assert isinstance(bench.only("20"), Waiting)
    ask_again(bench, round.id, "10")
    assert bench.round_of("10").generation.members == ("node1/worker0",)
