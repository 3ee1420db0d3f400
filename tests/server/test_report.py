"""The report of a run: its states, its members, and a history that fits in a message."""

import json
import math
from itertools import pairwise

from lsgd.algorithms.local import LocalSettings
from lsgd.protocol.messages import MAX_NBYTES, StopRun
from lsgd.server.reasons import Why
from lsgd.server.report import MAX_LEADERS, report

from .helpers import Bench, make_plan


def read(bench: Bench) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(report(bench.state, bench.now), parse_constant=refuse)


def test_a_run_from_its_beginning_to_its_end() -> None:
    bench = Bench("00", workers=2, iterations=100, period=4, local_period=4)
    waiting = read(bench)
    assert (waiting["state"], waiting["reason"]) == ("waiting", Why.JOINING(here=1, wanted=2, missing=""))
    assert (waiting["code"], waiting["events"]) == ("joining", {"joins": 1})
    assert (waiting["generation"], waiting["seconds"], waiting["progress"]) == (0, 0.0, 0.0)

    bench.join("10")
    bench.ask_all("00", "10")
    bench.complete_all("00", "10")
    bench.now += 2.0
    bench.ask("00", loss=0.5)
    running = read(bench)
    assert (running["state"], running["count"], running["rounds_global"]) == ("running", 1, 1)
    assert (running["seconds"], running["progress"], running["nodes"]) == (2.0, 0.01, 2)
    assert [m["worker"] for m in running["members"]] == ["node0/worker0", "node1/worker0"]
    member = running["members"][0]
    assert (member["done"], member["loss"], member["rank"], member["state"]) == (1, 0.5, 0, "live")
    assert running["leaders"][0]["scope"] == "global"
    assert (running["algorithm"], running["iterations"], running["run"]) == ("leader", 100, "run")

    bench.say(StopRun("enough"))
    stopping = read(bench)
    assert (stopping["state"], stopping["reason"], stopping["code"]) == ("stopping", "enough", "ordered")
    bench.ask("00")
    assert [m["state"] for m in read(bench)["members"]] == ["held", "live"]
    bench.ask("10")
    assert read(bench)["state"] == "stopping"  # the last round may take a while, and fail
    bench.complete_all("00", "10")
    assert read(bench)["state"] == "over"


def test_who_left_is_there_with_the_reason_and_events_are_counted() -> None:
    bench = Bench("00", "01", period=4, local_period=4)
    bench.ask_all("00", "01")
    bench.leave("01", failed=True, reason="ValueError: no such file")
    here, gone = read(bench)["members"]
    assert (here["reason"], here["code"]) == ("", "")
    assert (gone["state"], gone["reason"], gone["code"]) == (
        "left",
        Why.FAILED(error="ValueError: no such file"),
        "failed",
    )
    events = read(bench)["events"]
    assert (events["joins"], events["leaves.failed"], events["round_fails.gone.failed"]) == (2, 1, 1)


def test_a_loss_that_is_no_number_is_still_json() -> None:
    bench = Bench("00", period=4, local_period=4)
    bench.ask("00", loss=math.nan)
    bench.complete_all("00")
    bench.ask("00", loss=math.inf)
    assert read(bench)["members"][0]["loss"] is None
    assert read(bench)["leaders"][0]["losses"] == {"node0/worker0": None}


def test_losses_whose_sum_is_beyond_all_numbers_are_told_all_the_same() -> None:
    bench = Bench("00", "01", plan=make_plan(algorithm=LocalSettings(), workers=2))
    bench.ask_all("00", "01", w00=1.7e308, w01=1.7e308)
    assert any("no finite loss" in note for note in bench.notes)
    assert read(bench)["loss"] is None
    assert read(bench)["leaders"][0]["losses"] == {"node0/worker0": 1.7e308, "node0/worker1": 1.7e308}


def test_a_long_history_is_thinned_out_and_fits_in_a_message() -> None:
    places = [f"{node}{index}" for node in range(8) for index in range(9)]
    bench = Bench(*places, period=4, local_period=4)
    bench.ask_all(*places)
    entry = bench.book.elections[0]
    bench.book.elections.clear()
    losses = {f"node{i}/worker{i}": 0.1 + i / 7 for i in range(64)}
    for number in range(3500):
        bench.book.elections.append(type(entry)(number, "global", -1, "w", number, 1.0, losses))
    text = report(bench.state, bench.now)
    leaders = json.loads(text)["leaders"]
    assert len(text) < MAX_NBYTES
    assert len(leaders) <= MAX_LEADERS
    assert leaders[-1]["round"] == 3499
    assert {b["round"] - a["round"] for a, b in pairwise(leaders)} == {4}
    assert leaders[-1]["losses"] == {}
