"""What islands exchange besides models between steps: gradients, gossip, delayed models; and steps without servers."""

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests import golden

from .test_islands import Islands, alike, equal_after_each_round, whole_rounds

pytestmark = pytest.mark.slow


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Islands]:
    made = Islands(tmp_path)
    yield made
    made.close()


IN_EACH_STEP = """
iterations = 24
[[phase]]
name = "allreduce"
iterations = 8
[[phase]]
name = "decentralized"
iterations = 8
[[phase]]
name = "low_precision_decentralized"
codec = "none"
rounding = "nearest"
hierarchical = false
"""
"""Each of two workers makes one iteration a round."""

DELAYED = """
iterations = 24
[[phase]]
name = "diloco"
period = 4
delay = 3
iterations = 12
[[phase]]
name = "leader"
period = 4
local_period = 4
delay = 2
"""
"""Several workers would not always make the same numbers of steps between two rounds."""


@pytest.mark.parametrize(
    ("plan", "workers", "how"),
    [(IN_EACH_STEP, 2, ()), (IN_EACH_STEP, 2, ("--copied",)), (DELAYED, 1, ())],
    ids=["in-each-step", "copied", "delayed"],
)
def test_an_island_computes_what_a_whole_worker_does_bit_by_bit(islands, tmp_path, plan, workers, how) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    islands.begin("--plan", str(tmp_path / "plan.toml"), workers=workers)
    sharded = islands.train("--alike", *how, workers=workers)
    (tmp_path / "whole").mkdir()
    whole_run = Islands(tmp_path / "whole")
    try:
        whole_run.begin("--plan", str(tmp_path / "plan.toml"), workers=workers)
        whole = whole_run.train("--alike", "--plain", size=1, workers=workers)
    finally:
        whole_run.close()
    for one, other in zip(sharded, whole, strict=True):
        assert alike(one) == other


def test_gradients_become_their_mean_within_what_the_codec_rounds(islands) -> None:
    islands.begin("--algorithm", "qsgd", "--iterations", "40")
    one, other = islands.train("--gradients", "--accumulate", "2", "--bf16")
    assert one["state"] == other["state"] and sum(one["losses"][-10:]) < sum(one["losses"][:10])
    assert islands.calls(0) <= 2 * one["iterations"] + 12
    assert equal_after_each_round(islands.folder) > 10
    for process in (0, 1):
        first, second = (torch.load(islands.folder / f"node0-worker{w}.{process}.gradients") for w in (0, 1))
        for (own, mean), (others, same) in zip(first, second, strict=True):
            own, others, mean, same = (torch.cat([x.view(-1) for x in part]) for part in (own, others, mean, same))
            assert torch.equal(mean, same) and not torch.equal(own, others)
            both = torch.stack([own, others, torch.zeros_like(own)])  # the padding of a block is zero
            unit = (both.amax() - both.amin()) / 255
            assert (mean - (own / 2 + others / 2)).abs().amax() <= 2 * 1.01 * unit


def test_a_gradient_that_is_none_in_one_shard_skips_the_step_of_all(islands) -> None:
    islands.begin(
        "--algorithm", "bytegrad", "--hierarchical", "false", "--error-feedback", "true", "--iterations", "40"
    )
    one, other = islands.train("--do", "spoil", "--at", "15")
    assert one["state"] == other["state"] and one["iterations"] == other["iterations"] == 20
    assert equal_after_each_round(islands.folder) > 10
    unchanged = [before == after for before, after in pairwise(whole_rounds(islands.folder, 0).values())]
    assert unchanged.count(True) == 1
    for process in islands.processes[-4:]:
        assert process.output.count(golden.text("island.nonfinite_gradient")) == 1


def test_a_model_that_is_not_finite_in_one_shard_is_left_out_of_gossip(islands) -> None:
    islands.begin("--algorithm", "low_precision_decentralized", "--interval", "4", "--iterations", "80")
    one, other = islands.train("--do", "nan", "--at", "15")
    assert one["state"] == other["state"] and sum(one["losses"][-10:]) < sum(one["losses"][:10])
    assert (
        golden.text("island.nonfinite_model") in islands.processes[-2].output
    )  # the head's, whose own shard is finite


def test_gossip_that_is_cut_in_one_shard_changes_none(islands) -> None:
    plan = ("decentralized", "--hierarchical", "false", "--interval", "4", "--buffers", "keep")
    islands.begin("--algorithm", *plan, "--iterations", "80")
    one, other = islands.train("--do", "cut", "--at", "15")
    assert one["state"] == other["state"]
    for head in (islands.processes[-4], islands.processes[-2]):
        failed = golden.text("island.failed_as_before")
        assert head.output.count(failed) == 1


def test_a_delayed_fragment_is_taken_over_by_all_processes_or_none(islands) -> None:
    plan = "sparse --hierarchical false --period 8 --fragments 2 --delay 2 --buffers keep".split()
    islands.begin("--algorithm", *plan, "--iterations", "120")
    one, other = islands.train("--common", "--do", "cut", "--at", "15")
    assert one["state"] == other["state"] and sum(one["losses"][-10:]) < sum(one["losses"][:10])
    assert equal_after_each_round(islands.folder) > 10
    assert golden.text("island.failed_elsewhere") in islands.processes[-2].output


def test_a_process_that_dies_in_the_round_of_a_backward_pass_ends_its_island(islands) -> None:
    islands.begin("--algorithm", "bytegrad", "--hierarchical", "false", "--iterations", "40")
    others = islands.island(0)
    head, killed = islands.island(1, "--do", "die", "--at", "10")
    for process in others:
        assert golden.text("island.gradients_again") in process.succeeds()
    assert killed.wait() == -signal.SIGKILL and head.wait() == 76
    assert islands.result(0, 0)["world_size"] == 1
    assert len(whole_rounds(islands.folder, 0)) > 20


def test_a_process_that_fails_waits_for_no_vote(islands) -> None:
    """A model is due after the step in which it fails, and the head is in a collective of FSDP's."""
    islands.begin("--algorithm", "local", "--period", "4", "--delay", "2", "--iterations", "40", workers=1)
    head, failed = islands.island(0, "--alike", "--do", "raise", "--at", "5", "--who", "node0/worker0")
    assert failed.wait() == 1 and "RuntimeError: as asked for" in failed.output
    assert head.wait() != 0
