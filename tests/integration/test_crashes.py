"""Processes that are killed, frozen or stuck in the middle of a run, and what becomes of the run."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from lsgd.errors import EvictedError
from lsgd.protocol.events import GenerationBegan, RoundFailed, RoundOrdered, WorkerChanged
from lsgd.protocol.messages import ChangeSettings, Status
from lsgd.server.reasons import Why
from tests import golden

from ..speed import SLOWNESS
from .running import Cluster, Process, free_port, until

EVERY = ("--period", "12", "--local-period", "4")

RESTART = ("--lease-s", "60")
"""For workers whose local server is started again: they are silent until then, and a busy machine takes its time."""


def steps(cluster: Cluster) -> int:
    """Return how many steps all workers have written down, those that died included."""
    return sum(len(path.read_text().split()) for path in cluster.folder.glob("*.steps"))


def kept(cluster: Cluster) -> int:
    """Return the same without those that the run's model does not have."""
    return steps(cluster) - cluster.lost


def kill(*processes: Process) -> None:
    """Kill processes, all before the first is seen to be gone."""
    for process in processes:
        assert process.poll() is None
        process.send(signal.SIGKILL)
    for process in processes:
        assert process.wait() == -signal.SIGKILL


def trains(cluster: Cluster, iterations: int = 20) -> int:
    """Return the count, when so many more iterations have been made."""
    before = cluster.status()["count"]
    return until(lambda: (n := cluster.status()["count"]) >= before + iterations and n, "the run goes on")


def finish(cluster: Cluster, server: Process, *others: Process) -> int:
    """Let the run end a little later, exactly at a limit, and everybody with it; return that."""
    workers = [process for process in others if process.name.startswith("worker")]
    for worker in workers:  # or they may be beyond the limit before it is set
        worker.send(signal.SIGSTOP)
    limit = cluster.status()["count"] + 60
    assert isinstance(cluster.ask(ChangeSettings({"iterations": str(limit)})), Status)
    for worker in workers:
        worker.send(signal.SIGCONT)
    for process in (*others, server):
        process.succeeds()
    server.says(f"{Why.ENDED(reason=Why.ALL_MADE(limit=limit))}; {limit} iterations")
    return limit


class JournaledRun:
    """A global server with a journal, which can be killed and started again on its port."""

    def __init__(self, cluster: Cluster, *arguments: str) -> None:
        self.cluster = cluster
        self._arguments = ("--journal", str(cluster.folder / "journal.sqlite"), *arguments)
        self.server = cluster.start_global(*self._arguments, listen=f"tcp://127.0.0.1:{free_port()}")
        self.run = cluster.status()["run"]

    def start_again(self) -> None:
        self.server = self.cluster.start_global(*self._arguments, listen=self.cluster.address)
        assert re.search(golden.pattern("crashes.continues", run=self.run), self.server.output)


@pytest.mark.first
def test_a_global_server_killed_in_the_middle_of_a_run(cluster) -> None:
    run = JournaledRun(cluster, "--workers", "3", *EVERY, "--results", str(cluster.folder))
    locals_ = [cluster.start_local(node) for node in (0, 1)]
    workers = [cluster.worker("crash", *place, "--sleep", 0.02) for place in ((0, 0), (0, 1), (1, 0))]
    trains(cluster)
    rounds = 0
    for _ in range(3):  # twenty times: tests/server/test_served_runs.py
        kill(run.server)
        run.start_again()
        trains(cluster)
        status = cluster.status()
        assert (status["run"], status["generation"]) == (run.run, 1)
        assert status["rounds_local"] + status["rounds_global"] > rounds
        rounds = status["rounds_local"] + status["rounds_global"]
    assert finish(cluster, run.server, *workers, *locals_) == kept(cluster)
    results = [cluster.result(*place) for place in ((0, 0), (0, 1), (1, 0))]
    assert sum(result["iterations"] for result in results) == steps(cluster)
    assert len({result["model"] for result in results}) == 1
    assert [result["failed"] for result in results] == [[], [], []]
    written = [json.loads(line) for line in (cluster.folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["round"] for each in written] == list(range(1, len(written) + 1))
    result = json.loads((cluster.folder / "result.json").read_text())
    assert len(written) == result["rounds_local"] + result["rounds_global"] > rounds
    assert {each["run"] for each in written} == {result["run"]} == {run.run}


def test_a_local_server_killed_and_started_again_at_once(cluster) -> None:
    server, locals_ = cluster.start("--workers", "3", *RESTART, *EVERY, nodes=2)
    workers = [cluster.worker("crash", *place, "--sleep", 0.02) for place in ((0, 0), (1, 0), (1, 1))]
    trains(cluster)
    kill(locals_[1])
    again = cluster.start_local(1)
    trains(cluster)
    assert " leaves: " not in server.output, "at most they have missed a round"
    assert finish(cluster, server, *workers, locals_[0], again) == kept(cluster)
    assert again.says(golden.text("crashes.here_already"))


def test_workers_wait_for_their_local_server_and_say_so(cluster) -> None:
    server, (local,) = cluster.start("--workers", "2", *RESTART, *EVERY)
    workers = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    trains(cluster)
    kill(local)
    workers[0].says(golden.pattern("crashes.waits_for_iteration"))
    made = steps(cluster)
    again = cluster.start_local()
    trains(cluster)
    assert steps(cluster) > made
    assert finish(cluster, server, *workers, again) == kept(cluster)


def test_workers_whose_servers_stay_away_end_with_a_code_of_their_own(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--server-timeout-s", "6", *EVERY, nodes=2)
    workers = [cluster.worker("crash", node, 0, "--sleep", 0.02) for node in (0, 1)]
    trains(cluster)
    kill(server, locals_[1])
    assert [worker.wait() for worker in workers] == [75, 75]
    ends = r"worker0 ends with exit code 75: node\d/worker0 waits for its next iteration for \d+ s, and the "
    again = re.escape(f"lsgd-server --global --listen {cluster.address}")
    assert re.search(rf"{ends}global server at .* silent for \d+ s; restart it .*: {again}", workers[0].output)
    again = re.escape(f"lsgd-server --local --listen {cluster.local_address(1)}")
    assert re.search(rf"{ends}local server at .* silent for \d+ s; start it again: {again}", workers[1].output)


def test_both_servers_killed_together(cluster) -> None:
    run = JournaledRun(cluster, "--workers", "2", *RESTART, *EVERY)
    local = cluster.start_local()
    workers = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    for _ in range(2):
        trains(cluster)
        kill(run.server, local)
        local = cluster.start_local()
        run.start_again()
    trains(cluster)
    assert finish(cluster, run.server, *workers, local) == kept(cluster)


def test_a_global_server_killed_at_the_end_ends_the_run_when_it_is_back(cluster) -> None:
    run = JournaledRun(cluster, "--workers", "2", "--iterations", "60", *EVERY)
    local = cluster.start_local()
    go = cluster.folder / "go"
    workers = [cluster.worker("crash", 0, index, "--dwell-in-round", 4, "--until", go) for index in (0, 1)]
    run.server.says("round 4 makes the consensus")
    workers[0].says("dwells in round 4")
    kill(run.server)
    run.start_again()
    go.touch()
    for process in (*workers, local, run.server):
        process.succeeds()
    assert steps(cluster) == 60
    assert f"{Why.ENDED(reason=Why.ALL_MADE(limit=60))}; 60 iterations" in run.server.output
    assert Why.ENDED(reason=Why.ALL_MADE(limit=60)) in local.output
    assert len({cluster.result(0, index)["model"] for index in (0, 1)}) == 1


def state(process: Process) -> str:
    """Return the letter for the state of a process: T is stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("fault", [pytest.param("killed", marks=pytest.mark.first), "frozen", "stuck"])
def test_a_worker_that_falls_silent_is_evicted_and_only_another_process_takes_its_place(cluster, fault) -> None:
    lease = () if fault == "killed" else ("--lease-s", str(6 * SLOWNESS))
    server, locals_ = cluster.start("--workers", "3", *lease, *EVERY)
    survivors = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    go = cluster.folder / "go"
    if fault == "stuck":
        os.mkfifo(go)
    waits_at = "--stick-at" if fault == "stuck" else "--stall-at"
    victim = cluster.worker("crash", 0, 2, "--sleep", 0.02, waits_at, 3, "--until", go)
    victim.says("^holds the GIL$|^stalls$")  # in an iteration, and in no round
    if fault != "stuck":
        victim.send(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    code = "failed" if fault == "killed" else "silent"
    if fault != "killed":
        cluster.tells(WorkerChanged, worker="node0/worker2", state="away", code=code)
    cluster.tells(WorkerChanged, worker="node0/worker2", state="left", code=code)
    if fault == "frozen":
        assert state(victim) == "T"
    if fault == "stuck":
        assert "lets the GIL go" not in victim.output
    assert len(cluster.generation(2).members) == 2
    if fault == "killed":
        assert cluster.tells(GenerationBegan, code=f"member_left.{code}").generation.number == 2
    trains(cluster)

    if fault == "killed":
        assert victim.wait() == -signal.SIGKILL
    else:
        victim.send(signal.SIGCONT)
        go.open("w").close()
        assert victim.wait() == EvictedError.exit_code
        assert re.search(golden.pattern("crashes.evicted"), victim.output)
        assert cluster.status()["generation"] == 2
    again = cluster.worker("crash", 0, 2, "--sleep", 0.02)
    assert len(cluster.generation(3).members) == 3
    trains(cluster)
    count = finish(cluster, server, *survivors, again, *locals_)
    # The step that the fault destroyed or hid; and the next one, if it was granted ahead and the process came to it.
    assert count <= kept(cluster) <= count + 2
    assert len({cluster.result(0, index)["model"] for index in range(3)}) == 1


def test_a_worker_that_computes_for_too_long_is_evicted_and_comes_back(cluster) -> None:
    server, locals_ = cluster.start("--workers", "2", "--patience-s", "1", *EVERY)
    other = cluster.worker("crash", 0, 0, "--sleep", 0.02)
    go = cluster.folder / "go"
    slow = cluster.worker("crash", 0, 1, "--sleep", 0.02, "--stall-at", 10, "--until", go)
    slow.says("^stalls$")
    until(lambda: cluster.status()["members"][1]["state"] == "straggler", "the others have waited for it")
    evicted = [what for what in cluster.told() if isinstance(what, GenerationBegan)][-1]
    assert (evicted.code, evicted.generation.members) == ("evicted", ("node0/worker0",))
    slow.says(f"generation {evicted.generation.number - 1} is over: {evicted.reason}")
    trains(cluster)
    assert "goes on" not in slow.output
    member = cluster.status()["members"][1]
    assert member["state"] == "straggler", "and not gone: it is heard of, whatever it computes"
    go.touch()
    assert len(cluster.generation(evicted.generation.number + 1).members) == 2
    trains(cluster)
    assert finish(cluster, server, other, slow, *locals_) == kept(cluster)
    assert len({cluster.result(0, index)["model"] for index in range(2)}) == 1
    assert [cluster.result(0, index)["failed"] for index in range(2)] == [[], []]


def test_a_leader_killed_in_the_middle_of_its_own_broadcast(cluster) -> None:
    server, locals_ = cluster.start("--workers", "3", "--election", "loss", *EVERY)
    survivors = [cluster.worker("crash", 0, index, "--sleep", 0.02) for index in (0, 1)]
    victim = cluster.worker("crash", 0, 2, "--sleep", 0.02, "--lead", "--die-in-round", 3)
    assert victim.wait() == -signal.SIGKILL
    (round_id,) = map(int, re.findall(r"dies in round (\d+)", victim.output))
    assert cluster.tells(RoundOrdered, round=round_id).worker == "node0/worker2"
    assert cluster.tells(RoundFailed, round=round_id)
    assert len(cluster.generation(2).members) == 2
    trains(cluster)
    count = finish(cluster, server, *survivors, *locals_)
    # It died between two steps; the word of the last one, sent as it entered the round, may have died with it.
    assert count <= kept(cluster) <= count + 1
    for index, process in enumerate(survivors):
        failed = cluster.result(0, index)["failed"]
        assert [round_id, 1, True] in failed  # the model was as before, bit for bit
        assert all(same for _, _, same in failed)
        assert re.search(golden.pattern("crashes.asks_again", round_id=round_id), process.output)
        assert "generation 2: rank" in process.output
    assert len({cluster.result(0, index)["model"] for index in (0, 1)}) == 1
