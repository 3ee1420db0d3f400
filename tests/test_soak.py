"""The parts of benchmarks/soak that decide: what goes wrong and when, and what of the result breaks a promise."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from benchmarks.soak.schedule import (
    APART_S,
    NOT_TOGETHER,
    SECONDS,
    SIZES,
    WEIGHTS,
    Fault,
    blocked,
    chosen,
    schedule,
)
from benchmarks.soak.verdict import Outcome, Record, fault_table, story, verdict

NODES = ["node0", "node1", "node2"]


def test_a_seed_gives_one_schedule() -> None:
    first, again, other = (list(islice(schedule(seed, WEIGHTS, 3, 2), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_every_fault_comes_as_often_as_its_weight_says() -> None:
    bursts = list(islice(schedule(3, WEIGHTS, 3, 2), 400))
    faults = [fault for burst in bursts for fault in burst.faults]
    bags = len(faults) // sum(WEIGHTS.values())
    count = Counter(fault.what for fault in faults)
    assert all(bags * n <= count[what] <= (bags + 1) * n for what, n in WEIGHTS.items())
    assert {len(burst.faults) for burst in bursts} == set(SIZES)


def test_what_a_burst_is_like() -> None:
    for burst in islice(schedule(4, WEIGHTS, 3, 2), 400):
        whats = {fault.what for fault in burst.faults}
        assert len(whats) == len(burst.faults)
        assert not any(pair <= whats for pair in NOT_TOGETHER)
        delays = [fault.delay_s for fault in burst.faults]
        assert delays[0] == 0 and delays == sorted(delays) and delays[-1] <= APART_S
        for fault in burst.faults:
            lasts = SECONDS[0] <= fault.seconds <= SECONDS[1]
            assert lasts != fault.what.startswith("kill")


def test_one_kind_of_fault_alone_never_overlaps_itself() -> None:
    bursts = list(islice(schedule(0, chosen(["fill"]), 3, 2), 20))
    assert [len(burst.faults) for burst in bursts] == [1] * 20


def test_targets_are_those_that_there_are() -> None:
    targets: dict[str, set[str]] = {}
    for burst in islice(schedule(5, WEIGHTS, 3, 2), 1000):
        for fault in burst.faults:
            targets.setdefault(fault.what, set()).add(fault.target)
    assert targets["kill worker"] == {f"{node}/worker{index}" for node in NODES for index in (0, 1)}
    assert targets["kill global server"] == {"global"}
    assert targets["lose node 0"] == {"node0"}
    assert targets["cut pair"] == {"node0 - node1", "node0 - node2", "node1 - node2"}
    assert targets["cut one way"] == {f"{a} -> {b}" for a in NODES for b in [*NODES, "all"] if a != b}
    assert targets["fill disk"] == set(NODES)


@pytest.mark.parametrize(
    ("what", "target", "lost"),
    [
        (
            "cut node",
            "node1",
            {("node0", "node1"), ("node1", "node0"), ("node1", "node2"), ("node2", "node1")},
        ),
        ("cut one way", "node1 -> node2", {("node1", "node2")}),
        ("cut one way", "node0 -> all", {("node0", "node1"), ("node0", "node2")}),
        ("cut pair", "node0 - node2", {("node0", "node2"), ("node2", "node0")}),
        ("kill worker", "node0/worker1", set()),
    ],
)
def test_which_packets_a_cut_loses(what: str, target: str, lost: set[tuple[str, str]]) -> None:
    assert blocked(Fault(what, target, 0, 1), NODES) == lost


def test_faults_are_chosen_by_kind_or_name() -> None:
    assert chosen(["all"]) == tuple(WEIGHTS)
    assert chosen(["none"]) == ()
    assert chosen(["junk", "kill worker", "junk idle"]) == ("junk garbage", "junk idle", "kill worker")
    with pytest.raises(ValueError, match="'kil' is no fault; there are all, none, and: kill worker, "):
        chosen(["kil"])


def record(**changes: Any) -> Record:
    """Return what a run of two workers has left in which all was well."""
    results = [{"worker": f"node0/worker{i}", "digest": "ab", "accuracy": 0.98, "age": 50.0} for i in (0, 1)]
    kept: dict[str, Any] = {
        "limit": 100,
        "codes": {"node0": 0},
        "output": {"node0": "[global] 00:00:01 the run is over: all 100 iterations are done; 100 iterations\n"},
        "runs": ["r"],
        "made": 101,
        "results": results,
        "descriptors": {"node0/global": [40, 55, 41, 47, 60, 42]},
    }
    return Record(2, **{**kept, **changes})


def worker(**changes: Any) -> dict[str, Any]:
    return {"worker": "node0/worker9", "digest": "ab", "accuracy": 0.98, "age": 50.0, **changes}


def test_a_run_in_which_all_was_well_breaks_no_promise() -> None:
    assert verdict(record(), 0.99) == []
    assert verdict(record(results=[worker()], late=1), 0.99) == []


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({"trouble": ["it did not recover"]}, "it did not recover"),
        ({"codes": {"node0": 1}}, "the launcher of node0 has ended with exit code 1"),
        ({"codes": {"node0": None}}, "the launcher of node0 has not ended"),
        ({"runs": ["r", "s"]}, "a new run began: r, s"),
        ({"limit": 101}, "the run has counted 100 iterations, and was to make 101"),
        ({"output": {}}, "the run has counted None iterations, and was to make 100"),
        ({"made": 99}, "the workers have made 99 steps, fewer than the run has counted"),
        ({"results": [worker()]}, "1 of 2 workers came to the end"),
        (
            {"results": [worker(), worker(digest="cd")]},
            "the workers end with different models: node0/worker9 ab, node0/worker9 cd",
        ),
        (
            {"results": [worker(accuracy=0.9799)] * 2},
            "the accuracy is 0.9799, that of an undisturbed run 0.9900",
        ),
        (
            {"results": [worker(accuracy=float("nan"))] * 2},
            "the accuracy is nan, that of an undisturbed run 0.9900",
        ),
        (
            {"results": [worker(age=44)] * 2},
            "the final model has 44 steps of a worker in it, and 50 were made: a model was thrown away",
        ),
        ({"left": ["node0: file x.tmp"]}, "node0: file x.tmp"),
        (
            {"descriptors": {"node0/global": [40, 41, 45, 49, 60, 52]}},
            "the descriptors of node0/global have grown from 40 to 52",
        ),
    ],
)
def test_a_broken_promise_is_said(changes: dict[str, Any], promise: str) -> None:
    assert verdict(record(**changes), 0.99) == [promise]


def test_a_crash_is_told_from_a_kill() -> None:
    kept = record().output["node0"]
    killed = "[launch] node0/worker1 was killed by SIGKILL (out of memory?); restarting it in 1 s\n"
    assert verdict(record(output={"node0": kept + killed}), 0.99) == []
    crashed = killed.replace("SIGKILL", "SIGABRT")
    (promise,) = verdict(record(output={"node0": kept + crashed}), 0.99)
    assert promise == "a process crashed: node0/worker1 was killed by SIGABRT"


def test_times_are_those_of_faults_that_came_alone() -> None:
    kill, cut = ("kill worker", "node0/worker1", 0.0), ("cut node", "node1", 9.0)
    outcomes = [
        Outcome(1, (kill,), 2.0, 3.0),
        Outcome(2, (kill, cut), 9.0, 9.0),
        Outcome(3, (kill,), 4.0, None),
    ]
    assert fault_table(outcomes).splitlines()[2:] == [
        "| cut node | 1 | 0 |  |  |",
        "| kill worker | 3 | 2 | 3.0 (4.0) | 3.0 (3.0) |",
    ]


def test_the_story_has_the_last_lines_of_each_process_and_no_token() -> None:
    lines = [f"[global] line {number}" for number in range(20)]
    told = story(record(output={"node0": "\n".join([*lines, "[launch] x with: LSGD_TOKEN=lsgd1:abc lsgd"])}), ["boom"])
    assert told.startswith("The time line:\nboom\n")
    assert "[global] line 19" in told and "[global] line 8\n" in told and "[global] line 7\n" not in told
    assert "LSGD_TOKEN=... lsgd" in told and "abc" not in told
