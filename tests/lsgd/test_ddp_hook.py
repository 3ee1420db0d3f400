"""The communication hook in real processes under torchrun, without any server of ours."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import lsgd.ddp_hook
from lsgd.ddp_hook import QuantizedState, _RankGroup
from lsgd.errors import ConfigError, ExchangeError

from ..integration.running import FORKS
from ..speed import scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("ddp_training.py")


def torchrun(processes, *hooks, **variables):
    """Run the script under torchrun, with these variables; return what came out of each hook."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    done = FORKS.popen([*command, str(SCRIPT), *hooks], env=environ)
    output, _ = done.communicate(scaled(220))
    assert done.returncode == 0, output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {result["hook"]: result for result in found}


@pytest.fixture(scope="module")
def trained():
    """What came out of each hook in two processes."""
    return torchrun(2, "none", "quantized", "feedback", "stochastic", "overflow")


@pytest.mark.parametrize("hook", ["quantized", "feedback", "stochastic"])
def test_same_bits_and_the_loss_of_ddp(trained, hook):
    plain, quantized = trained["none"], trained[hook]
    assert len(set(quantized["digests"])) == 1
    assert quantized["digests"] != plain["digests"]  # it did something
    assert quantized["loss"] == pytest.approx(plain["loss"], rel=0.002)
    assert quantized["residuals"] >= 2 if hook == "feedback" else quantized["residuals"] == 0


def test_an_overflow_on_one_rank_skips_one_step_on_all(trained):
    plain, overflowed = trained["none"], trained["overflow"]
    assert len(set(overflowed["digests"])) == 1
    assert overflowed["scale"] == 4.0  # halved once
    assert overflowed["loss"] == pytest.approx(plain["loss"], rel=0.05)  # with one step less


def test_an_odd_number_of_processes():
    assert len(set(torchrun(3, "feedback", STEPS="10")["feedback"]["digests"])) == 1


def test_groups_that_share_no_rank_do_not_mix():
    first, second, third, fourth = torchrun(4, *["halves"] * 3, STEPS="10")["halves"]["digests"]
    assert first == second != third == fourth


def test_without_torch_distributed():
    with pytest.raises(ConfigError, match="init_process_group"):
        QuantizedState()


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_after_a_failed_exchange_nothing_is_sent_that_would_be_taken_for_something_else(alone):
    begun = []

    def exchange(name, error=None):
        begun.append(name)
        yield
        if error is not None:
            raise error
        yield
        begun.append("too much")

    state, gradient = QuantizedState(), torch.ones(3)
    futures = [torch.futures.Future() for _ in range(4)]
    buckets = ["first", "failing", "third", "later"]
    for name, future in zip(buckets, futures, strict=True):
        error = ExchangeError("the link broke") if name == "failing" else None
        state.submit(exchange(name, error), gradient, future, is_last=False)
    for future in futures:
        with pytest.raises(ExchangeError, match="the link broke"):
            future.wait()
    assert begun == ["first", "failing", "third"]


def test_each_future_gets_its_gradient_once_the_last_bucket_is_there(alone):
    state, gradients = QuantizedState(), [torch.full((3,), float(i)) for i in range(4)]
    futures = [torch.futures.Future() for _ in gradients]
    for index, (gradient, future) in enumerate(zip(gradients, futures, strict=True)):
        state.submit(state.average(gradient, index, 0), gradient, future, is_last=index == 3)
    assert [future.wait() is gradient for future, gradient in zip(futures, gradients, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    ("backends", "batch"),
    [("cuda:nccl", "cuda:0"), ("cpu:gloo,cuda:nccl", "cuda:0"), ("cpu:gloo,cuda:gloo", None), ("cpu:gloo", None)],
)
def test_nccl_sends_from_the_gpu_also_as_one_backend_of_several(alone, monkeypatch, backends, batch):
    """The group's one name is "undefined" if torch chooses the backends, and so no help."""
    begun = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch, "empty_like", lambda x, device: x)
    monkeypatch.setattr(lsgd.ddp_hook, "begin_exchange", lambda *_, batch=None: begun.append(batch))
    gradient = SimpleNamespace(device=torch.device("cuda", 0), is_cpu=False, cpu=lambda: None)
    _RankGroup(dist.group.WORLD)._begin_exchange({1: gradient}, {1: gradient})
    assert begun == [None if batch is None else torch.device(batch)]
