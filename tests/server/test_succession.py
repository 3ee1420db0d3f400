"""Who serves when the global server is gone: the rule, and what a server does that has taken over."""

import json
from functools import partial

import pytest

from lsgd.protocol import wants
from lsgd.protocol.messages import (
    PROTOCOL,
    ChangeSettings,
    Endpoint,
    Evicted,
    GenerationOver,
    Go,
    Heartbeat,
    Meet,
    NodeHello,
    Request,
    StopRun,
    Term,
)
from lsgd.server.coordinator import Coordinator
from lsgd.server.global_daemon import GlobalDaemon
from lsgd.server.journal import capture, restore, taken_over
from lsgd.server.reasons import Why
from lsgd.server.roster import MemberState
from lsgd.server.rounds import MOST_SKIPPED, RoundBook
from lsgd.server.standbys import Standbys
from lsgd.server.succession import (
    NEXT_S,
    RESTART_S,
    SILENT_S,
    Move,
    Outcome,
    is_minority,
    meet,
    move,
    successor,
    takes_over,
)
from tests import golden

from .helpers import Bench, check_invariants, started
from .served_run import MemoryListener

ONE, TWO, OTHER, THREE = Term(1, 0), Term(2, 1), Term(2, 2), Term(3, 0)
PLACES = ("00", "10", "20")


@pytest.mark.parametrize(
    ("rank", "answers", "after_s"), [(0, False, SILENT_S), (1, False, SILENT_S + NEXT_S), (0, True, RESTART_S)]
)
def test_a_standby_takes_over_in_its_turn_and_later_if_the_host_answers(rank, answers, after_s) -> None:
    assert takes_over(rank, after_s, answers)
    assert not takes_over(rank, after_s - 0.1, answers)
    assert not takes_over(rank, 1000.0, None)


@pytest.mark.parametrize(
    ("nodes", "here", "minor"), [(1, 1, False), (2, 1, False), (3, 1, True), (3, 2, False), (4, 2, True)]
)
def test_half_of_the_nodes_or_fewer_wait_but_one_of_two_does_not(nodes, here, minor) -> None:
    assert is_minority(nodes, here) is minor


def test_a_node_moves_to_later_terms_and_keeps_its_workers_along_the_lineage() -> None:
    assert successor((ONE,), 1) == (ONE, TWO)
    assert move(Term(), (ONE,)) is Move.CONTINUE
    assert move(ONE, (ONE, TWO)) is Move.CONTINUE
    assert move(TWO, (ONE, TWO, THREE)) is Move.CONTINUE
    assert move(OTHER, (ONE, TWO, THREE)) is Move.ANEW
    assert move(TWO, (ONE,)) is move(TWO, (ONE, TWO)) is move(OTHER, (ONE, TWO)) is move(ONE, ()) is Move.STAY


def test_of_two_servers_the_earlier_decides_and_the_one_with_more_continues() -> None:
    assert meet(TWO, 5, ONE, 9, ()) is Outcome.WAIT
    assert meet(ONE, 5, TWO, 9, ()) is Outcome.GIVE_UP
    assert meet(ONE, 9, TWO, 5, ()) is meet(ONE, 5, TWO, 5, ()) is Outcome.GO_ON
    assert meet(TWO, 9, THREE, 5, (TWO,)) is Outcome.GIVE_UP
    assert meet(ONE, -1, TWO, 9, ()) is meet(ONE, 9, TWO, -1, ()) is meet(ONE, 0, TWO, 0, ()) is Outcome.WAIT


def test_ids_that_another_server_may_have_used_are_skipped() -> None:
    book = RoundBook({"local": 2, "global": 3})
    book.skip_to(4)
    assert (book.next_id, book.skipped) == (6, 0)
    book.skip_to(8)
    assert (book.next_id, book.skipped) == (9, 3)
    book.skip_to(1 << 62)
    assert book.next_id == 9 + MOST_SKIPPED + 1


def takes(bench: Bench, *here: int, node: int = 1, elsewhere: tuple[Term, ...] = (ONE,)) -> Bench:
    """Let another server take over, which these nodes follow."""
    saved = json.loads(json.dumps(capture(bench.state, bench.now)))
    elections = bench.book.elections
    bench.coordinator = Coordinator(restore(taken_over(saved, successor(elsewhere, node)), bench.now))
    bench.book.elections.extend(elections)
    for each in here:
        bench.say(NodeHello(PROTOCOL, each, 1, "host", "0"))
    check_invariants(bench.state)
    return bench


def names(bench: Bench) -> list[str]:
    return sorted(bench.roster.members)


def heartbeats(bench: Bench, *places: str, seconds: float) -> None:
    """Let time pass with words of these only."""
    for _ in range(round(seconds)):
        bench.now += 1.0
        for place in places:
            bench.say(Heartbeat(*bench.who(place)))
        bench.act(bench.coordinator.tick(bench.now))


def test_the_node_that_served_is_given_up_once_most_nodes_have_come() -> None:
    bench = takes(started(*PLACES), 1)
    bench.act(bench.coordinator.tick(bench.now))
    assert len(names(bench)) == 3
    bench.say(NodeHello(PROTOCOL, 2, 1, "host", "0"))
    bench.act(bench.coordinator.tick(bench.now))
    assert names(bench) == ["node1/worker0", "node2/worker0"]
    assert bench.state.tenure.terms == (ONE, TWO) and bench.state.tenure.took_over
    bench.ask_all("10", "20")
    order = bench.round("10", "20")
    assert (order.id, order.generation.number, bench.state.tenure.took_over) == (2, 2, False)


def test_of_two_nodes_the_one_that_is_left_goes_on_at_once() -> None:
    bench = takes(started("00", "10"), 1)
    bench.act(bench.coordinator.tick(bench.now))
    bench.ask("10")
    assert bench.round("10").id == 2


def test_a_node_that_served_and_follows_now_keeps_its_workers() -> None:
    bench = takes(started(*PLACES), 0, 1, 2)
    bench.act(bench.coordinator.tick(bench.now))
    assert len(names(bench)) == 3
    bench.ask_all(*PLACES)
    assert bench.round(*PLACES).generation.number == 2
    bench.act(bench.coordinator.tick(bench.now))
    assert len(names(bench)) == 3


def test_without_an_end_of_patience_half_of_the_nodes_or_fewer_wait_for_ever() -> None:
    bench = started(*PLACES, lease_s=10.0, patience_s=0.0)
    bench.state.tenure.guarded = True
    heartbeats(bench, "00", seconds=500)
    assert len(names(bench)) == 3


@pytest.mark.parametrize("guarded", [False, True])
def test_a_server_that_hears_half_of_its_nodes_or_fewer_waits_for_patience_before_it_goes_on(guarded) -> None:
    bench = started(*PLACES, lease_s=10.0, patience_s=60.0)
    bench.state.tenure.guarded = guarded
    heartbeats(bench, "00", seconds=50)
    assert len(names(bench)) == (3 if guarded else 1)
    heartbeats(bench, "00", seconds=20)
    assert names(bench) == ["node0/worker0"]


def test_most_nodes_wait_for_the_lease_of_the_others_only() -> None:
    bench = started(*PLACES, lease_s=10.0, patience_s=60.0)
    bench.state.tenure.guarded = True
    heartbeats(bench, "00", "10", seconds=12)
    assert names(bench) == ["node0/worker0", "node1/worker0"]


def from_an_old_copy(*places: str) -> Bench:
    """Return a run that another node serves from a copy which lacks the last three rounds."""
    bench = started(*places, period=1, local_period=1)
    saved = json.loads(json.dumps(capture(bench.state, bench.now)))
    for _ in range(3):
        bench.ask_all(*places)
        bench.complete_all(*places)
    bench.coordinator = Coordinator(restore(saved, bench.now))
    takes(bench, *(int(place[0]) for place in places[1:]))
    bench.act(bench.coordinator.tick(bench.now))
    return bench


def test_who_has_completed_a_round_that_no_copy_has_is_known_after_a_restart_too() -> None:
    bench = from_an_old_copy(*PLACES)
    bench.ask("10")
    assert bench.book.skipped and not bench.member("10").synced
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(capture(bench.state, bench.now))), bench.now))
    assert bench.member("20").synced
    bench.ask("20")
    assert not bench.member("20").synced


@pytest.mark.parametrize("stops", [False, True])
def test_what_was_ordered_holds_after_a_newer_copy_too(stops: bool, monkeypatch) -> None:
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)
    bench = started("00", "10", period=1, local_period=1)
    old = json.loads(json.dumps(capture(bench.state, bench.now)))
    bench.ask_all("00", "10")
    newer = Standbys(Endpoint(1, "")).whole(bench.state, bench.now, partial(capture, bench.state, bench.now))
    state = restore(taken_over(old, successor((ONE,), 1)), bench.now)
    daemon = GlobalDaemon(Coordinator(state), MemoryListener(None))
    if stops:
        daemon._dispatch(b"operator", ChangeSettings({"iterations": "50"}), bench.now)
        daemon._dispatch(b"operator", StopRun("enough"), bench.now)
    daemon._dispatch(b"node0", newer, bench.now)
    adopted = daemon.coordinator.state
    assert adopted is not state and adopted.ledger.count == bench.ledger.count == 2
    assert adopted.stopping.code == ("ordered" if stops else "")
    assert adopted.plan.run.iterations == (50 if stops else bench.state.plan.run.iterations)


def test_rounds_that_no_copy_has_are_not_ordered_again() -> None:
    bench = from_an_old_copy("00", "10")
    assert bench.committed["10"] == 4
    bench.ask("10")
    order = bench.round("10")
    assert (order.id, order.generation.number) == (5, 5)
    assert bench.ledger.count == bench.done["10"] + bench.done["00"] - 3  # what node 0 made since the copy is lost


def test_who_has_learned_what_no_copy_counts_takes_over_the_model_of_those_who_have_not() -> None:
    bench = started(*PLACES, period=1, local_period=1)
    takes(bench, 1, 2)
    bench.act(bench.coordinator.tick(bench.now))
    bench.committed["20"] = 2
    bench.ask_all("10", "20")
    order = bench.round("10", "20")
    assert (order.id, order.new, order.source) == (3, (1,), 0)


def test_who_has_completed_a_later_round_is_in_the_open_one_no_more() -> None:
    bench = started(*PLACES, period=1, local_period=1)
    bench.ask_all(*PLACES)
    takes(bench, 1, 2)
    assert list(bench.book.open) == [2]
    bench.committed["20"] = 3
    bench.ask("20", wants=wants.More())
    assert not bench.book.open and Why.PASSED_OVER(worker="node2/worker0") in bench.notes[1]


def test_if_all_have_learned_more_than_the_copy_counts_the_most_advanced_model_goes_on() -> None:
    bench = started(*PLACES, period=1, local_period=1)
    takes(bench, 1, 2)
    bench.act(bench.coordinator.tick(bench.now))
    bench.committed |= {"10": 2, "20": 3}
    bench.ask_all("10", "20")
    assert (bench.round("10", "20").id, bench.round("10", "20").source) == (4, 1)


def test_a_member_in_a_round_hears_that_its_generation_is_over() -> None:
    bench = started("00", "10")
    bench.ask_all("00", "10")
    takes(bench, 1)
    bench.act(bench.coordinator.tick(bench.now))
    (told,) = bench.heartbeat("10")["10"]
    assert (
        isinstance(told, GenerationOver)
        and told.generation == 1
        and golden.text("failover.node1_serves") in told.reason
    )
    bench.ask("10")
    assert isinstance(bench.only("10"), Go)
    assert bench.heartbeat("10") == {}


def test_a_run_that_has_not_begun_may_move_too() -> None:
    bench = takes(Bench("00", "10"), 0, 1)
    assert bench.heartbeat("10") == {}
    assert bench.member("10").state is MemberState.JOINED


def other(
    count: int, *terms: Term, run: str = "run", beaten: tuple[Term, ...] = (), nodes: tuple[int, ...] = ()
) -> Meet:
    return Meet(run, terms, count, Endpoint(1, "tcp://10.0.0.2:1"), beaten, nodes)


def test_two_parts_meet_and_one_gives_up_loudly() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.ask_all("00", "10")
    bench.heartbeat("00")
    bench.act(bench.coordinator.meet(other(100, ONE, TWO), bench.now))
    assert [note.code for note in bench.notes] == ["gives_up"] and golden.text("failover.parts_meet") in bench.notes[0]
    moved = bench.state.tenure.gives_way
    assert moved is not None and (moved.run, moved.other, moved.place.node) == (bench.state.run, bench.state.run, 1)


def test_the_part_with_more_goes_on_in_a_later_term_and_beats_the_other_for_good() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.ask_all("00", "10")
    bench.heartbeat("00")
    bench.act(bench.coordinator.meet(other(1, ONE, TWO), bench.now))
    assert [note.code for note in bench.notes] == ["beats"]
    assert (bench.state.tenure.terms, bench.state.tenure.beaten) == ((ONE, THREE), (TWO,))
    bench.act(bench.coordinator.meet(other(1, ONE, TWO), bench.now))
    assert bench.notes == [] and bench.state.tenure.gives_way is None
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(capture(bench.state, bench.now))), bench.now))
    assert (bench.state.tenure.terms, bench.state.tenure.beaten) == ((ONE, THREE), (TWO,))


def test_a_run_that_has_not_begun_makes_way_for_the_one_that_its_node_belonged_to() -> None:
    bench = Bench("00")
    bench.act(bench.coordinator.meet(other(0, ONE, TWO, run="another"), bench.now))
    assert bench.state.tenure.gives_way is None
    bench.act(bench.coordinator.meet(other(7, ONE, TWO, run="another"), bench.now))
    moved = bench.state.tenure.gives_way
    assert moved is not None and moved.other == "another"
    begun = started("00")
    begun.act(begun.coordinator.meet(other(7, ONE, TWO, run="another"), begun.now))
    assert begun.state.tenure.gives_way is None and begun.notes == []


def test_a_part_without_a_worker_that_has_the_model_gives_up_whatever_its_count() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.ask_all("00", "10")
    takes(bench, 1)
    bench.coordinator.meet(other(1, ONE, TWO, THREE), bench.now)
    assert bench.state.tenure.gives_way is None  # it has just begun
    for _ in range(10):  # not all at once, as if this process had been frozen
        bench.now += 2.0
        bench.coordinator.tick(bench.now)
    bench.coordinator.meet(other(1, ONE, TWO, THREE), bench.now)
    assert bench.ledger.count > 1 and bench.state.tenure.gives_way is not None


def test_late_words_from_nodes_that_have_moved_count_for_nothing() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.ask_all("00", "10")
    bench.incarnations.pop("00")
    bench.tick(6.0)
    bench.act(bench.coordinator.meet(other(1, ONE, TWO, nodes=(1,)), bench.now))
    assert [note.code for note in bench.notes] == ["gives_up"]


def test_a_server_that_was_frozen_does_not_know_who_is_there() -> None:
    bench = started("00", "10", period=1, local_period=1)
    bench.ask_all("00", "10")
    bench.heartbeat("00")
    bench.now += 20.0
    bench.act(bench.coordinator.meet(other(1, ONE, TWO), bench.now))
    assert bench.state.learned() == -1 and bench.state.tenure.gives_way is None and bench.notes == []
    bench.heartbeat("00")
    assert bench.state.learned() == bench.state.ledger.count


def test_a_node_that_serves_again_after_giving_up_keeps_its_own_workers() -> None:
    bench = started("00", "10")
    takes(bench, 1, elsewhere=(ONE, TWO))
    bench.act(bench.coordinator.tick(bench.now))
    assert names(bench) == ["node0/worker0", "node1/worker0"]


def test_a_run_that_is_over_meets_nobody() -> None:
    bench = started("00")
    bench.coordinator.stop("")
    bench.leave("00")
    assert bench.state.over
    bench.coordinator.meet(other(1000, ONE, TWO), bench.now)
    assert bench.state.tenure.gives_way is None


def test_an_unknown_worker_is_told_to_join_again() -> None:
    bench = takes(started("00", "10"), 1)
    decision = bench.coordinator.handle(Request("node2/worker0", 9, 1, 0, 0, 0, None), bench.now)
    ((_, _, answer),) = decision.answers
    assert isinstance(answer, Evicted)
