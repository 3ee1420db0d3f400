"""Islands: workers of two processes with a sharded model, through the real servers and the launcher."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lsgd.protocol.events import WorkerJoined
from lsgd.server.reasons import Why
from tests import golden

from ..speed import SLOWNESS, scaled
from .running import LIGHT, LOADED_BY_WORKERS, SCRIPTS, Cluster, ForkServer, Process, free_port, until
from .test_algorithms import command

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp.py"

pytestmark = pytest.mark.slow


class Islands(Cluster):
    """A run of two workers on one node, each of so many processes."""

    worker_forks = ForkServer(
        *(*LOADED_BY_WORKERS, "torch.distributed.fsdp", "torch.distributed.tensor"),
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        **LIGHT,
    )

    def begin(self, *plan: str, workers: int = 2) -> Process:
        """Start the servers; return the global one."""
        server = self.start_global("--workers", str(workers), *plan)
        self.start_local()
        return server

    def island(
        self, index: int, *arguments: str, size: int = 2, program: Path = SCRIPTS / "island.py", **variables: str
    ) -> list[Process]:
        """Start the processes of a worker."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
        variables = {**place, **variables}
        script = str(program.with_suffix(""))
        return [self.worker(script, 0, index, *arguments, RANK=str(r), **variables) for r in range(size)]

    def train(self, *arguments: str, size: int = 2, workers: int = 2) -> list[dict[str, Any]]:
        """Run workers to the end; return their results."""
        started = [process for index in range(workers) for process in self.island(index, *arguments, size=size)]
        for process in started:
            assert process.succeeds().endswith("ended well\n")
        return [self.result(0, index) for index in range(workers)]

    def sent(self, worker: int, process: int) -> tuple[int, int]:
        """Return the bytes that a process has sent, and those of its part of the model."""
        _, sent, flat, _ = next(line for line in lines(self.folder, worker, process) if line[0] == "sent")
        return int(sent), int(flat)

    def calls(self, worker: int) -> int:
        """Return how often the processes of a worker have waited for each other."""
        (calls,) = {line[3] for p in (0, 1) for line in lines(self.folder, worker, p) if line[0] == "sent"}
        return int(calls)


def lines(folder: Path, worker: int, process: int) -> list[list[str]]:
    """Return what a process has written down."""
    return [line.split() for line in (folder / f"node0-worker{worker}.{process}.rounds").read_text().splitlines()]


def whole_rounds(folder: Path, worker: int) -> dict[int, tuple[str, ...]]:
    """Return the digests of a worker's parts after each round.

    All of its processes have committed the same rounds, and changed their parts in the same ones.
    """
    parts = [{int(line[0]): line[1] for line in lines(folder, worker, p) if line[0] != "sent"} for p in (0, 1)]
    assert list(parts[0]) == list(parts[1])
    digests = {number: (digest, parts[1][number]) for number, digest in parts[0].items()}
    for before, after in pairwise(digests.values()):
        assert (before[0] == after[0]) is (before[1] == after[1])
    return digests


def saved(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of the model that a worker has saved."""
    return {path.name: path.read_bytes() for path in (folder / "model").iterdir()}


def alike(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result that other shards of the same model are to have: norms of shards are sums in another order."""
    return result | {key: pytest.approx(result[key], rel=1e-5) for key in ("norms", "distance")}


def equal_after_each_round(folder: Path) -> int:
    """Return of how many rounds both workers hold the same model after each that both have committed."""
    one, other = whole_rounds(folder, 0), whole_rounds(folder, 1)
    both = one.keys() & other.keys()
    assert {number: one[number] for number in both} == {number: other[number] for number in both}
    return len(both)


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Islands]:
    made = Islands(tmp_path)
    yield made
    made.close()


@pytest.mark.first
def test_islands_train_and_are_equal_after_each_exchange(islands) -> None:
    islands.begin("--algorithm", "local", "--compression", "none", "--period", "4", "--iterations", "72")
    one, other = islands.train("--dim", "1", "--mean", "--common")
    for result in (one, other):
        assert sum(result["losses"][-10:]) < sum(result["losses"][:10]) / 2
    assert one["state"] == other["state"] and one["leader"] == other["leader"]
    assert one["shapes"]["0.weight"] == [7, 8] and one["shapes"]["6.bias"] == [1]
    assert one["iterations"] + other["iterations"] == 72
    for worker, result in enumerate((one, other)):  # the join, the first round and the last, and a pause are more
        assert islands.calls(worker) <= result["iterations"] + len(whole_rounds(islands.folder, worker)) + 12
    rounds = equal_after_each_round(islands.folder)
    assert rounds > 5
    for process in (0, 1):  # its part once a round, and at the beginning and the end the model, one way or the other
        (sent, flat), (other_sent, _) = islands.sent(0, process), islands.sent(1, process)
        assert 2 * rounds * flat <= sent + other_sent <= 2 * (rounds + 4) * (flat + 120)


PHASES = """
iterations = 24
[[phase]]
name = "local"
rescale = true
compression = "none"
period = 1  # so each makes one iteration a round
iterations = 8
[[phase]]
name = "leader"
period = 1
local_period = 1
election = "loss"
iterations = 8
[[phase]]
name = "diloco"
period = 1
fragments = 1
"""


@pytest.mark.parametrize(
    ("how", "offload", "workers"),
    [
        (("--adamw", "single"), (), 2),
        (("--compile", "--adamw", "foreach"), ("--offload", "true"), 1),
        (("--adamw", "fused"), (), 1),
    ],
    ids=["eager", "compiled", "fused"],
)
def test_an_island_computes_what_a_whole_worker_does_bit_by_bit(islands, tmp_path, how, offload, workers) -> None:
    # Fused AdamW rounds an element by its place in the tensor. Rescaled steps are longer, and magnify that.
    (tmp_path / "plan.toml").write_text(PHASES.replace("rescale = true", f"rescale = {'fused' not in how}".lower()))
    plan = ("--plan", str(tmp_path / "plan.toml"))
    islands.begin(*plan, *offload, workers=workers)
    sharded = islands.train("--alike", *how, workers=workers)
    (tmp_path / "whole").mkdir()
    whole_run = Islands(tmp_path / "whole")
    try:
        whole_run.begin(*plan, workers=workers)
        whole = whole_run.train("--alike", "--plain", *how[-2:], size=1, workers=workers)
    finally:
        whole_run.close()
    for one, other in zip(sharded, whole, strict=True):
        if "fused" in how:
            assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
            assert one["state"] == sharded[0]["state"]
        else:
            assert alike(one) == other
            assert saved(islands.folder) == saved(tmp_path / "whole")


def test_a_number_that_is_none_in_one_shard_counts_for_the_island(islands) -> None:
    islands.begin("--algorithm", "leader", "--period", "4", "--iterations", "56")
    one, other = islands.train("--do", "nan", "--at", "11")
    assert one["state"] == other["state"]
    assert all(whole_rounds(islands.folder, worker) for worker in (0, 1))
    output = islands.processes[-2].output  # the head's, whose own shard is finite
    assert golden.text("island.nonfinite_model") in output
    assert re.search(r"checkpoint of 56 iterations", output)


def test_a_shard_whose_exchange_is_cut_fails_the_round_of_all(islands) -> None:
    islands.begin("--algorithm", "local", "--compression", "none", "--period", "4", "--iterations", "56")
    one, other = islands.train("--common", "--do", "cut", "--at", "11")
    assert one["state"] == other["state"]
    assert equal_after_each_round(islands.folder) > 5
    assert golden.text("island.failed_elsewhere") in islands.processes[-2].output


def test_a_frozen_process_ends_its_island_and_the_others_go_on(islands) -> None:
    islands.begin("--algorithm", "local", "--period", "4", "--iterations", "56", "--lease-s", str(6 * SLOWNESS))
    others = islands.island(0)
    head, frozen = islands.island(1, "--do", "freeze", "--at", "11")
    for process in others:
        process.succeeds()
    assert head.wait() == 76
    assert golden.text("island.process_silent") in head.output
    frozen.send(signal.SIGKILL)
    assert frozen.wait() == -signal.SIGKILL
    assert islands.result(0, 0)["world_size"] == 1


def resume(folder: Path, name: str, plan: Sequence[str], *how: str, size: int) -> list[dict[str, Any]]:
    """Resume a run of 60 iterations from a folder's checkpoints, up to 84; return what both workers write."""
    (folder / name).mkdir()
    again = Islands(folder / name)
    try:
        server = again.begin(*plan, "--iterations", "84")
        for index in (0, 1):
            again.island(index, *how, size=size, LSGD_RESUME=str(folder / "checkpoints"))
        for process in again.processes:
            process.succeeds()
        assert Why.RESUMED(count=60, holders="node0/worker0, node0/worker1", takers="") in server.output
        return [again.result(0, 0), again.result(0, 1)]
    finally:
        again.close()


def test_an_island_goes_on_from_its_checkpoints_with_any_number_of_processes(islands, tmp_path) -> None:
    plan = ("--algorithm", "diloco", "--compression", "none", "--period", "1", "--fragments", "1")
    plan += ("--outer-lr", "0.5", "--outer-momentum", "0.5")
    islands.begin(*plan, "--iterations", "60", "--checkpoint-every", "5")
    before = islands.train("--alike")
    after = [
        resume(tmp_path, str(size), plan, *["--alike", "--plain"][: 1 + (size == 1)], size=size) for size in (4, 1)
    ]
    for old, new in zip(before, after[0], strict=True):
        assert new["iterations"] == 42 and new["state"] != old["state"]
        assert sum(new["losses"][:10]) < sum(old["losses"][:10]) / 2
    for one, other in zip(*after, strict=True):
        assert alike(other) == one


def test_a_newcomer_takes_the_model_while_the_other_islands_train(islands) -> None:
    """One of its processes has its part some rounds before the other."""
    islands.begin("--algorithm", "local", "--period", "4")
    for index in (0, 1):
        islands.island(index, "--slow-link", "--common")
    until(lambda: islands.status()["rounds_global"] > 2, "two islands train")
    late = islands.island(2, "--slow-link", "--common")
    path = islands.folder / "node0-worker2.1.rounds"
    until(lambda: path.exists() and path.read_text().count("\n") > 3, "the third trains")
    command(islands, "stop")
    for process in islands.processes:
        process.succeeds()
    assert re.search(golden.pattern("island.takes_model"), late[0].output)
    third, first = (whole_rounds(islands.folder, index) for index in (2, 0))
    both = third.keys() & first.keys()
    assert len(both) > 3 and all(third[number] == first[number] for number in both)


def test_processes_that_share_no_model_are_told_so(islands) -> None:
    islands.begin("--algorithm", "local", workers=1)
    (plain,) = islands.island(0, "--plain", size=1, LSGD_ISLAND="2")
    assert plain.wait() == 1
    assert golden.text("island.not_shared") in plain.output


def test_processes_that_make_different_calls_are_told_so(islands) -> None:
    islands.begin("--algorithm", "local", "--period", "4", workers=1)
    head, other = islands.island(0, "--do", "pause", "--at", "10", "--who", "node0/worker0")
    assert other.wait() == 1
    assert re.search(golden.pattern("island.other_call"), other.output)
    assert "LsgdError" in other.output and head.wait() == 1


def test_islands_that_all_leave_make_the_consensus(islands) -> None:
    islands.begin("--algorithm", "local", "--period", "64")
    one, other = islands.train("--leave-at", "12")
    assert one["state"] == other["state"] and one["distance"] is not None


def test_islands_and_whole_workers_do_not_mix(islands) -> None:
    islands.begin("--algorithm", "local", "--iterations", "20")
    islands.island(0)
    islands.tells(WorkerJoined, worker="node0/worker0")
    (plain,) = islands.island(1, "--plain", size=1)
    assert plain.wait() == 1
    assert "sharded as S(0) of (2,)" in plain.output


def test_the_example(islands) -> None:
    islands.begin("--algorithm", "local", "--period", "6", "--iterations", "24")
    processes = [process for index in (0, 1) for process in islands.island(index, program=EXAMPLE)]
    outputs = "".join(process.succeeds() for process in processes)
    losses = dict(re.findall(r"(node0/worker\d): loss ([\d.]+) on unseen text", outputs))
    assert losses["node0/worker0"] == losses["node0/worker1"]
    assert float(losses["node0/worker0"]) < 4.5  # from the logarithm of 256, which is 5.5
    with safe_open(islands.folder / "model.safetensors", "pt") as file:
        assert file.get_slice("layers.3.linear1.weight").get_shape() == [512, 128]


@pytest.mark.timeout(180)
def test_launch_starts_an_island_whole_again_when_a_process_dies_in_a_round(tmp_path) -> None:
    run = tmp_path / "run"
    launched = Islands.worker_forks.popen(
        [
            *(sys.executable, "-m", "lsgd.client", "launch", "--device", "cpu", "--run-dir", str(run)),
            *("--workers", "2", "--processes-per-worker", "2", "--", sys.executable, str(SCRIPTS / "island.py")),
            *("--common", "--do", "kill", "--at", "11", "--once", str(tmp_path / "done"), "--rest", "1"),
        ],
        env={
            **os.environ,
            "LSGD_ALGORITHM": "local",
            "LSGD_COMPRESSION": "none",
            "LSGD_PERIOD": "4",
            "LSGD_ITERATIONS": "96",
        }
        | {"LSGD_SYNC_OPTIMIZER": "true", "LSGD_CHECKPOINT_EVERY": "2", "OMP_NUM_THREADS": "1"},
    )
    output, _ = launched.communicate(scaled(150))
    assert launched.returncode == 0, output
    assert golden.text("island.processes_on_cpu") in output
    assert re.search(golden.pattern("island.killed"), output)
    assert re.search(golden.pattern("island.resumes_from"), output)
    one, other = (json.loads((run / f"node0-worker{worker}.json").read_text()) for worker in (0, 1))
    assert one["state"] == other["state"] and one["world_size"] == 2
    assert output.count("ended well") == 4
    assert equal_after_each_round(run) > 5
