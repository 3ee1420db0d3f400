"""The coordinator's decisions one by one, each with the sentence that it gives for it."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from lsgd import __version__
from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.errors import ConfigError
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import (
    Completed,
    Evicted,
    Failed,
    GenerationOver,
    Go,
    Heartbeat,
    NodeLeave,
    Over,
    Paused,
    Put,
    Request,
    Stop,
    StopRun,
    encode,
)
from lsgd.server.coordinator import LINGER_S
from lsgd.server.next_step import waits_for
from lsgd.server.reasons import NO_REASON, Why
from lsgd.server.roster import MAX_LEFT, Member, MemberState, Roster
from lsgd.server.rounds import FIRST_LINES, MAX_FAILED_ROUNDS, MAX_LOSSES, abridged
from lsgd.server.tenure import Access
from lsgd.server.waits import LONG_ROUND_S
from lsgd.settings import AlgorithmSettings
from tests import golden

from .helpers import Bench, Lockstep, Refused, Waiting, Welcome, greeting, make_plan, started

# -- joining ---------------------------------------------------------------------------------------------------


def test_join_waits_for_the_others_then_all_are_welcome() -> None:
    bench = Bench(workers=2)
    assert bench.join("01")["01"] == [Waiting(0, Why.JOINING(here=1, wanted=2, missing=""))]
    assert bench.waits() == "joining"
    answers = bench.join("00")
    assert bench.notes == [
        Why.JOINS(worker="node0/worker0", address="10.0.0.1", joined=Why.JOINING(here=2, wanted=2, missing=""))
    ]
    welcomes = {place: answers[place][0] for place in ("00", "01")}
    assert all(isinstance(w, Welcome) and w.world_size == 2 and w.run == "run" for w in welcomes.values())
    assert [welcomes["00"].rank, welcomes["01"].rank] == [0, 1]


def test_join_said_again_is_answered_again() -> None:
    bench = Bench(workers=2)
    first = bench.join("00")
    assert bench.join("00") == first
    bench.join("01")
    assert isinstance(bench.join("00")["00"][0], Welcome)
    assert len(bench.roster.members) == 2


def test_more_workers_than_wanted_belong_to_the_first_round() -> None:
    bench = Bench("00", "01", "10", workers=2)
    assert bench.waits() == "first_requests"
    bench.ask("10")
    assert not bench.got
    bench.ask("00")
    assert bench.round("00", "10").generation.members == ("node0/worker0", "node1/worker0")
    assert bench.join("01")["01"][0].world_size == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        (
            {"versions": {"lsgd": "7.0.0", "torch": "2.13.0"}},
            "software",
            Why.SOFTWARE(versions=f"lsgd 7.0.0 on node1, {__version__} on the global server"),
        ),
        (
            {"versions": {"lsgd": __version__, "torch": "2.12.0"}},
            "software",
            Why.SOFTWARE(versions="torch 2.12.0 on node1, 2.13.0 on node0"),
        ),
        (
            {"model": "other", "model_summary": "3 tensors, 13 numbers"},
            "model",
            Why.MODEL(first="node0/worker0", theirs="3 tensors, 13 numbers", ours="2 tensors, 12 numbers"),
        ),
        (
            {"address": "127.0.0.1"},
            "loopback",
            Why.LOOPBACK(worker="node1/worker0", first="node0/worker0", theirs="127.0.0.1", ours="10.0.0.1"),
        ),
        (
            {"address": "::1"},
            "loopback",
            Why.LOOPBACK(worker="node1/worker0", first="node0/worker0", theirs="::1", ours="10.0.0.1"),
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_refused(changes: dict[str, object], code: str, reason: str) -> None:
    bench = Bench("00", workers=2)
    assert bench.join("10", **changes)["10"] == [Refused(reason)]
    assert bench.codes == [f"is_refused.{code}"]
    assert len(bench.roster.members) == 1


@pytest.mark.parametrize(
    ("versions", "warnings"),
    [
        ({"lsgd": __version__, "torch": "2.13.0"}, ()),
        (
            {"lsgd": f"{__version__}9", "torch": "2.13.0"},
            (f"lsgd {__version__}9 on node1, {__version__} on the global server",),
        ),
        ({"lsgd": __version__, "torch": "2.13.0", "cuda": "12.6", "nccl": "2.27.3"}, ()),
    ],
)
def test_another_patch_is_a_warning_and_a_lack_is_nothing(versions: dict[str, str], warnings: tuple[str, ...]) -> None:
    bench = Bench("00", workers=1)
    (welcome,) = bench.join("10", versions=versions)["10"]
    assert isinstance(welcome, Welcome) and welcome.warnings == warnings


def test_of_two_releases_the_servers_joins_whoever_came_first() -> None:
    bench = Bench(workers=2)
    other = {"lsgd": "7.0.0", "torch": "2.13.0"}
    assert isinstance(bench.join("10", versions=other)["10"][0], Refused)
    bench.join("00")
    assert list(bench.roster.members) == ["node0/worker0"]


def test_a_worker_whose_name_is_not_that_of_its_place_is_refused() -> None:
    bench = Bench(workers=1)
    reason = Why.WRONG_NAME(index=7, node=1, worker="node1/worker0", name="node1/worker7")
    assert bench.say(replace(greeting(1, 0), index=7))["10"] == [Refused(reason)]


@pytest.mark.parametrize("number", [2, 0])
def test_two_living_workers_of_one_name_are_refused(number: int) -> None:
    bench = Bench("00", workers=2)
    bench.incarnations.pop("00")
    twin = greeting(0, 0, number)
    (contested,) = bench.say(twin)["00"]
    assert contested == Waiting(
        0,
        Why.NAME_CONTESTED(worker="node0/worker0", heard_s=0),
    )
    bench.now += 1.0
    bench.say(Heartbeat("node0/worker0", 1))
    (refused,) = bench.say(twin)["00"]
    assert isinstance(refused, Refused)
    assert refused.reason.code == "name_taken"
    assert bench.roster.members["node0/worker0"].join.incarnation == 1


def test_a_restarted_worker_takes_its_own_name_over() -> None:
    bench = Bench("00", "01", lease_s=10)
    assert isinstance(bench.join("00", 2)["00"][0], Waiting)
    for _ in range(4):
        bench.now += 1.0
        bench.heartbeat("01")
        assert isinstance(bench.say(greeting(0, 0, 2))["00"][0], Waiting)
    bench.now += 1.0
    assert isinstance(bench.say(greeting(0, 0, 2))["00"][0], Welcome)
    assert bench.roster.members["node0/worker0"].join.incarnation == 2


def test_who_has_left_cannot_come_back_as_the_same_process() -> None:
    bench = started("00", "01")
    bench.leave("01", did=True)
    assert bench.ledger.count == 1
    (refused,) = bench.join("01")["01"]
    assert isinstance(refused, Refused) and refused.reason.code == "came_back"
    bench.ask("01")
    answer = bench.only("01")
    assert isinstance(answer, Evicted) and (answer.reason.code, answer.run) == ("unknown", "run")
    bench.heartbeat("01")
    assert not bench.got and bench.ledger.count == 1


def test_who_was_cut_off_before_it_heard_that_it_is_welcome_joins_again() -> None:
    bench = started("00", "01", lease_s=5.0)
    bench.join("02")
    del bench.incarnations["02"]
    bench.tick(6.0)
    assert "node0/worker2" not in bench.roster.members
    bench.join("02")
    assert isinstance(bench.only("02"), Welcome)
    bench.ask("02")
    del bench.incarnations["02"]
    bench.tick(6.0)
    bench.join("02")
    (refused,) = bench.got["02"]
    assert isinstance(refused, Refused) and refused.reason.code == "came_back"  # it has asked, and may have trained


def test_waiting_for_others_ends_in_time() -> None:
    bench = Bench("00", workers=2, join_timeout_s=30)
    bench.tick(29)
    assert len(bench.roster.members) == 1
    bench.leave("00")
    bench.now += 100
    bench.join("00", 2)
    bench.tick(30)
    assert not bench.got
    bench.tick(1)
    reason = Why.TOO_FEW(waited_s=30, joined=Why.JOINING(here=1, wanted=2, missing=""))
    assert bench.got["00"] == [Refused(reason)]
    assert not bench.roster.members
    assert isinstance(bench.join("00", 3)["00"][0], Waiting)


def test_one_that_joins_and_never_asks_is_waited_for_so_long_and_no_longer() -> None:
    bench = Bench("00", "01", join_timeout_s=30)
    bench.ask("00")
    bench.tick(30)
    assert not bench.notes
    bench.tick(1)
    assert bench.codes == ["leaves.never_asked"]
    bench.join("01", 2)
    bench.ask("01")
    assert bench.round("00", "01").id == 1


def test_one_that_leaves_before_the_first_round_is_waited_for_anew() -> None:
    bench = Bench("00", "01", join_timeout_s=30)
    bench.ask("00")
    bench.leave("01")
    assert bench.waits() == "joining"
    bench.join("01", 2)
    bench.ask("01")
    assert bench.round("00", "01").id == 1


@pytest.mark.parametrize("welcomed", [False, True])
def test_stopped_before_the_first_round(welcomed: bool) -> None:
    bench = Bench("00", workers=1 if welcomed else 2)
    bench.say(StopRun("enough"))
    assert bench.codes == ["stopping.ordered"] and bench.waits() == "ended.ordered"
    if welcomed:
        assert isinstance(bench.join("00")["00"][0], Welcome)
        assert bench.ask("00")["00"] == [Stop(1, None, "enough")]
        bench.leave("00")
    else:
        assert bench.join("00")["00"] == [Over("enough")]
    assert bench.state.over
    assert bench.join("01")["01"] == [Over("enough")]


def test_stopped_without_a_reason() -> None:
    bench = started("00")
    bench.say(StopRun(""))
    assert bench.state.shown == "stopping"


def test_stopped_with_nobody_there() -> None:
    bench = Bench(workers=1)
    bench.coordinator.stop("enough")
    bench.tick()
    assert bench.codes == ["stopping.ordered"] and bench.state.over


# -- tokens and rounds -----------------------------------------------------------------------------------------


def test_first_round_starts_all_from_the_model_of_rank_0() -> None:
    bench = Bench("00", "01", "10")
    bench.ask_all("00", "01", "10")
    round = bench.round("00", "01", "10")
    assert (round.id, round.scope, round.exchanges, round.final) == (1, "global", 0, False)
    assert (round.source, round.new, round.leader, round.leaders) == (0, (1, 2), 0, (0, 2))
    assert round.generation.node_sizes == (2, 1) and round.generation.transport == "tcp"
    assert bench.notes == [
        Why.GENERATION(number=1, workers="3 workers", nodes="2 nodes", transport="tcp", why=""),
        Why.ROUND(scope="global", id=1, where="", who="leader node0/worker0 (no loss yet)", count=0),
    ]


@pytest.mark.parametrize(
    ("gpus", "settings", "transport", "nccl_nodes"),
    [
        ({"00": "a", "01": "b"}, {}, "nccl", ()),
        ({"00": "a", "01": "b"}, {"offload": True}, "tcp", ()),
        ({"00": "a", "01": "a"}, {}, "tcp", ()),
        ({"00": "a", "01": ""}, {}, "tcp", ()),
        ({"00": "", "01": ""}, {}, "tcp", ()),
        ({"00": "a", "10": "b"}, {}, "tcp", ()),
        ({"00": "a", "01": "b", "10": "c", "11": "d"}, {}, "tcp", (0, 1)),
        ({"00": "a", "01": "b", "10": "c", "11": "d"}, {"transport": "tcp"}, "tcp", ()),
        ({"00": "a", "01": "b", "10": "c", "11": "d"}, {"transport": "nccl"}, "nccl", ()),
        ({"00": "a", "01": "b", "10": "c", "11": "c"}, {}, "tcp", (0,)),
        ({"00": "", "10": "c", "11": "d"}, {}, "tcp", (1,)),
    ],
)
def test_nccl_carries_tensors_inside_nodes_where_each_worker_has_a_gpu_and_sends_from_it(
    gpus: dict[str, str], settings: dict[str, object], transport: str, nccl_nodes: tuple[int, ...]
) -> None:
    bench = Bench(workers=len(gpus), **settings)
    for place, gpu in gpus.items():
        bench.join(place, gpu=gpu)
    bench.ask_all(*gpus)
    generation = bench.round(*gpus).generation
    assert (generation.transport, generation.nccl_nodes) == (transport, nccl_nodes)
    (note,) = [str(note) for note in bench.notes if note.code == "generation"]
    assert note.endswith(f"over {transport}" + golden.text("reasons.nccl_inside") * bool(nccl_nodes))


def test_a_run_over_nccl_refuses_a_worker_without_a_gpu_of_its_own() -> None:
    bench = Bench(workers=2, transport="nccl")
    for place, gpu, refused in (("00", "", True), ("00", "a", False), ("01", "a", True), ("01", "b", False)):
        bench.join(place, gpu=gpu)
        assert ("is_refused.no_gpu" in bench.codes) is refused
    bench.ask_all("00", "01")
    assert bench.round("00", "01").generation.transport == "nccl"


@pytest.mark.parametrize("certificate", [b"", b"a key and a certificate"])
def test_all_members_get_the_certificate_of_the_run(certificate: bytes) -> None:
    bench = Bench(workers=2)
    bench.state.tenure.access = Access(certificate)
    bench.join("00")
    welcomes = bench.join("01")
    assert [w.certificate for answers in welcomes.values() for w in answers if isinstance(w, Welcome)] == [
        certificate
    ] * 2


def test_token_by_token_to_a_local_and_a_global_round() -> None:
    """Two groups of two, a global round every 8 iterations a worker and a local one every 4: 32 and 8."""
    places = ("00", "01", "10", "11")
    bench = started(*places, period=8, local_period=4)
    for _ in range(3):
        for place in places:
            (go,) = bench.ask(place)[place]
            assert isinstance(go, Go) and go.round is None
    bench.ask("00")
    assert not bench.got
    assert waits_for(bench.state, bench.now) == (
        Why.BUSY(waited_s=0, who="node0/worker1, node1/worker0, node1/worker1", open_round="")
    )
    bench.ask("01")
    local = bench.round("00", "01")
    assert (local.scope, local.leader, local.leaders, local.new) == ("local", 0, (0, -1), ())
    assert bench.notes == [
        Why.ROUND(scope="local", id=2, where=" of node0", who="leader node0/worker0 (no loss yet)", count=14)
    ]
    # The other group is not held up: it may train on, and so may this one.
    assert not bench.ask("10")
    bench.ask("11")
    assert bench.round("10", "11").leaders == (-1, 2)
    bench.complete_all(*places)
    for _ in range(3):
        for place in places:
            bench.ask(place)
    assert bench.ledger.tokens == 0
    bench.ask_all(*places)
    last = bench.round(*places)
    assert (last.id, last.scope, last.exchanges) == (4, "global", 1)
    assert bench.ledger.count == 32
    assert bench.book.ordered == {"local": 2, "global": 2}


def test_a_fast_worker_takes_more_of_the_tokens() -> None:
    bench = started("00", "01", period=8, local_period=8)
    while bench.ask("00").get("00"):
        pass
    assert bench.roster.members["node0/worker0"].done == 15
    assert bench.ask("01") and bench.round("00", "01").scope == "global"
    assert bench.ledger.count == 16


def test_one_group_has_no_local_rounds() -> None:
    bench = started("00", "01", period=8, local_period=2)
    for _ in range(7):
        bench.ask_all("00", "01")
    bench.ask_all("00", "01")
    assert bench.round("00", "01").id == 2
    assert bench.book.ordered == {"local": 0, "global": 2}


def test_equal_periods_have_no_local_rounds() -> None:
    bench = started("00", "10", period=4, local_period=4)
    for _ in range(4):
        bench.ask_all("00", "10")
    assert bench.round("00", "10").scope == "global"
    assert bench.book.ordered == {"local": 0, "global": 2}


def test_what_the_run_has_left_is_too_little_for_a_local_round() -> None:
    """The run's queue does not cover the group: the global round comes, whatever is left."""
    places = ("00", "01", "02", "10")
    bench = started(*places, period=2, local_period=1)
    bench.ask("10")
    assert bench.round("10").scope == "local" and bench.ledger.tokens == 3
    bench.complete_all("10")
    bench.ask("10")
    bench.complete_all("10")
    assert bench.ledger.tokens == 2
    for place in ("00", "01", "02"):
        assert not bench.ask(place)
    bench.ask("10")
    bench.complete_all("10")
    bench.ask("10")
    bench.complete_all("10")
    assert bench.ledger.tokens == 0
    bench.ask("10")
    assert bench.round(*places).scope == "global"


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 31, 33])
def test_the_last_fill_is_exact(limit: int) -> None:
    places = ("00", "01", "10")
    bench = Bench(*places, iterations=limit, period=4, local_period=2)
    finals = []
    for _ in range(3 * limit + 3):
        for place in places:
            member = bench.member(place)
            if member.state.name == "BUSY":
                if member.round is not None:
                    bench.complete(place, member.round.round.id)
                if isinstance(member.answer, Go):
                    bench.ask(place)
            elif member.state.name == "JOINED":
                bench.ask(place)
        finals += [m.answer for m in bench.roster.members.values() if isinstance(m.answer, Stop)]
    assert bench.ledger.count == limit
    assert finals and all(f.round is not None and f.round.final for f in finals)
    assert finals[0].reason.code == "all_made"


def test_the_last_iterations_go_to_those_who_have_the_model() -> None:
    bench = started("00", "01", iterations=7, period=2, local_period=2)
    bench.ask_all("00", "01")
    bench.join("02")
    bench.ask("02")
    bench.ask("00")
    bench.ask("01")
    round = bench.round("00", "01", "02")
    assert round.new == (2,) and round.generation.number == 2
    assert bench.ledger.tokens == 0  # 4 are made, 3 are granted
    bench.complete_all("00", "01")
    bench.fail("02", round.id)
    bench.ask("02", same=True, dropped=round.id)
    bench.ask_all("00", "01")  # 6 are made
    assert sorted(bench.got) == ["00"]
    assert bench.got["00"] == [Go(4, None, 6 / 7)]
    bench.ask("00")
    assert bench.round("00", "01", "02").final


def test_lockstep_stops_when_too_few_are_left_for_all() -> None:
    bench = Bench("00", "01", plan=make_plan(algorithm=Lockstep(), workers=2, iterations=3))
    bench.ask_all("00", "01")
    assert bench.notes[1:] == []  # no line for each: every iteration is a round
    bench.complete_all("00", "01")
    bench.ask_all("00", "01")
    assert bench.round("00", "01").final
    assert bench.codes[0] == "stopping.rest_too_small"


def test_lockstep_makes_no_iteration_of_a_grant_that_came_back() -> None:
    bench = started("00", "01", algorithm=Lockstep())
    bench.pause("00", did=False)
    assert bench.ledger.tokens == 1
    bench.ask("01")
    assert bench.round("01").scope == "global"


def test_lockstep_begins_a_generation_with_one_model() -> None:
    bench = Bench("00", "01", plan=make_plan(algorithm=Lockstep(), workers=2))
    bench.ask_all("00", "01")
    assert bench.round("00", "01").new == (1,)
    bench.complete_all("00", "01")
    bench.ask_all("00", "01")
    assert bench.round("00", "01").new == ()
    bench.complete_all("00", "01")
    bench.ask("00")
    over, go = bench.leave("01", did=True)["00"]
    assert isinstance(over, GenerationOver) and isinstance(go, Go) and go.round is not None
    assert go.round.new == ()
    bench.join("01", 2)
    bench.complete_all("00")
    bench.ask("01")
    bench.ask("00")
    round = bench.round("00", "01")
    assert (round.source, round.new, round.generation.number) == (0, (1,), 3)


# -- phases and changes ----------------------------------------------------------------------------------------


def phased(*phases: tuple[AlgorithmSettings, int], workers: int = 2, **run: Any) -> Plan:
    return Plan(RunSettings(workers=workers, **run), tuple(PlanPhase(a, i) for a, i in phases))


def test_a_phase_of_gradient_averaging_then_leader_sgd() -> None:
    leader = LeaderSettings(period=2, local_period=2)
    bench = Bench("00", "01", plan=phased((AllReduceSettings(), 5), (leader, 0)))
    for _ in range(2):
        bench.ask_all("00", "01")
        assert json.loads(bench.round("00", "01").algorithm)["name"] == "allreduce"
        bench.complete_all("00", "01")
    bench.ask_all("00", "01")  # 4 are made: the fifth cannot be made by both
    assert bench.notes[0] == Why.PHASE(number=2, algorithm="leader", count=4)
    assert json.loads(bench.round("00", "01").algorithm) == {"name": "leader", **asdict(leader)}
    assert bench.round("00", "01").new == bench.round("00", "01").averaged == ()  # models are the same
    bench.complete_all("00", "01")
    bench.ask("00")
    assert bench.got["00"] == [Go(4, None, 0.0)]


def test_a_phase_with_equal_models_begins_with_one_model() -> None:
    leader = LeaderSettings(period=1, local_period=1)
    bench = Bench("00", "01", plan=phased((leader, 2), (AllReduceSettings(), 0)))
    bench.ask_all("00", "01")
    bench.complete_all("00", "01")
    bench.ask("00", loss=0.2)
    bench.ask("01", loss=0.1)
    round = bench.round("00", "01")
    assert (round.source, round.new, round.generation.number) == (1, (0,), 1)


def test_a_phase_begins_with_the_mean_of_models_that_differ_until_a_round_has_it() -> None:
    leader = LeaderSettings(period=2, local_period=2)
    bench = Bench("00", "01", workers=2, plan=phased((LocalSettings(period=1), 2), (leader, 0)))
    bench.ask_all("00", "01")
    bench.complete_all("00", "01")
    bench.join("02")
    bench.ask_all("02", "00", "01")
    first = bench.round("00", "01", "02")
    assert (first.averaged, first.new) == ((0, 1), (2,))
    bench.fail("00", first.id)
    for place in ("00", "01", "02"):
        bench.ask(place, same=True, dropped=first.id)
    again = bench.round("00", "01", "02")
    assert again.averaged == (0, 1) and again.id > first.id
    bench.complete_all("00", "01", "02")
    for _ in range(2):
        bench.ask_all("00", "01", "02")
    assert bench.round("00", "01", "02").averaged == ()


def test_only_the_first_global_round_of_a_phase_averages_and_none_that_changes_numbers_only() -> None:
    leader = LeaderSettings(period=4, local_period=1)
    phases = (LocalSettings(period=1), 4), (LocalSettings(period=2), 4), (leader, 0)
    bench = Bench("00", "01", "10", "11", plan=phased(*phases, workers=4))
    everybody, seen = ("00", "01", "10", "11"), []
    for _ in range(3):
        bench.ask_all(*everybody)
        seen.append(bench.round(*everybody).averaged)
        bench.complete_all(*everybody if len(seen) < 3 else everybody[:2])
    assert seen == [(), (), (0, 1, 2, 3)]
    bench.ask_all("00", "01")
    local = bench.round("00", "01")
    assert local.scope == "local" and local.averaged == () and bench.book.open


def test_a_run_that_ends_as_a_phase_of_equal_models_begins_counts_all_models() -> None:
    plan = phased((LocalSettings(period=1), 2), (AllReduceSettings(), 0), iterations=3)
    bench = Bench("00", "01", plan=plan)
    bench.ask_all("00", "01")
    bench.complete_all("00", "01")
    bench.ask_all("00", "01")
    final = bench.round("00", "01")
    assert final.final and json.loads(final.algorithm)["name"] == "allreduce"
    assert (final.averaged, final.new) == ((), ())


def test_a_changed_setting_counts_from_the_next_global_round_on() -> None:
    bench = started("00", "01", period=2, local_period=2)
    bench.coordinator.change({"period": "4"})
    bench.ask_all("00", "01")
    assert bench.notes == []
    assert bench.ledger.tokens == 0
    bench.ask_all("00", "01")
    assert json.loads(bench.round("00", "01").algorithm)["period"] == 4
    assert bench.ledger.tokens == 6


def test_a_change_is_told_and_a_wrong_one_refused() -> None:
    bench = started("00")
    bench.coordinator.change({"pull_global": "0.5"})
    bench.tick()
    assert bench.notes == [Why.CHANGED(name="pull_global", text="0.5")]
    with pytest.raises(ConfigError, match=golden.pattern("reasons.fixed_lease")):
        bench.coordinator.change({"lease_s": "3"})
    with pytest.raises(ConfigError, match=golden.pattern("reasons.not_whole")):
        bench.coordinator.change({"iterations": "many"})
    with pytest.raises(ConfigError, match=golden.pattern("reasons.beyond")):
        bench.coordinator.change({"iterations": str(10**20)})


def test_a_newcomer_gets_the_plan_with_the_length_as_changed() -> None:
    bench = started("00", iterations=100)
    bench.coordinator.change({"iterations": "50"})
    bench.join("01")
    assert isinstance(bench.only("01"), Welcome)
    assert Plan.from_json(bench.only("01").plan).run.iterations == 50


@pytest.mark.parametrize(("limit", "count"), [(10, 10), (4, 4), (3, 4), (1, 4)])
def test_a_limit_lowered_in_the_run_holds_for_what_is_not_granted(limit: int, count: int) -> None:
    bench = started("00", "01", period=16, local_period=16)
    bench.ask_all("00", "01")  # 2 are made, 2 are granted
    bench.coordinator.change({"iterations": str(limit)})
    for _ in range(limit):
        for place in ("00", "01"):
            if not bench.member(place).held and isinstance(bench.member(place).answer, Go):
                bench.ask(place)
    assert bench.ledger.count == count
    assert bench.book.final


# -- elections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "leader"),
    [
        ((0.3, 0.2, 0.5), 1),
        ((0.2, 0.2, 0.2), 0),
        ((None, 0.9, None), 1),
        ((None, None, None), 0),
        ((math.nan, 3.0, 2.0), 2),
        ((-math.inf, math.inf, 2.0), 2),
        ((math.nan, math.nan, math.inf), 0),
    ],
)
def test_the_lowest_finite_loss_leads(losses: tuple[float | None, ...], leader: int) -> None:
    places = ("00", "01", "02")
    bench = started(*places, period=1, local_period=1)
    for place, loss in zip(places, losses, strict=True):
        bench.ask(place, loss=loss)
    assert bench.round(*places).leader == leader
    assert bench.member(places[leader]).record.times_leader == 1 + (leader == 0)
    assert bench.book.elections[-1].worker == f"node0/worker{leader}"
    of_none = losses[leader] is not None and not math.isfinite(losses[leader])
    assert ("no finite loss" in bench.notes[-1]) is of_none


def leaders_of(rule: str, losses: list[tuple[float | None, ...]], run: str = "run") -> list[int]:
    """Return who leads the rounds before which three workers report these losses."""
    places = ("00", "01", "02")
    algorithm = LeaderSettings(period=1, local_period=1, election=rule)
    bench = started(*places, algorithm=algorithm)
    bench.state.run = run
    leaders = []
    for row in losses:
        for place, loss in zip(places, row, strict=True):
            bench.ask(place, loss=loss)
        leaders.append(bench.round(*places).leader)
        bench.complete_all(*places)
    return leaders


@pytest.mark.no_cover
def test_the_lot_elects_all_alike_and_the_same_in_a_run_told_again() -> None:
    shard_is_easier = [(0.1, 0.5, 0.5)] * 300
    leaders = leaders_of("random", shard_is_easier)
    assert all(70 < leaders.count(rank) < 130 for rank in range(3))
    assert leaders == leaders_of("random", shard_is_easier)
    assert leaders != leaders_of("random", shard_is_easier, run="another run")
    assert set(leaders_of("random", [(None, None, None)] * 30)) == {0, 1, 2}


def test_the_lot_never_falls_on_a_worker_without_a_finite_loss() -> None:
    assert set(leaders_of("random", [(math.nan, 3.0, None)] * 30)) == {1}


def test_the_probe_elects_the_lowest_loss_whatever_came_before() -> None:
    assert leaders_of("probe", [(1.0, 8.0, 2.0), (0.9, 0.5, None), (math.nan, 0.6, 0.55)]) == [0, 1, 2]


def test_progress_elects_who_has_improved_most_beside_its_own_history() -> None:
    history = [(1.0, 8.0, -2.0), (1.0, 8.0, -2.0)]
    assert leaders_of("progress", history) == [0, 0]  # no history; then nobody has improved
    assert leaders_of("progress", [*history, (0.9, 4.0, -2.1)])[-1] == 1  # though its loss is the highest
    assert leaders_of("progress", [*history, (0.9, 9.0, -3.0)])[-1] == 2
    assert leaders_of("progress", [*history, (2.0, math.nan, -1.9)])[-1] == 2
    assert leaders_of("progress", [(0.0, 1.0, 1.0), (0.5, 1.1, 1.2)])[-1] == 1  # a usual loss of zero


@pytest.mark.no_cover
def test_history_of_a_large_run_is_bounded() -> None:
    places = [f"{n}{i}" for n in range(10) for i in range(8)]
    bench = started(*places, period=1, local_period=1)
    for place in places:
        bench.ask(place, loss=0.1 if place == "97" else 0.5)
    election = bench.book.elections[-1]
    assert (election.worker, election.scope, election.node) == ("node9/worker7", "global", -1)
    assert len(election.losses) == MAX_LOSSES + 1 and election.losses["node9/worker7"] == 0.1


# -- lost, doubled and late messages ---------------------------------------------------------------------------


def test_the_same_request_gets_the_same_answer() -> None:
    bench = started("00", "01", period=8, local_period=8)
    answer = bench.ask("00")["00"]
    for _ in range(100):
        assert bench.ask("00", same=True)["00"] == answer
    assert bench.ledger.count == 1


def test_a_held_request_said_again_hears_what_it_waits_for() -> None:
    bench = Bench("00", "01")
    bench.ask("00")
    assert bench.ask("00", same=True)["00"] == [Waiting(1, Why.FIRST_REQUESTS(who="node0/worker1"))]


def test_a_late_request_changes_nothing() -> None:
    bench = started("00", "01", period=8, local_period=8)
    bench.ask("00")
    bench.ask("00")
    before = bench.ledger.count
    for seq in (1, 0, -5):
        assert not bench.say(Request("node0/worker0", 1, seq, 10, 1, 0, 0.1))
    assert bench.ledger.count == before and not bench.member("00").held


@pytest.mark.parametrize("seq", [0, -1])
def test_requests_are_counted_from_1(seq: int) -> None:
    bench = Bench("00")
    assert not bench.say(Request("node0/worker0", 1, seq, 0, 0, 0, None))


def test_what_the_rendezvous_is_for_is_a_sign_of_life_only() -> None:
    bench = Bench("00")
    bench.now += 3
    assert not bench.say(Put("node0/worker0", 1, 1, "key", b"value"))
    assert bench.member("00").heard_at == bench.now


def test_a_request_that_says_what_it_completed_stands_for_a_lost_done() -> None:
    bench = Bench("00", "01", period=8, local_period=8)
    bench.ask_all("00", "01")
    bench.committed.update({"00": 1, "01": 1})
    bench.ask("00")
    assert list(bench.book.open) == [1]
    bench.ask("01")
    assert not bench.book.open and bench.member("01").synced


def test_a_request_that_passes_its_round_over_fails_it() -> None:
    bench = Bench("00", "01", period=8, local_period=8)
    bench.ask_all("00", "01")
    bench.complete("00", 1)
    bench.ask("01")
    assert bench.codes[0] == "round_fails.passed_over"
    assert bench.roster.broken


# -- pausing ---------------------------------------------------------------------------------------------------


def test_iterations_made_alone_count_and_are_taken_from_the_queue() -> None:
    bench = started("00", "01", period=4, local_period=4, iterations=20)
    bench.ask("00")  # its answer is lost, and the servers fall silent: it makes three on its own
    assert (bench.ledger.count, bench.ledger.tokens) == (1, 5)
    bench.done["00"] += 3
    before = bench.only("00")
    assert bench.ask("00", same=True) == {"00": [before]}
    assert (bench.ledger.count, bench.ledger.tokens) == (4, 2)
    bench.ask("00")
    assert (bench.ledger.count, bench.ledger.tokens) == (5, 1)
    bench.done["01"] += 3
    bench.ask("01")
    assert (bench.ledger.count, bench.ledger.tokens) == (9, 0)


def test_iterations_made_alone_can_overshoot_the_limit_and_then_the_run_ends() -> None:
    bench = started("00", "01", period=4, local_period=4, iterations=4)
    bench.done["00"] += 5
    bench.ask("00")
    assert bench.ledger.count == 6
    bench.ask("01")
    assert bench.ledger.count == 7
    assert bench.round("00", "01").final and bench.state.stopping.code == "all_made"


def test_an_unused_grant_goes_back_and_wakes_who_is_held() -> None:
    bench = started("00", "01", period=2, local_period=2)
    bench.ask("00")
    bench.ask("01")
    assert bench.ledger.tokens == 0
    assert not bench.ask("01")
    bench.pause("00", did=False)
    assert bench.got["01"] == [Go(3, None, 0.0)]
    assert bench.ledger.count == 3


def test_rounds_go_on_without_who_pauses_and_it_takes_the_model_when_it_returns() -> None:
    bench = started("00", "01", period=1, local_period=1)
    bench.pause("01")
    bench.ask("00")
    generation = bench.round("00").generation
    assert generation.members == ("node0/worker0",) and generation.others == (0, 1)
    bench.complete_all("00")
    assert not bench.member("01").synced
    bench.ask("01", did=False)
    bench.ask("00")
    round = bench.round("00", "01")
    assert (round.source, round.new) == (0, (1,))


def test_a_short_pause_costs_nothing_but_the_pause() -> None:
    """No global round came in between: the groups' local rounds go on where they were."""
    bench = started("00", "01", "10", "11", period=8, local_period=2)
    bench.pause("00")
    bench.ask_all("10", "11")
    bench.ask("10")
    assert not bench.ask("11")  # a local round would be due
    bench.ask("00", did=False)
    assert bench.round("10", "11").scope == "local"
    assert bench.got["00"] == [Go(2, None, 0.0)]


def test_a_pause_said_twice_or_late_changes_nothing() -> None:
    bench = started("00", "01", period=8, local_period=8)
    assert bench.pause("00")["00"] == [Paused(1)]
    assert bench.pause("00", did=False)["00"] == [Paused(1)]
    assert len(bench.roster.within(MemberState.PAUSED)) == 1 and bench.ledger.count == 1
    assert bench.ask("00", same=True)["00"] == [bench.member("00").answer]  # a late copy
    assert len(bench.roster.within(MemberState.PAUSED)) == 1
    seq = bench.seqs["00"]
    bench.ask("00", did=False)
    bench.seqs["00"] = seq
    assert bench.pause("00", did=False)["00"] == [Paused(seq)]
    assert not bench.roster.within(MemberState.PAUSED)


def test_a_pause_instead_of_a_round_fails_it() -> None:
    bench = Bench("00", "01")
    bench.ask_all("00", "01")
    bench.pause("01", did=False)
    assert bench.codes[0] == "round_fails.paused"
    assert isinstance(bench.got["00"][0], GenerationOver)


def test_newcomers_do_not_begin_anew_while_who_has_the_model_pauses() -> None:
    bench = started("00", period=1, local_period=1)
    bench.pause("00")
    bench.join("01")
    assert not bench.ask("01")
    assert bench.waits() == "model_away"
    bench.tick(60)
    assert bench.member("01").held
    bench.ask("00", did=False)
    round = bench.round("00", "01")
    assert (round.source, round.new) == (0, (1,))


def test_newcomers_begin_anew_when_nothing_was_learned() -> None:
    bench = started("00")
    bench.join("01")
    bench.ask("01")
    bench.leave("00")
    assert bench.round("01").source == 0
    assert "no_holder" in bench.codes
    bench.complete_all("01")
    bench.pause("01")
    assert bench.waits(1) == "away"


# -- leaving ---------------------------------------------------------------------------------------------------


def test_a_leave_ends_the_generation_and_the_others_go_on() -> None:
    bench = started("00", "01", "10", period=8, local_period=4)
    bench.ask("01")
    bench.leave("01", did=True, failed=True, reason="ValueError: no such file")
    assert bench.codes == ["leaves.failed"]
    over = GenerationOver(1, "node0/worker1 left: failed: ValueError: no such file")
    assert bench.got == {"00": [over], "10": [over]}
    assert isinstance(bench.ask("00")["00"][0], Go)
    while bench.ask("00"):
        pass
    while "00" not in bench.ask("10"):
        pass
    assert bench.round("00", "10").generation.number == 2
    assert bench.codes[0] == "generation.member_left.failed"


def test_a_silent_worker_is_evicted_and_its_grant_goes_back() -> None:
    bench = started("00", "01", period=2, local_period=2, lease_s=5, iterations=6)
    bench.ask("01")
    bench.incarnations.pop("01")
    bench.ask("00")
    assert not bench.ask("00")
    bench.tick(5)
    assert bench.member("00").held
    bench.tick(1)
    assert "leaves.silent" in bench.codes
    assert isinstance(bench.got["00"][-1], Go)


def test_time_that_the_coordinator_itself_was_away_is_nobodys_silence() -> None:
    bench = started("00", "01", lease_s=10)
    bench.now += 1000
    bench.act(bench.coordinator.tick(bench.now))
    assert len(bench.roster.members) == 2
    bench.incarnations.pop("01")
    bench.tick(11)
    assert len(bench.roster.members) == 1


def test_a_node_that_is_ended_sends_its_workers_home() -> None:
    places = ("00", "10", "11", "12")
    bench = started(*places, period=1, local_period=1)
    bench.pause("11")
    bench.ask("10")
    assert not bench.got
    bench.say(NodeLeave(1, 7, "node1 got SIGTERM"))
    assert bench.got["10"] == [Stop(2, None, "node1 got SIGTERM")]
    bench.leave("10")
    assert not bench.got  # it took part in nothing any more
    assert bench.ask("12")["12"] == [Stop(2, None, "node1 got SIGTERM")]
    assert bench.ask("12", same=True)["12"] == [Stop(2, None, "node1 got SIGTERM")]
    assert bench.ask("11", did=False)["11"] == [Stop(2, None, "node1 got SIGTERM")]
    bench.ask("00")
    assert bench.round("00").generation.members == ("node0/worker0",)


def test_who_has_left_is_remembered_with_all_that_its_incarnations_made() -> None:
    bench = started("00", "01")
    bench.leave("01", did=True)
    bench.join("01", 2)
    bench.ask("01")
    bench.ask("00")
    bench.leave("01", did=True)
    assert bench.roster.made == {"node0/worker1": 2}
    assert bench.roster.left["node0/worker1"].join.incarnation == 2


def test_what_a_process_has_made_is_in_no_model_once_another_has_its_name_and_has_left_too() -> None:
    bench = started("00", "01", period=4, local_period=4)
    bench.leave("01", did=True)
    assert bench.ledger.count == 1, "it may be back"
    bench.join("01", 2)
    bench.leave("01")
    assert bench.ledger.count == 1 and bench.roster.gone == 1
    while bench.member("00").round is None:
        bench.ask("00")
    assert bench.ledger.count == bench.done["00"] > 0


def test_only_so_many_of_those_who_have_left_are_remembered() -> None:
    roster = Roster()
    for index in range(MAX_LEFT + 2):
        member = Member(greeting(0, index), 0.0)
        roster.add(member)
        roster.remove(member, NO_REASON)
    assert len(roster.left) == len(roster.made) == MAX_LEFT
    assert next(iter(roster.left)) == "node0/worker2"


def test_two_workers_with_the_same_batches_end_a_run_that_has_learned_nothing() -> None:
    bench = started("00", "01", "02")
    bench.data("00", "digest")
    bench.ask("02")
    bench.data("01", "digest")
    assert bench.state.failed.code == "same_batches" and bench.state.shown == "over"
    for place in ("00", "01", "02"):
        (refused, *_) = [m for m in bench.got[place] if isinstance(m, Refused)]
        assert refused.reason == bench.state.failed
    assert bench.ask("00")["00"] == [Refused(bench.state.failed)]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((), (), golden.text("reasons.same_first_steps")),
        (("d", "n"), ("d", "n"), golden.text("reasons.same_and_noise")),
        (("d", "n"), ("d", "m"), golden.text("reasons.same_not_noise")),
        (("d", "n"), ("e", ""), golden.text("reasons.same_not_data")),
    ],
)
def test_what_is_the_same_is_said(first, second, words) -> None:
    bench = started("00", "01")
    bench.data("00", "digest", *first)
    bench.data("01", "digest", *second)
    assert words in str(bench.state.failed)


def test_a_worker_that_comes_later_with_the_same_batches_is_refused() -> None:
    bench = started("00", "01", "02", period=1, local_period=1)
    bench.ask_all("00", "01", "02")
    bench.complete_all("00", "01", "02")
    bench.data("00", "digest")
    bench.data("00", "digest")
    assert not bench.got
    bench.data("01", "another")
    bench.data("01", "digest")
    (refused,) = [m for m in bench.got["01"] if isinstance(m, Refused)]
    assert refused.reason.code == "same_batches"
    assert "node0/worker1" not in bench.roster.members
    bench.leave("00")
    bench.data("02", "digest")
    assert "02" not in bench.got


def test_that_some_rounds_get_no_line_is_said_once() -> None:
    bench = started("00", "01", period=1, local_period=1)
    notes = list(bench.codes)
    for _ in range(FIRST_LINES + 5):
        bench.ask_all("00", "01")
        notes += bench.codes
        bench.complete_all("00", "01")
    assert notes.count("fewer_lines") == 1 and notes.index("fewer_lines") == len(notes) - 1


def test_participation_is_the_share_of_the_workers_in_global_rounds() -> None:
    bench = started("00", "01", period=1, local_period=1, patience_s=5.0)
    assert bench.book.participation == 1.0
    bench.join("10")
    bench.join("11")
    for _ in range(3):
        bench.ask_all("00", "01")
        bench.complete_all("00", "01")
    assert bench.book.participation == (1.0 + 3 * 0.5) / 4


def test_a_round_that_takes_long_is_said_with_how_far_it_is() -> None:
    bench = Bench("00", "01")
    bench.ask_all("00", "01")
    assert bench.waits(1.0) == "nobody"
    bench.say(Heartbeat(*bench.who("01"), transfer="7.1 of 50.0 MB with node0/worker0 at 5.00 Mbit/s, about 69 s left"))
    assert waits_for(bench.state, bench.now + LONG_ROUND_S + 1.0) == (
        Why.UNDER_WAY(id=1, for_s=4, who="node0/worker0, node0/worker1", transfer=golden.text("reasons.moved_7"))
    )


# -- rounds that fail ------------------------------------------------------------------------------------------


def test_a_failed_round_is_made_again_by_all() -> None:
    bench = Bench("00", "01", period=8, local_period=8)
    bench.ask_all("00", "01")
    first = bench.round("00", "01")
    bench.complete("00", 1)
    bench.fail("01", 1, "peer node0/worker0 closed")
    assert bench.codes == ["round_fails.error"]
    over = GenerationOver(1, "node0/worker1: peer node0/worker0 closed")
    assert bench.got == {"00": [over], "01": [over]}
    assert bench.ledger.tokens == 0
    assert not bench.ask("01", same=True, dropped=1)
    bench.ask("00")  # made its iteration
    second = bench.round("00", "01")
    assert second.generation.number == 2 and second.id == 2 and second.exchanges == 1
    assert (second.source, second.new) == (0, (1,))  # the most advanced has the state
    assert first.generation.members == second.generation.members
    assert bench.ledger.count == 1


def test_an_answer_stands_until_it_is_said_to_be_dropped() -> None:
    """A copy of the request may be late, and its worker have completed the round: it is not held again."""
    bench = Bench("00", "01", period=8, local_period=8)
    bench.ask_all("00", "01")
    bench.fail("01", 1)
    over, go = bench.ask("00", same=True)["00"]
    assert isinstance(over, GenerationOver) and over.reason.code == "round_failed"
    assert go == bench.member("00").answer
    assert not bench.member("00").held
    bench.complete("00", 1)
    assert bench.ask("00", same=True)["00"] == [go]
    bench.ask("01", same=True, dropped=1)
    bench.ask("00")
    assert bench.round("00", "01").id == 2 and bench.ledger.count == 1


def test_dropped_by_a_request_only() -> None:
    bench = Bench("00", "01", period=8, local_period=8)
    bench.ask_all("00", "01")
    bench.ask("00", same=True, dropped=1)
    assert bench.codes[0] == "round_fails.dropped"
    assert bench.member("00").held


def test_a_late_word_of_an_old_round_changes_nothing() -> None:
    bench = Bench("00", "01", period=8, local_period=8)
    bench.ask_all("00", "01")
    bench.fail("01", 1)
    for place in ("00", "01"):
        bench.ask(place, same=True, dropped=1)
    assert bench.round("00", "01").id == 2
    bench.say(Failed("node0/worker0", 1, 1, "late"))
    bench.say(Completed("node0/worker0", 1, 1))
    assert list(bench.book.open) == [2] and not bench.roster.broken


def test_a_failed_local_round_brings_a_global_one() -> None:
    bench = started("00", "01", "10", "11", period=4, local_period=1)
    bench.ask_all("00", "01")
    local = bench.round("00", "01")
    bench.fail("00", local.id)
    for place in ("00", "01"):
        bench.ask(place, same=True, dropped=local.id)
    assert not bench.ask("10")
    bench.ask("11")
    assert bench.round("00", "01", "10", "11").scope == "global"


def test_who_dies_in_a_round_fails_it() -> None:
    bench = Bench("00", "01")
    bench.ask_all("00", "01")
    bench.leave("01", failed=True, reason="killed")
    assert bench.codes == ["leaves.failed", "round_fails.gone.failed"]
    bench.ask("00", same=True, dropped=1)
    assert bench.round("00").generation.members == ("node0/worker0",)


def test_rounds_that_fail_for_ever_end_the_run() -> None:
    bench = Bench("00", "01")
    bench.ask_all("00", "01")
    for number in range(1, MAX_FAILED_ROUNDS + 1):
        assert bench.round("00", "01").id == number
        bench.fail("01", number, "no route to host")
        for place in ("00", "01"):
            bench.ask(place, same=True, dropped=number)
    reason = Why.ROUNDS_FAIL(failures=10, reason="node0/worker1: no route to host")
    stop = Stop(1, None, reason, failed=True)
    assert bench.got == {"00": [stop], "01": [stop]}
    assert bench.state.closed and bench.state.in_vain and bench.ledger.count == 0


def test_a_completed_global_round_forgives_the_failed_ones() -> None:
    bench = Bench("00", "01", period=1, local_period=1)
    bench.ask_all("00", "01")
    for number in range(1, 2 * MAX_FAILED_ROUNDS):
        if number % 2:
            bench.fail("01", number)
            for place in ("00", "01"):
                bench.ask(place, same=True, dropped=number)
        else:
            bench.complete_all("00", "01")
            bench.ask_all("00", "01")
    assert not bench.state.stopping


# -- the end ---------------------------------------------------------------------------------------------------


def test_a_stop_lets_granted_iterations_finish_then_makes_the_consensus() -> None:
    bench = started("00", "01", period=8, local_period=8)
    bench.ask("00")
    bench.say(StopRun("enough"))
    assert bench.ledger.tokens == 0 and not bench.got
    assert not bench.ask("00")
    bench.ask("01")
    round = bench.round("00", "01")
    assert round.final and bench.got["00"] == [Stop(3, round, "enough")]
    assert bench.codes[-1] == "round"
    bench.complete("00", 2)
    assert bench.waits(1) == "consensus"
    bench.complete("01", 2)
    assert bench.waits(2) == "ended.ordered"
    bench.leave("00")
    assert not bench.got  # nobody's generation ends by that
    assert not bench.state.over
    bench.leave("01")
    assert bench.state.over


def test_a_stop_while_a_round_is_open() -> None:
    bench = Bench("00", "01", period=8, local_period=8)
    bench.ask_all("00", "01")
    bench.complete("00", 1)
    bench.say(StopRun("enough"))
    bench.ask("00")
    bench.complete("01", 1)
    bench.ask("01")
    assert bench.round("00", "01").final and bench.ledger.count == 2


def test_stop_by_time() -> None:
    bench = started("00", seconds=10)
    bench.tick(4)
    assert bench.state.share(bench.now) == pytest.approx(0.4)
    assert not bench.state.stopping
    bench.tick(6)
    assert bench.codes == ["stopping.time_over"]
    assert bench.state.share(bench.now + 100) == 1.0
    bench.ask("00")
    assert bench.round("00").final


def test_progress_by_count() -> None:
    bench = started("00", iterations=10, period=4, local_period=4)
    bench.ask("00")
    assert bench.state.share(bench.now) == 0.1


def test_the_last_round_waits_a_while_for_who_pauses() -> None:
    bench = started("00", "01", patience_s=20)
    bench.pause("01")
    bench.coordinator.stop("enough")
    assert not bench.ask("00")
    assert bench.waits() == "away"
    bench.tick(19)
    assert bench.member("00").held
    bench.tick(1)
    assert bench.round("00").final
    bench.complete_all("00")
    assert bench.ask("01", did=False)["01"] == [Stop(2, None, "enough", late=True)]


def test_who_comes_back_in_time_takes_part_in_the_last_round() -> None:
    bench = started("00", "01")
    bench.pause("01")
    bench.coordinator.stop("enough")
    bench.ask("00")
    bench.ask("01", did=False)
    assert bench.round("00", "01").final


def test_who_comes_during_the_last_round_is_sent_home_after_it() -> None:
    bench = started("00")
    bench.join("01")
    bench.coordinator.stop("enough")
    bench.ask("00")
    assert bench.round("00").final
    assert not bench.ask("01")
    bench.complete_all("00")
    assert bench.got["01"] == [Stop(1, None, "enough", late=True)]


def test_newcomers_take_part_in_the_last_round() -> None:
    bench = started("00")
    bench.join("01")
    bench.ask("01")
    bench.coordinator.stop("enough")
    bench.ask("00")
    round = bench.round("00", "01")
    assert round.final and round.new == (1,) and round.source == 0


def test_a_last_round_that_fails_is_made_again() -> None:
    bench = started("00", "01", "02")
    bench.coordinator.stop("enough")
    bench.ask_all("02", "00", "01")
    first = bench.round("00", "01", "02")
    bench.complete("00", first.id)
    bench.leave("00")
    bench.fail("01", first.id)
    assert not bench.book.final
    bench.ask("01", same=True, dropped=first.id)
    bench.ask("02", same=True, dropped=first.id)
    second = bench.round("01", "02")
    assert second.final and second.generation.number == 2
    for place in ("01", "02"):
        bench.complete_all(place)
        bench.leave(place)
    assert bench.state.over


def test_the_run_ends_though_somebody_does_not_leave() -> None:
    bench = started("00", "01")
    bench.coordinator.stop("enough")
    bench.ask_all("00", "01")
    bench.complete_all("00", "01")
    bench.leave("00")
    bench.tick(LINGER_S)
    assert not bench.state.over
    bench.tick(1)
    assert bench.state.over


def test_what_is_waited_for_in_words() -> None:
    bench = started("00", "01", "02", "03", "04", "05", period=1, local_period=1)
    assert waits_for(bench.state, bench.now) == Why.NOBODY(joined=Why.STARTED(here=6, are="s are"))
    bench.ask("00")
    assert waits_for(bench.state, bench.now + 3.2) == (
        Why.BUSY(
            waited_s=3.2, who="node0/worker1, node0/worker2, node0/worker3, node0/worker4 and 1 more", open_round=""
        )
    )
    bench.ask_all("01", "02", "03", "04", "05")
    bench.complete("00", 2)
    bench.ask("00")
    assert waits_for(bench.state, bench.now + 4).endswith(golden.text("reasons.open_round"))


def test_workers_of_a_node_that_leaves_are_in_the_run_no_more() -> None:
    bench = started("00", "01", "10", period=8)
    bench.say(NodeLeave(1, 5, "node1 is to end"))
    assert waits_for(bench.state, bench.now) == Why.NOBODY(joined=Why.STARTED(here=2, are="s are"))
    bench.ask("10")
    assert bench.member("10").state is MemberState.ENDED
    assert waits_for(bench.state, bench.now) == Why.NOBODY(joined=Why.STARTED(here=2, are="s are"))


def test_members_go_to_whom_they_are_news() -> None:
    bench = started("00", "01", period=1, local_period=1)
    bench.ask_all("00", "01")
    known = bench.member("00")
    go = bench.got["00"][-1]
    assert abridged(go, known).round.generation.members == ()
    assert len(encode(abridged(go, known))) < len(encode(go))
    known.record.met = 0
    assert abridged(go, known) is go


def test_a_process_that_the_run_has_never_heard_of_is_told_so() -> None:
    bench = started("00")
    (answer,) = bench.say(Request("node7/worker7", 1, 1, 0, 0, 0, None))["77"]
    assert isinstance(answer, Evicted)


def test_rounds_of_two_groups_that_fail_together_are_one_failure() -> None:
    bench = started("00", "01", "10", "11", period=8, local_period=2)
    for place in ("00", "01", "10", "11"):
        while bench.member(place).state is MemberState.BUSY and bench.member(place).round is None:
            bench.ask(place)
    first, second = (bench.member(place).round.round.id for place in ("00", "10"))
    assert first != second
    bench.fail("00", first)
    bench.fail("10", second)
    assert bench.book.failures == 1
