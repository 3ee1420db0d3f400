"""Who is silent is left out of rounds before its lease is over, and may come back as it was until then."""

import json

import pytest

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import PROTOCOL, NodeHello, StopRun, Term, Welcome
from lsgd.server.coordinator import Coordinator
from lsgd.server.journal import capture, restore
from lsgd.server.roster import Has, Member, MemberState

from .helpers import Bench, started

PLACES = ("00", "01", "10", "11")


def trained(*places: str, **settings: object) -> Bench:
    """Return a run whose workers are busy with an iteration after the first round."""
    bench = started(*places, **{"period": 4, "local_period": 4, **settings})
    bench.ask_all(*places)
    return bench


def loses(bench: Bench, *places: str) -> dict[str, int]:
    """Let processes die with their node: its connection closes, and a second later it has made no other one."""
    lost = {place: bench.incarnations.pop(place) for place in places}
    for node in {int(place[0]) for place in places}:
        bench.act(bench.coordinator.closed(node, bench.now))
    assert not bench.notes
    bench.tick(2.0)
    return lost


def hello(node: int, server: int) -> NodeHello:
    return NodeHello(PROTOCOL, node, server, "host", "1.0.0")


def member(bench: Bench, place: str) -> Member:
    return bench.roster.members[f"node{place[0]}/worker{place[1]}"]


def state_of(bench: Bench, *places: str) -> set[MemberState]:
    return {member(bench, place).state for place in places}


def until_held(bench: Bench, *places: str) -> None:
    """Let workers make what is left of the period."""
    for _ in range(40):
        for place in places:
            if not bench.member(place).held and bench.member(place).round is None:
                bench.ask(place)


def test_the_others_train_on_a_second_after_a_node_has_died() -> None:
    bench = trained(*PLACES)
    loses(bench, "10", "11")
    assert bench.codes == ["left_out.silent"] and state_of(bench, "10", "11") == {MemberState.SILENT}
    until_held(bench, "00", "01")
    assert bench.member("00").round.round.generation.members == ("node0/worker0", "node0/worker1")
    assert member(bench, "10").granted == 1 and member(bench, "10").has is Has.OLDER
    bench.complete_all("00", "01")
    bench.tick(14.0)
    assert bench.codes.count("leaves.silent") == 2 and set(bench.roster.members) == {"node0/worker0", "node0/worker1"}


def test_a_node_that_makes_another_connection_is_in_no_way_silent() -> None:
    bench = trained(*PLACES)
    bench.act(bench.coordinator.closed(1, bench.now))
    bench.tick(0.5)
    bench.tick(20.0)
    assert not bench.notes and state_of(bench, *PLACES) == {MemberState.BUSY}


def test_a_machine_that_dies_without_a_word_is_missed_after_five_heartbeats() -> None:
    bench = trained(*PLACES)
    del bench.incarnations["10"], bench.incarnations["11"]
    bench.tick(5.0)
    assert not bench.notes
    bench.tick(1.0)
    assert state_of(bench, "10", "11") == {MemberState.SILENT}


def at_steps_of(step_s: float, *places: str) -> Bench:
    """Return a run whose server knows how long a step takes, and whose workers have made two of four each."""
    bench = trained(*places)
    while bench.book.next_id < 6 or bench.member("10").unshared != 2:
        bench.now += step_s
        for place in places:
            if not bench.member(place).held:
                bench.ask(place)
        bench.tick()
        for place in places:
            if bench.member(place).round is not None:
                bench.complete_all(place)
    return bench


@pytest.mark.parametrize(("step_s", "after_s"), [(0.1, 3.0), (3.0, 6.0)])
def test_a_member_that_all_wait_for_is_left_out_once_that_costs_more_than_it_brings(
    step_s: float, after_s: float
) -> None:
    bench = at_steps_of(step_s, *PLACES)
    del bench.incarnations["10"], bench.incarnations["11"]
    until_held(bench, "00", "01")
    bench.tick(after_s - 1.0)
    assert not bench.notes
    bench.tick(1.0)
    assert bench.codes[0] == "left_out.silent" and state_of(bench, "10", "11") == {MemberState.SILENT}


def test_it_is_waited_for_while_others_train_and_if_nobody_was_heard_since() -> None:
    bench = at_steps_of(0.1, *PLACES)
    del bench.incarnations["11"]
    until_held(bench, "00", "01")
    bench.tick(4.0)
    assert not bench.notes, "node1/worker0 trains"
    until_held(bench, "10")
    bench.now += 2.0
    bench.incarnations.clear()
    bench.tick()
    assert not bench.notes, "the server's own link may be down"


def test_those_of_a_former_local_server_are_gone_unless_they_are_heard_through_the_next_one() -> None:
    bench = trained(*PLACES)
    bench.say(hello(1, 1))
    bench.tick(2.0)
    lost = bench.incarnations.pop("11")
    bench.say(hello(1, 2))
    assert not bench.notes
    bench.tick(2.0)
    assert bench.codes == ["left_out.silent"] and state_of(bench, "00", "01", "10") == {MemberState.BUSY}
    assert isinstance(bench.join("11", lost + 1)["11"][0], Welcome)


def test_the_round_that_it_is_in_fails_for_the_others_at_once() -> None:
    bench = trained("00", "10", period=1, local_period=1)
    bench.complete("00", bench.member("00").round.round.id)
    loses(bench, "10")
    assert bench.codes == ["left_out.silent", "round_fails.fell_silent.silent"] and not bench.book.open
    bench.ask("00")
    assert bench.round("00").generation.members == ("node0/worker0",)


def test_who_is_heard_again_comes_back_with_its_next_request_and_adds_to_a_common_model() -> None:
    bench = trained("00", "10", algorithm=LocalSettings(period=4))
    back = loses(bench, "10")
    until_held(bench, "00")
    bench.complete_all("00")
    bench.incarnations |= back
    bench.heartbeat("10")
    assert bench.codes == ["heard"] and state_of(bench, "10") == {MemberState.STRAGGLER}
    before = bench.ledger.count
    bench.ask("10")
    assert bench.ledger.count == before + 1 and state_of(bench, "10") == {MemberState.HELD}
    until_held(bench, "00")
    order = bench.round("00", "10")
    assert order.new == (1,), "it takes over the model of the others"


def test_a_held_request_is_held_again_when_its_worker_is_heard_again() -> None:
    bench = trained("00", "10", period=1, local_period=1)
    bench.complete_all("00", "10")
    bench.ask("10")
    back = loses(bench, "10")
    assert state_of(bench, "10") == {MemberState.SILENT}
    bench.incarnations |= back
    bench.ask("10", same=True)
    assert state_of(bench, "10") == {MemberState.HELD}
    bench.ask("00")
    assert bench.round("00", "10").generation.number == 1, "nothing has happened without it"


def test_another_process_takes_the_place_of_a_silent_one_at_once() -> None:
    bench = trained("00", "10")
    loses(bench, "10")
    assert isinstance(bench.join("10", 2)["10"][0], Welcome)
    assert "leaves.replaced" in bench.codes


def test_nobody_is_left_out_while_this_server_may_be_the_one_that_is_cut_off() -> None:
    """All that have the model fall silent, one a moment before the other."""
    bench = trained("00", "10")
    loses(bench, "10", "00")
    assert not bench.notes and state_of(bench, "00", "10") == {MemberState.BUSY}
    bench.tick(5.0)
    assert not bench.notes and state_of(bench, "00", "10") == {MemberState.BUSY}


def test_before_anything_is_learned_nobody_needs_the_model() -> None:
    bench = Bench("00", "10", period=4, local_period=4)
    bench.ask_all("00", "10")
    loses(bench, "00", "10")
    assert state_of(bench, "00", "10") == {MemberState.SILENT}


def test_before_the_first_round_the_lease_decides() -> None:
    bench = Bench("00", "10")
    bench.ask("10")
    loses(bench, "10")
    assert not bench.notes and state_of(bench, "10") == {MemberState.HELD}


def test_half_of_the_nodes_or_fewer_leave_nobody_out_if_a_standby_may_serve_the_others() -> None:
    bench = trained("00", "10", "20")
    bench.state.tenure.guarded = True
    loses(bench, "10", "20")
    assert not bench.notes and state_of(bench, "10", "20") == {MemberState.BUSY}


def test_a_restarted_server_leaves_those_of_a_dead_launcher_out_once_the_others_have_said_what_they_made() -> None:
    bench = trained(*PLACES, iterations=100)
    for node in (0, 1):
        bench.say(hello(node, 1))
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(capture(bench.state, bench.now))), bench.now))
    unheard = bench.ledger.unheard
    del bench.incarnations["10"], bench.incarnations["11"]
    bench.say(hello(0, 1))
    bench.say(hello(1, 2))
    bench.ask("00", same=True)
    bench.tick(2.0)
    assert not bench.notes and unheard > 0
    bench.ask("01", same=True)
    bench.tick()
    assert state_of(bench, "10", "11") == {MemberState.SILENT} and bench.member("00").round.round.id == 2
    assert member(bench, "10").granted + member(bench, "11").granted >= unheard, "they may have made all that"
    assert isinstance(bench.join("10", 2)["10"][0], Welcome)


def test_what_others_have_made_before_a_restart_is_not_granted_once_more_to_who_was_left_out() -> None:
    bench = trained("00", "01", "02", "10", iterations=18, lookahead=0)
    for node in (0, 1):
        bench.say(hello(node, 1))
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(capture(bench.state, bench.now))), bench.now))
    assert (bench.ledger.count, bench.ledger.unheard) == (4, 12)
    frozen = bench.incarnations.pop("10")
    bench.say(hello(0, 1))
    bench.say(hello(1, 2))
    for place in ("00", "01", "02"):
        bench.done[place] += 2
        bench.ask(place)
    bench.tick(2.0)
    assert state_of(bench, "10") == {MemberState.SILENT} and member(bench, "10").granted == 4
    bench.incarnations["10"] = frozen
    bench.done["10"] += 2
    bench.ask("10")
    assert bench.ledger.count == 16
    assert 1 <= sum(m.granted for m in bench.roster.members.values()) + bench.ledger.tokens <= 2


@pytest.mark.parametrize("moved", [False, True])
def test_until_a_restarted_server_has_heard_everybody_the_lease_decides(moved: bool) -> None:
    bench = trained(*PLACES)
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(capture(bench.state, bench.now))), bench.now))
    if moved:
        bench.state.tenure.took_over, bench.state.tenure.terms = True, (Term(1, 0), Term(2, 0))
        bench.ledger.unheard = 0
    loses(bench, "10", "11")
    bench.tick(8.0)
    assert state_of(bench, "10", "11") == {MemberState.BUSY}


def test_who_was_left_out_is_so_after_a_restart_of_the_server_and_its_lease_begins_anew() -> None:
    bench = trained(*PLACES)
    loses(bench, "10", "11")
    bench.coordinator = Coordinator(restore(json.loads(json.dumps(capture(bench.state, bench.now))), bench.now))
    assert state_of(bench, "10", "11") == {MemberState.SILENT} and member(bench, "10").granted == 1
    bench.tick(16.0)
    assert set(bench.roster.members) == {"node0/worker0", "node0/worker1"}


def test_the_last_iterations_wait_for_the_lease_of_who_may_have_made_them() -> None:
    bench = trained("00", "10", iterations=12, lookahead=0)
    loses(bench, "10")
    until_held(bench, "00")
    while bench.member("00").round:
        bench.complete_all("00")
        until_held(bench, "00")
    assert bench.waits() == "lease" and not bench.state.stopping and bench.ledger.count + 1 == 12
    bench.tick(15.0)
    assert not bench.state.stopping and bench.member("00").granted, "it makes what the other one has not"


def test_the_last_round_waits_for_the_lease() -> None:
    bench = trained("00", "10")
    loses(bench, "10")
    bench.say(StopRun("enough"))
    bench.ask("00")
    assert bench.waits() == "lease" and not bench.book.final
    bench.tick(15.0)
    assert bench.book.final


def test_who_falls_silent_once_the_run_ends_is_waited_for() -> None:
    bench = trained("00", "10")
    bench.say(StopRun("enough"))
    bench.ask("00")
    loses(bench, "10")
    assert state_of(bench, "10") == {MemberState.BUSY} and not bench.book.final


def test_where_every_iteration_is_a_round_the_others_go_on_too() -> None:
    bench = Bench("00", "10", plan=Plan(RunSettings(workers=2, iterations=20), (Phase(AllReduceSettings()),)))
    bench.ask_all("00", "10")
    bench.complete_all("00", "10")
    bench.ask("00")
    loses(bench, "10")
    assert bench.member("00").round.round.generation.members == ("node0/worker0",)
