"""Nodes say how many workers they have, and the run begins with all of them."""

import pytest

from lsgd.protocol.messages import PROTOCOL, NodeHello, NodeLeave, Waiting, Welcome
from lsgd.server.reasons import Why
from tests import golden

from .helpers import Bench, make_plan


def hello(node: int, workers: int) -> NodeHello:
    return NodeHello(PROTOCOL, node, 1, "host", "1.0.0", workers)


@pytest.fixture
def bench() -> Bench:
    """A run that waits for the workers of three nodes."""
    return Bench(plan=make_plan(nodes=3))


@pytest.mark.no_cover
def test_it_begins_with_the_workers_of_all_nodes(bench) -> None:
    places = ("00", "10", "11", "20", "21")
    for node, workers in ((0, 1), (1, 2)):
        bench.say(hello(node, workers))
    for place in places[:3]:
        assert isinstance(bench.join(place)[place][0], Waiting)
    assert bench.only("11").reason == Why.JOINING_NODES(
        workers="3 workers", nodes=2, wanted=3, missing="; missing: node2"
    )
    bench.say(hello(2, 2))
    assert not bench.got
    assert bench.join("20")["20"][0].reason == Why.JOINING(here=4, wanted=5, missing="; missing: node2/worker1")
    bench.join("21")
    welcomes = [bench.only(place) for place in places]
    assert [(w.rank, w.world_size) for w in welcomes] == [(rank, 5) for rank in range(5)]
    bench.ask_all(*places)
    assert bench.round(*places).generation.node_sizes == (1, 2, 2)


def test_a_node_that_leaves_is_waited_for_and_may_come_back_with_fewer(bench) -> None:
    for node in range(3):
        bench.say(hello(node, 2))
    for place in ("00", "01", "10", "11", "20"):
        bench.join(place)
    bench.say(NodeLeave(1, 1, "its launcher was stopped"))
    bench.leave("10")
    bench.leave("11")
    assert bench.state.joined().code == "joining_nodes"
    bench.say(hello(1, 1))
    bench.join("10", incarnation=2)
    assert bench.state.joined() == Why.JOINING(here=4, wanted=5, missing="")
    bench.say(hello(2, 1))
    assert {place: type(answers[0]) for place, answers in bench.got.items()} == dict.fromkeys(
        ("00", "01", "10", "20"), Welcome
    )


def test_a_number_in_the_plan_counts_instead() -> None:
    bench = Bench(plan=make_plan(workers=1, nodes=3))
    bench.say(hello(0, 2))
    assert isinstance(bench.join("00")["00"][0], Welcome)


def test_without_all_nodes_nobody_waits_for_longer_than_the_plan_says(bench) -> None:
    bench.say(hello(0, 1))
    bench.join("00")
    bench.tick(601.0)
    assert golden.text("reasons.too_few") in bench.only("00").reason
