"""How nodes reach each other: what members find is kept for the run, told in generations, and shown."""

import json

import pytest

from lsgd.protocol.messages import Completed, Probed
from lsgd.server.links import Ways
from lsgd.server.reasons import Why
from lsgd.server.report import report
from tests import golden

from .helpers import Bench, nccl
from .test_memento import reborn


def test_what_was_found_is_kept_until_the_same_nodes_are_tried_again() -> None:
    ways = Ways()
    assert ways.unknown([0, 1]) and not ways.unknown([0])
    assert ways.found([0, 1, 2], [0, 1, 1, 2, 2, 1]) == [(1, 2)]
    assert not ways.unknown([0, 1, 2]) and ways.unknown([0, 3])
    assert ways.missed([0, 1, 2]) == (0, 1, 1, 2, 2, 1) and ways.missed([0, 1]) == (0, 1) and ways.missed([0, 2]) == ()
    assert ways.shown() == [
        {"nodes": [0, 1], "way": golden.text("links.dialled_by", node="node1")},
        {"nodes": [1, 2], "way": "through the relay"},
    ]
    assert ways.found([0, 1], [0, 1, 1, 0]) == [(0, 1)]  # the other pairs are as they were
    assert ways.missed([0, 1, 2]) == (0, 1, 1, 0, 1, 2, 2, 1)
    assert ways.found([0, 1, 2], [2, 1]) == []
    assert ways.missed([0, 1, 2]) == (2, 1)


@pytest.mark.parametrize("missed", [(0,), (0, 0), (0, 7), (-1, 1), (0, 1 << 40, 3)])
def test_what_cannot_be_a_pair_of_the_nodes_is_passed_over(missed: tuple[int, ...]) -> None:
    ways = Ways()
    assert ways.found([0, 1], missed) == [] and ways.missed([0, 1]) == ()


def tcp(*places: str) -> Bench:
    return Bench(*places, period=1, local_period=1, transport="tcp")


def find(bench: Bench, place: str, *missed: int) -> list[str]:
    """Complete a round, and say first what it has found; return what the server says of that."""
    order = bench.member(place).round
    assert order is not None
    bench.say(Probed(*bench.who(place), order.round.id, missed))
    notes = bench.notes
    bench.say(Completed(*bench.who(place), order.round.id))
    return notes


def test_nodes_that_were_not_tried_are_and_the_next_generations_are_told() -> None:
    bench = tcp("00", "10")
    bench.ask_all("00", "10")
    assert bench.round("00", "10").probe
    assert find(bench, "00", 0, 1, 1, 0) == [Why.RELAYED(pairs="node0 and node1", more="")]
    assert find(bench, "10", 0, 1, 1, 0) == []  # it is known
    assert json.loads(report(bench.state, bench.now))["ways"] == [{"nodes": [0, 1], "way": "through the relay"}]
    bench.ask_all("00", "10")
    assert not bench.round("00", "10").probe
    find(bench, "00", 1, 0)  # nobody was to look
    assert bench.state.links.ways.missed([0, 1]) == (0, 1, 1, 0)
    bench.complete_all("10")
    bench.join("20")
    bench.join("01")
    bench.ask_all("01", "20", "00", "10")
    order = bench.round("00", "01", "10", "20")
    assert order.probe and order.generation.missed == (0, 1, 1, 0) and order.generation.homes == (0, 0, 1, 2)
    for place in ("00", "01", "10", "20"):
        find(bench, place, 0, 1, 1, 0, 2, 1)
    assert reborn(bench).state.links.ways.missed([0, 1, 2]) == (0, 1, 1, 0, 2, 1)


def test_workers_of_one_node_and_those_of_other_transports_are_not_tried() -> None:
    for bench, places in (
        (tcp("00", "01"), ("00", "01")),
        (nccl("00", "10"), ("00", "10")),
    ):
        bench.ask_all(*places)
        assert not bench.round(*places).probe


def test_more_pairs_than_a_sentence_has_room_for() -> None:
    places = [f"{node}0" for node in range(4)]
    bench = tcp(*places)
    bench.ask_all(*places)
    bench.round(*places)
    (note,) = find(bench, "00", *(node for a in range(4) for b in range(4) for node in (a, b)))
    assert note.endswith(Why.RELAYED(pairs="node1 and node2", more=" (and 2 more pairs)"))
