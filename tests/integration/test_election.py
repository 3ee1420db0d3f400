"""Elections by a probe, through real servers."""

import pytest
import torch
from torch import nn

from lsgd.client import Worker
from lsgd.client.iteration.reports import PROBES_A_PERIOD
from lsgd.errors import ConfigError
from tests import golden

BY_PROBE = ("--election", "probe")
BATCH = torch.ones(4, 6)


def test_the_probe_elects_who_has_learned_and_not_who_reports_least(cluster) -> None:
    flags = ("--workers", "2", "--period", "4", "--local-period", "4", "--iterations", "80")
    server, locals_ = cluster.start(*flags, *BY_PROBE)
    for process in [*(cluster.worker("probe", 0, index) for index in range(2)), *locals_, server]:
        process.succeeds()
    leaders = [line.split(": leader ")[1] for line in server.output.splitlines() if ": leader " in line]
    assert len(leaders) > 8
    assert all(leader.startswith("node0/worker1 (loss ") for leader in leaders[1:]), leaders
    losses = [float(leader.split("(loss ")[1].partition(")")[0]) for leader in leaders[1:]]
    assert losses == sorted(losses, reverse=True) and losses[0] < 50, "of the probe, and falling"


def joined(cluster, monkeypatch, *arguments: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Start the servers of a run of this process, and return what it is to train."""
    cluster.start("--workers", "1", *arguments)
    monkeypatch.setenv("LSGD_LOCAL", cluster.local_address(0))
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    model[1].eval()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_a_probe_changes_nothing_and_is_evaluated_eight_times_a_period(cluster, monkeypatch) -> None:
    flags = ("--period", "16", "--local-period", "16", "--iterations", "64", "--lookahead", "0")
    model, optimizer = joined(cluster, monkeypatch, *flags, *BY_PROBE)
    seen = []

    def probe() -> torch.Tensor:
        assert not torch.is_grad_enabled() and not any(module.training for module in model.modules())
        seen.append(model(BATCH).square().mean())
        return seen[-1]

    with Worker.join(model, optimizer) as worker:
        worker.probe(probe)
        while worker.begin_step():
            assert [module.training for module in model] == [True, False, True, True] and torch.is_grad_enabled()
            optimizer.zero_grad()
            model(BATCH).square().mean().backward()
            optimizer.step()
            worker.end_step()  # every one asks the servers, without lookahead
        assert worker.status()["members"][0]["loss"] == pytest.approx(float(seen[-1]))
    assert len(seen) == 64 / 16 * PROBES_A_PERIOD
    assert int(model[1].num_batches_tracked) == 0


@pytest.mark.parametrize("later", [False, True], ids=["at once", "in a later phase"])
def test_a_worker_without_a_probe_is_told_how_to_register_one(cluster, monkeypatch, tmp_path, later) -> None:
    plan = tmp_path / "plan.toml"
    tables = ['name = "local"\niterations = 8', 'name = "leader"\nelection = "probe"\niterations = 0']
    plan.write_text("[[phase]]\n" + "\n[[phase]]\n".join(tables) + "\n")
    model, optimizer = joined(cluster, monkeypatch, *(("--plan", str(plan)) if later else BY_PROBE))
    with pytest.raises(ConfigError, match=golden.pattern("exchange.probe_first")):
        with Worker.join(model, optimizer) as worker:
            worker.begin_step()
