"""Whole runs in real processes, with real servers."""

import re
import signal
from itertools import pairwise

import pytest
import torch

from lsgd.client import Worker
from lsgd.client.control import joining
from lsgd.errors import JoinError
from lsgd.protocol.events import WorkerJoined
from lsgd.protocol.messages import PROTOCOL, ChangeSettings, Status
from lsgd.server.reasons import Why
from tests import golden

from .running import Cluster, Process, until
from .test_crashes import finish


def steps(cluster: Cluster) -> dict[str, int]:
    """Return how many steps each worker has written to its own file."""
    files = cluster.folder.glob("*.steps")
    return {path.stem.replace("-", "/"): len(path.read_text().split()) for path in files}


def every(period: int) -> tuple[str, ...]:
    """Return the flags for a global round every so many iterations, and no local ones."""
    return ("--period", str(period), "--local-period", str(period))


def end_well(*processes: Process) -> None:
    for process in processes:
        process.succeeds()


def same_models(*results: dict) -> bool:
    return all(result["model"] == results[0]["model"] for result in results)


def test_two_nodes_train_to_one_consensus_and_every_step_counts(cluster) -> None:
    server, locals_ = cluster.start(
        "--workers", "4", "--iterations", "600", "--period", "32", "--local-period", "8", nodes=2
    )
    places = [(node, index) for node in range(2) for index in range(2)]
    workers = [cluster.worker("train", *place) for place in places]
    end_well(*workers, *locals_, server)

    results = [cluster.result(*place) for place in places]
    assert [r["rank"] for r in results] == [0, 1, 2, 3]
    assert same_models(*results)
    assert all(r["stopped"] and r["progress"] == 1.0 and r["loss"] < 1.0 for r in results)
    assert len({r["distance"] for r in results}) == 1 and results[0]["distance"] > 0
    assert steps(cluster) == {f"node{n}/worker{i}": cluster.result(n, i)["iterations"] for n, i in places}
    assert sum(steps(cluster).values()) == 600
    assert f"{Why.ENDED(reason=Why.ALL_MADE(limit=600))}; 600 iterations" in server.output

    # The learning rate follows the progress of the whole run, whatever share of it a worker makes.
    for result in results:
        rates = result["rates"]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > 0.0195 and rates[-1] < 0.0035
    assert results[0]["status"]["count"] == 600
    assert "127.0.0.1" in workers[0].says("generation 1: rank 0 of 4.*")[0]


@pytest.mark.parametrize("flag", ["--fail-at", "--break-at"])
def test_a_worker_that_fails_or_breaks_gives_its_grant_back(cluster, flag) -> None:
    server, locals_ = cluster.start("--workers", "2", "--iterations", "300", *every(16))
    good, bad = cluster.worker("train"), cluster.worker("train", 0, 1, flag, 20)
    end_well(good, *locals_, server)
    if flag == "--fail-at":
        assert bad.wait() == 1
        assert "RuntimeError: the data is bad" in bad.output
        failed = Why.FAILED(error="RuntimeError: the data is bad, in line ")
        assert re.search(rf"node0/worker1 leaves: {failed}\d+ of train.py \(20 iterations\)", server.output)
    else:
        bad.succeeds()
        assert Why.LEAVES(worker="node0/worker1", reason="its training loop ended", done=19) in server.output
    assert steps(cluster)["node0/worker1"] == (20 if flag == "--fail-at" else 19)
    assert sum(steps(cluster).values()) - cluster.lost == 300
    assert "300 iterations" in server.output


def test_every_kind_of_parameter_and_loop_at_once(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--iterations", "40", *every(4), "--lease-s", "60")
    end_well(cluster.worker("odd"), cluster.worker("odd", 0, 1), *locals_, server)
    results = [torch.load(cluster.folder / f"node0-worker{i}.pt", weights_only=True) for i in (0, 1)]
    one, two = (result["state"] for result in results)
    assert all(torch.equal(one[name], two[name]) for name in one if one[name].is_floating_point())
    for result in results:
        state, leader = result["state"], result["leader"]
        assert result["tied"] and result["channels_last"]
        assert torch.equal(state["encode.weight"], state["decode.weight"])
        assert torch.equal(leader["encode.weight"], leader["decode.weight"])
        assert {str(x.dtype) for x in state.values()} >= {"torch.bfloat16", "torch.float64", "torch.float32"}
        assert all(torch.equal(x, state[name]) for name, x in result["copy"].items())
        assert all(x.dtype == state[name].dtype for name, x in leader.items())
        assert torch.equal(leader["frozen.weight"], state["frozen.weight"])
        assert not torch.equal(leader["encode.weight"], state["encode.weight"])
        # The last micro-batch is drawn when the run has ended already.
        assert result["micro_batches"] in (2 * result["iterations"], 2 * result["iterations"] + 1)
        assert result["distance"] == results[0]["distance"] > 0
    assert all(torch.equal(x, results[1]["leader"][n]) for n, x in results[0]["leader"].items() if "tracked" not in n)
    assert sum(result["iterations"] for result in results) == 40
    assert (cluster.folder / "submodule.pt").stat().st_size < 4_000


def test_a_slow_worker_makes_fewer_iterations_and_nobody_waits_for_it_between_rounds(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--iterations", "180", *every(30))
    behind = ("--sleep", 0.3, "--behind", cluster.folder / "node0-worker0.steps", 10)
    end_well(cluster.worker("train", 0, 0, "--sleep", 0.02), cluster.worker("train", 0, 1, *behind))
    end_well(*locals_, server)
    fast, slow = cluster.result(0, 0), cluster.result(0, 1)
    assert fast["iterations"] + slow["iterations"] == 180
    assert fast["iterations"] > 2 * slow["iterations"]
    # It waits for the slow one where there is a round, which is at 180 / 60 of its turns and at the ends.
    between = [sum(a < t < b for t in fast["times"]) for a, b in pairwise(slow["times"])]
    assert sum(steps >= 2 for steps in between) > 0.7 * len(between)


@pytest.mark.parametrize("lookahead", [0, 40])
def test_iterations_asked_for_ahead_count_once_and_go_back_to_who_has_time(cluster, lookahead) -> None:
    flags = ("--lookahead", str(lookahead))
    server, locals_ = cluster.start("--workers", "2", "--iterations", "400", *every(100), *flags)
    fast = cluster.worker("train", 0, 0, "--pause-at", 30)
    behind = ("--sleep", 0.3, "--behind", cluster.folder / "node0-worker0.steps", 20)
    slow = cluster.worker("train", 0, 1, *behind)
    end_well(fast, slow, *locals_, server)
    made = [cluster.result(0, index)["iterations"] for index in (0, 1)]
    assert sum(made) == sum(steps(cluster).values()) == 400
    # The slow one is first granted a quarter of its equal share, 24 of 198, and gives most of that back.
    assert made[1] < 40
    assert cluster.result(0, 0)["status"]["count"] == 400
    assert not re.search("evicted|failed", server.output)


def test_one_group_trains_on_while_another_waits_for_its_local_round(cluster) -> None:
    server, locals_ = cluster.start(
        "--workers", "4", "--iterations", "700", "--period", "128", "--local-period", "8", nodes=2
    )
    go = cluster.folder / "go"
    sleeper = cluster.worker("train", 0, 1, "--nap-at", 30, "--until", go)
    others = [cluster.worker("train", *place, "--sleep", 0.01) for place in ((0, 0), (1, 0), (1, 1))]
    sleeper.says("naps")
    before = steps(cluster)
    free = ("node1/worker0", "node1/worker1")
    until(lambda: all(steps(cluster)[name] > before[name] + 20 for name in free), "the other group trains on")
    go.touch()
    end_well(sleeper, *others, *locals_, server)
    ((began, ended),) = cluster.result(0, 1)["naps"]
    during = {
        place: sum(began < t < ended for t in cluster.result(*place)["times"]) for place in ((0, 0), (1, 0), (1, 1))
    }
    assert during[0, 0] <= 16  # what its group's queue still had
    assert during[1, 0] > 20 and during[1, 1] > 20
    assert {"0", "1"} == set(re.findall(golden.pattern("runs.local_round"), server.output))  # not each has a line
    assert cluster.result(0, 0)["status"]["rounds_local"] > 20


def test_a_worker_that_pauses_misses_rounds_and_comes_back(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", *every(8))
    go = cluster.folder / "go"
    away = cluster.worker("train", 0, 1, "--sleep", 0.02, "--pause-at", 21, "--until", go)
    stays = cluster.worker("train", 0, 0, "--sleep", 0.02)
    away.says("naps")
    before = steps(cluster)["node0/worker0"]
    until(lambda: steps(cluster)["node0/worker0"] > before + 3 * 8, "the other one trains on")
    go.touch()
    assert len(cluster.generation(3).members) == 2
    limit = finish(cluster, server, away, stays, *locals_)
    one, two = cluster.result(0, 0), cluster.result(0, 1)
    ((began, ended),) = two["naps"]
    assert sum(began < t < ended for t in one["times"]) > 3 * 8  # several rounds of its own
    generations = re.findall(r"generation (\d+): (\d) workers? on 1 node", server.output)
    assert generations[:3] == [("1", "2"), ("2", "1"), ("3", "2")]
    assert two["iterations"] > 21 and two["times"][21] > ended
    assert same_models(one, two) and one["stopped"] and two["stopped"]
    assert sum(steps(cluster).values()) - cluster.lost == limit


def test_a_newcomer_takes_part_until_it_is_interrupted(cluster) -> None:
    server, locals_ = cluster.start("--workers", "1", *every(8), "--exchange-timeout-s", "10")
    first = cluster.worker("train", 0, 0)
    until(lambda: cluster.status()["count"] > 50, "the run is under way")
    newcomer = cluster.worker("train", 0, 1)
    newcomer.says("generation 2: rank 1 of 2")
    until(lambda: steps(cluster).get("node0/worker1", 0) > 20, "it trains too")
    newcomer.send(signal.SIGINT)
    assert newcomer.wait() == -signal.SIGINT
    assert len(cluster.generation(3).members) == 1
    server.send(signal.SIGTERM)
    end_well(first, *locals_, server)
    assert golden.text("runs.interrupted") in server.output
    made = steps(cluster)
    done = {m["worker"]: m["done"] for m in cluster.result(0, 0)["status"]["members"]}
    assert done["node0/worker0"] == made["node0/worker0"]
    # It may have been interrupted between its step and the line in its file.
    assert 0 <= done["node0/worker1"] - made["node0/worker1"] <= 1
    assert f"; {sum(done.values()) - cluster.lost} iterations" in server.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_global_server_ends_the_run_with_a_consensus(cluster, number) -> None:
    server, locals_ = cluster.start("--workers", "2", *every(8))
    workers = [cluster.worker("train", 0, index) for index in (0, 1)]
    until(lambda: cluster.status()["count"] > 50, "the run is under way")
    server.send(number)
    end_well(*workers, *locals_, server)
    one, two = cluster.result(0, 0), cluster.result(0, 1)
    assert same_models(one, two) and one["stopped"] and two["stopped"]
    count = int(server.says(golden.pattern("runs.over_by_signal", signal=number.name))[1])
    assert count == sum(steps(cluster).values()) > 50


def test_a_signal_to_a_local_server_takes_its_node_out_and_the_others_go_on(cluster) -> None:
    server, (stays, leaves) = cluster.start("--workers", "2", "--period", "16", "--local-period", "8", nodes=2)
    one, two = cluster.worker("train", 0, 0), cluster.worker("train", 1, 0)
    until(lambda: cluster.status()["count"] > 50, "the run is under way")
    leaves.send(signal.SIGTERM)
    end_well(two, leaves)
    assert cluster.result(1, 0)["stopped"]
    assert golden.text("runs.local_sigterm") in two.output
    count = cluster.status()["count"]
    until(lambda: cluster.status()["count"] > count + 50, "the other one goes on")
    again = cluster.start_local(1)  # at once, under the same index
    again.says(golden.pattern("runs.connected"))
    server.send(signal.SIGTERM)
    end_well(one, stays, server, again)
    assert cluster.result(0, 0)["iterations"] > cluster.result(1, 0)["iterations"]
    assert f"; {sum(steps(cluster).values()) - cluster.lost} iterations" in server.output
    assert "node1/worker0 leaves" in server.output


def test_a_run_by_time_with_a_worker_that_no_one_should_follow(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--seconds", "3600", *every(16))
    workers = cluster.worker("train", 0, 0, "--nan"), cluster.worker("train", 0, 1)
    passed = until(lambda: (s := cluster.status())["rounds_global"] > 3 and s, "it makes rounds")["seconds"]
    seconds = round(3 * passed + 5, 1)
    assert isinstance(cluster.ask(ChangeSettings({"seconds": str(seconds)})), Status)
    end_well(*workers, *locals_, server)
    result = cluster.result(0, 0)
    assert Why.ENDED(reason=Why.TIME_OVER(seconds=seconds)) in server.output
    assert result["status"]["seconds"] >= seconds
    leaders = result["status"]["leaders"]
    assert len(leaders) > 3
    assert {entry["worker"] for entry in leaders[1:]} == {"node0/worker1"}
    assert {entry["losses"]["node0/worker0"] for entry in leaders} == {None}
    assert result["rates"][-1] < 0.01  # progress goes by time here
    assert sum(steps(cluster).values()) - cluster.lost == result["status"]["count"]


def test_whoever_does_not_fit_is_refused_and_told_why(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--iterations", "100000", *every(16), nodes=2)
    cluster.worker("train")
    cluster.tells(WorkerJoined, worker="node0/worker0")
    version = torch.__version__.partition("+")[0]
    major, minor, patch = version.split(".")
    strangers = {
        f"torch {major}.{int(minor) + 1}.0 on node1, {version} on node0; install the same release": (
            *("--torch-version", f"{major}.{int(minor) + 1}.0"),
        ),
        r"its model differs from node0/worker0's: 2\d\d parameters .* against \d+ parameters": (
            "--width",
            20,
        ),
        f"a worker of node1 speaks version 99 .*, and the local server of node1 on .* speaks {PROTOCOL} .*; install": (
            *("--protocol", 99),
        ),
    }
    refused = [cluster.worker("train", 1, 0, *flags) for flags in strangers.values()]
    for process, reason in zip(refused, strangers, strict=True):
        assert process.wait() == 1
        assert re.search(f"JoinError: .*{reason}", process.output), process.output

    patched = cluster.worker("train", 1, 1, "--torch-version", f"{major}.{minor}.{int(patch) + 1}")
    patched.says(
        golden.pattern(
            "runs.joins_with_other_versions", major=major, minor=minor, patch=int(patch) + 1, version=version
        )
    )
    until(lambda: cluster.status()["count"] > 0, "they train")
    server.send(signal.SIGTERM)
    end_well(patched, *locals_, server)


def test_two_workers_with_the_same_data_are_an_error_that_names_both_on_both(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", *every(16))
    workers = [cluster.worker("train", 0, index, "--same-data") for index in (0, 1)]
    told = golden.pattern("runs.exit_77")
    for worker in workers:
        assert worker.wait() == 77
        assert golden.text("data.not_sharded") in worker.output
        assert re.search(told, worker.output) and "Traceback" not in worker.output, worker.output
    assert server.wait() == 1
    assert re.search(golden.pattern("runs.both_draw"), server.output)
    end_well(*locals_)


def test_without_servers_a_join_fails_in_5_s_with_the_line_to_type(cluster, monkeypatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    assert joining.FIND_WITHIN_S < 5
    monkeypatch.setattr(joining, "FIND_WITHIN_S", 0.5)
    with pytest.raises(JoinError, match=golden.pattern("runs.start_servers")):
        Worker.join(model, optimizer)
    monkeypatch.undo()
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))

    cluster.address = "tcp://127.0.0.1:9"
    local = cluster.start_local(0)

    def refusal() -> str:
        with pytest.raises(JoinError) as raised:
            Worker.join(model, optimizer, timeout_s=1.0)
        return str(raised.value)

    line = golden.text("runs.no_answer_yet")
    until(lambda: line in refusal(), "it says what to type")
    local.send(signal.SIGTERM)
    local.succeeds()


def test_a_join_says_for_whom_it_waits(cluster, monkeypatch) -> None:
    server, _ = cluster.start("--workers", "3", "--join-timeout-s", "2")
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    model = torch.nn.Linear(2, 1)
    with pytest.raises(JoinError, match=golden.pattern("runs.too_few")):
        Worker.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert server.poll() is None
