"""Islands of replicas: workers of several processes in DistributedDataParallel, through the real servers."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import golden

from ..speed import scaled
from .running import SCRIPTS
from .test_island_methods import DELAYED, IN_EACH_STEP
from .test_islands import PHASES, Islands, alike, lines, resume, saved

pytestmark = pytest.mark.slow

LOCAL = ("--algorithm", "local", "--period", "4")


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Islands]:
    made = Islands(tmp_path)
    yield made
    made.close()


def rounds(folder: Path, worker: int, process: int) -> dict[int, str]:
    """Return the digests of a process's model after each round."""
    return {int(line[0]): line[1] for line in lines(folder, worker, process) if line[0] != "sent"}


def equal_after_each_round(folder: Path, *, workers: bool = True) -> int:
    """Return after how many rounds all processes of a worker hold equal models, and all workers if they are to."""
    found = [[rounds(folder, worker, process) for process in (0, 1)] for worker in (0, 1)]
    for one, other in found:
        assert one == other
    both = found[0][0].keys() & found[1][0].keys()
    assert not workers or {n: found[0][0][n] for n in both} == {n: found[1][0][n] for n in both}
    return len(both)


def test_replicas_learn_and_are_equal_after_each_round(islands) -> None:
    islands.begin(*LOCAL, "--compression", "levels2", "--iterations", "120")
    one, other = islands.train("--ddp", "--mean", "--common")
    for result in (one, other):
        assert sum(result["losses"][-10:]) < sum(result["losses"][:10]) / 2
    assert one["state"] == other["state"] and one["leader"] == other["leader"]
    assert one["iterations"] + other["iterations"] == 120
    assert equal_after_each_round(islands.folder) > 10
    for worker, result in enumerate((one, other)):
        assert islands.calls(worker) <= result["iterations"] + len(rounds(islands.folder, worker, 0)) + 14
    assert islands.sent(0, 0)[0] > 0 and islands.sent(0, 1)[0] == 0  # only the head exchanges
    assert "different models" not in "".join(process.output for process in islands.processes)
    with safe_open(islands.folder / "model" / "model-00001-of-00006.safetensors", "pt") as file:
        assert not any(name.startswith("module.") for name in file.keys())


@pytest.mark.parametrize(
    ("plan", "workers", "how"),
    [(PHASES, 2, ()), (IN_EACH_STEP, 2, ()), (DELAYED, 1, ("--compile",))],
    ids=["models", "in-each-step", "delayed-and-compiled"],
)
def test_replicas_compute_what_a_whole_worker_does_bit_by_bit(islands, tmp_path, plan, workers, how) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    islands.begin("--plan", str(tmp_path / "plan.toml"), workers=workers)
    replicas = islands.train("--alike", "--ddp", *how, workers=workers)
    (tmp_path / "whole").mkdir()
    whole_run = Islands(tmp_path / "whole")
    try:
        whole_run.begin("--plan", str(tmp_path / "plan.toml"), workers=workers)
        whole = whole_run.train("--alike", "--plain", *how, size=1, workers=workers)
    finally:
        whole_run.close()
    for one, other in zip(replicas, whole, strict=True):
        assert alike(one) == other
        assert saved(islands.folder) == saved(tmp_path / "whole")


@pytest.mark.parametrize(
    ("algorithm", "size", "how"),
    [("qsgd", 2, ("--accumulate", "2")), ("allreduce", 1, ())],
    ids=["qsgd", "alone-in-ddp"],
)
def test_gradients_are_exchanged_after_ddp_has_averaged_them(islands, algorithm, size, how) -> None:
    islands.begin("--algorithm", algorithm, "--iterations", "40")
    one, other = islands.train("--ddp", "--gradients", *how, size=size)
    assert one["state"] == other["state"] and sum(one["losses"][-10:]) < sum(one["losses"][:10])
    kept = [torch.load(islands.folder / f"node0-worker{w}.{p}.gradients") for w in (0, 1) for p in range(size)]
    assert len(kept[0]) == 20
    for steps in zip(*kept, strict=True):
        own = torch.stack([torch.cat([x.view(-1) for x in before]) for before, _ in steps])
        after = [torch.cat([x.view(-1) for x in got]) for _, got in steps]
        assert all(torch.equal(after[0], each) for each in after)
        unit = (own.amax() - own.amin()) / 255
        assert (after[0] - own.mean(0)).abs().amax() <= 2 * unit


def test_a_number_that_is_none_in_one_process_counts_for_the_island(islands) -> None:
    islands.begin("--algorithm", "bytegrad", "--iterations", "40")
    one, other = islands.train("--ddp", "--do", "spoil", "--at", "11")
    assert one["state"] == other["state"]
    equal_after_each_round(islands.folder, workers=False)
    assert golden.text("island.skip_step") in islands.processes[-2].output


def test_replicas_that_compute_otherwise_get_the_model_of_the_head(islands) -> None:
    islands.begin(*LOCAL, "--iterations", "56")
    one, other = islands.train("--ddp", "--do", "drift", "--at", "11")
    assert one["state"] == other["state"]
    assert equal_after_each_round(islands.folder, workers=False) > 5
    assert re.search(golden.pattern("island.other_models"), islands.processes[-1].output)


def test_replicas_that_have_trained_apart_are_told_so(islands) -> None:
    islands.begin(*LOCAL, workers=1)
    for process in islands.island(0, "--ddp", "--do", "part", "--at", "11", "--who", "node0/worker0"):
        assert process.wait() == 1
        assert re.search(golden.pattern("island.trained_apart"), process.output), process.output
        assert golden.text("island.only_if_called") in process.output


def test_an_exchange_of_the_head_that_is_cut_fails_the_round_of_all(islands) -> None:
    islands.begin(*LOCAL, "--iterations", "56")
    one, other = islands.train("--ddp", "--common", "--do", "cut", "--at", "11")
    assert one["state"] == other["state"]
    assert equal_after_each_round(islands.folder) > 5
    assert "failed" in islands.processes[-2].output


def test_replicas_with_different_models_are_refused(islands) -> None:
    islands.begin(*LOCAL, workers=1)
    for process in islands.island(0, "--ddp", "--unlike"):
        assert process.wait() == 1
        assert golden.text("island.other_parameter") in process.output


def test_replicas_and_a_worker_of_one_process_share_a_run(islands) -> None:
    islands.begin(*LOCAL, "--iterations", "56")
    island, alone = islands.island(0, "--ddp"), islands.island(1, "--plain", size=1)
    for process in (*island, *alone):
        process.succeeds()
    one, other = (islands.result(0, index) for index in (0, 1))
    assert one["state"] == other["state"] and one["iterations"] + other["iterations"] == 56
    assert rounds(islands.folder, 0, 0) == rounds(islands.folder, 0, 1)


def test_replicas_go_on_from_their_checkpoints_in_any_form(islands, tmp_path) -> None:
    plan = ("--algorithm", "diloco", "--compression", "none", "--period", "1", "--fragments", "1")
    plan += ("--outer-lr", "0.5", "--outer-momentum", "0.5")
    islands.begin(*plan, "--iterations", "60", "--checkpoint-every", "5")
    before = islands.train("--alike", "--ddp")
    written = {path.name for path in (tmp_path / "checkpoints").glob("*/60/*")}
    assert written == {"node0-worker0.safetensors", "node0-worker1.safetensors"}
    forms = [(1, "--plain"), (3, "--ddp"), (2, "--alike")]
    after = [resume(tmp_path, str(number), plan, "--alike", how, size=size) for number, (size, how) in enumerate(forms)]
    for old, new in zip(before, after[0], strict=True):
        assert new["iterations"] == 42 and new["state"] != old["state"]
    for resumed in after[1:]:
        assert resumed[0]["losses"] == pytest.approx(after[0][0]["losses"], rel=1e-3)


@pytest.mark.timeout(180)
def test_launch_starts_replicas_again_when_one_is_killed(tmp_path) -> None:
    run = tmp_path / "run"
    launched = Islands.worker_forks.popen(
        [
            *(sys.executable, "-m", "lsgd.client", "launch", "--device", "cpu", "--run-dir", str(run)),
            *("--workers", "2", "--processes-per-worker", "2", "--", sys.executable, str(SCRIPTS / "island.py")),
            *("--ddp", "--common", "--do", "kill", "--at", "11", "--once", str(tmp_path / "done"), "--rest", "1"),
        ],
        env={**os.environ, "LSGD_ALGORITHM": "local", "LSGD_PERIOD": "4", "LSGD_ITERATIONS": "96"}
        | {"LSGD_SYNC_OPTIMIZER": "true", "LSGD_CHECKPOINT_EVERY": "2", "OMP_NUM_THREADS": "1"},
    )
    output, _ = launched.communicate(scaled(150))
    assert launched.returncode == 0, output
    assert re.search(golden.pattern("island.killed"), output)
    assert re.search(golden.pattern("island.resumes_from_whole"), output)
    one, other = (json.loads((run / f"node0-worker{worker}.json").read_text()) for worker in (0, 1))
    assert one["state"] == other["state"] and one["world_size"] == 2
    assert output.count("ended well") == 4
    assert equal_after_each_round(run) > 5


def test_a_process_that_dies_in_a_round_ends_its_island(islands) -> None:
    islands.begin("--algorithm", "bytegrad", "--iterations", "40")
    others = islands.island(0, "--ddp")
    head, killed = islands.island(1, "--ddp", "--do", "die", "--at", "10")
    for process in others:
        process.succeeds()
    assert killed.wait() == -signal.SIGKILL and head.wait() == 76
    assert islands.result(0, 0)["world_size"] == 1
