"""Leader SGD against its float64 reference, and what it promises: equal copies, atomic rounds, restorable state."""

import numpy as np
import pytest
import torch

from lsgd.algorithms.leader import LeaderSettings
from lsgd.errors import ExchangeError
from lsgd.testing.simulation import SimulatedWorker, simulate
from tests import golden

from .reference import Exchange, LeaderReference, Problem
from .training import TorchWorker, make_round, relative_error

PULLS = {"pull_global": 0.2, "pull_local": 0.15, "proximal_global": 0.3, "proximal_local": 0.4}
STEPS = 100


def train(settings, node_sizes, *, sgd, speeds=None, dtypes=(torch.float32,) * 2):
    """Run the reference, then lsgd's workers on the same script; return the reference and the workers."""
    problem = Problem(sum(node_sizes))
    reference = LeaderReference(
        problem,
        node_sizes,
        period=settings.period,
        local_period=settings.local_period,
        c1=settings.pull_local,
        c2=settings.pull_global,
        p1=settings.proximal_local,
        p2=settings.proximal_global,
        speeds=speeds,
        **sgd,
    )
    reference.run(STEPS)
    ids = {id(exchange): number for number, exchange in enumerate(reference.rounds, start=1)}

    def member(group):
        worker = TorchWorker(settings, group, problem, dtypes=dtypes, **sgd)
        worker.begin(make_round(node_sizes))
        for exchange in reference.script[group.rank]:
            worker.iterate(exchange and make_round(node_sizes, ids[id(exchange)], exchange=exchange))
        return worker

    return reference, simulate(node_sizes, member)


SCHEDULES = {
    "two nodes": ([3, 3], 32, 8),
    "unequal nodes": ([1, 3, 2], 24, 4),
    "one node": ([6], 32, 8),
    "equal periods": ([3, 3], 16, 16),
    "period 1": ([2, 1], 1, 1),
    "alone": ([1], 8, 4),
}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_follows_the_reference(schedule, momentum):
    node_sizes, period, local_period = SCHEDULES[schedule]
    settings = LeaderSettings(period=period, local_period=local_period, **PULLS)
    reference, workers = train(settings, node_sizes, sgd={"lr": 0.02, "momentum": momentum})

    errors = [relative_error(w.model, r.x) for w, r in zip(workers, reference.workers, strict=True)]
    assert max(errors) < 1e-5
    z = np.concatenate([z.numpy() for z in workers[0].algorithm.global_leader])
    assert relative_error(z, reference.z_global) < 1e-5
    # The comparison means something: models differ between workers, and leaders changed.
    if len(workers) > 1:
        assert relative_error(workers[0].model, workers[1].model) > 1e-4
        assert len({exchange.leader for exchange in reference.rounds}) > 1


@pytest.mark.parametrize("left_out", PULLS)
def test_every_pull_matters(left_out):
    """Each strength on its own reaches the result: the reference with one left out is far from lsgd with it."""
    node_sizes, sgd = [3, 3], {"lr": 0.02, "momentum": 0.9}
    settings = LeaderSettings(period=32, local_period=8, **PULLS)
    without = LeaderSettings(period=32, local_period=8, **{**PULLS, left_out: 0.0})
    _, with_all = train(settings, node_sizes, sgd=sgd)
    reference, workers = train(without, node_sizes, sgd=sgd)
    errors = [relative_error(w.model, r.x) for w, r in zip(workers, reference.workers, strict=True)]
    assert max(errors) < 1e-5
    assert relative_error(with_all[0].model, reference.workers[0].x) > 1e-3


def test_workers_of_different_speeds():
    """A fast worker makes more iterations; rounds count the iterations of all together."""
    settings = LeaderSettings(period=16, local_period=4, **PULLS)
    speeds = [1, 1, 4, 1, 2, 1]
    reference, workers = train(settings, [3, 3], sgd={"lr": 0.02, "momentum": 0.9}, speeds=speeds)
    steps = [worker.steps for worker in workers]
    assert 0 <= sum(steps) - 6 * STEPS < 6 and steps[2] > 3 * steps[0]
    assert reference.global_rounds == pytest.approx(STEPS / 16, abs=1)
    errors = [relative_error(w.model, r.x) for w, r in zip(workers, reference.workers, strict=True)]
    assert max(errors) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_all_hold_the_same_leaders(dtype):
    node_sizes = [3, 2]
    settings = LeaderSettings(period=16, local_period=4, **PULLS)
    _, workers = train(settings, node_sizes, sgd={"lr": 0.02, "momentum": 0.0}, dtypes=(dtype, torch.float32))
    for worker in workers[1:]:
        assert all(map(torch.equal, worker.algorithm.global_leader, workers[0].algorithm.global_leader))
    for first, *others in (workers[:3], workers[3:]):
        for worker in others:
            assert all(map(torch.equal, worker.algorithm.local_leader, first.algorithm.local_leader))
    assert workers[0].algorithm.global_leader[0].dtype is dtype
    assert not all(map(torch.equal, workers[0].algorithm.local_leader, workers[3].algorithm.local_leader))


@pytest.mark.parametrize("calls", range(4))
def test_a_failed_round_has_not_happened(calls):
    """One member fails at its n-th collective: whoever raised holds the model and the leaders as they were."""
    node_sizes, problem = [2, 2], Problem(4)
    settings = LeaderSettings(period=16, local_period=4, **PULLS)
    exchange = Exchange(None, 2, (1, 2), 1)
    raised, changed = [], []

    def member(group):
        worker = TorchWorker(settings, group, problem)
        worker.begin(make_round(node_sizes))
        for _ in range(3):
            worker.iterate(None)
        before = {"parameters": worker.parameters, **worker.algorithm.state_dict()}
        before = {name: [x.clone() for x in tensors] for name, tensors in before.items()}
        link = Failing(group, calls) if group.rank == 3 else group
        try:
            worker.algorithm.before_forward(worker.parameters, link, make_round(node_sizes, exchange=exchange)).apply()
        except ExchangeError:
            raised.append(group.rank)
            now = {"parameters": worker.parameters, **worker.algorithm.state_dict()}
            changed.extend(name for name in now if not all(map(torch.equal, now[name], before[name])))
            raise

    with pytest.raises(ExchangeError, match="cable pulled"):
        simulate(node_sizes, member, timeout_s=5)
    assert 3 in raised and not changed


class Failing:
    """A group (and its subgroups) whose broadcasts work ``calls`` times, then raise."""

    def __init__(self, group, calls):
        self._group, self._left = group, calls if isinstance(calls, list) else [calls]

    def __getattr__(self, name):
        return getattr(self._group, name)

    @property
    def node(self):
        return Failing(self._group.node, self._left)

    def broadcast(self, tensor, source):
        if self._left[0] == 0:
            raise ExchangeError("cable pulled")
        self._left[0] -= 1
        self._group.broadcast(tensor, source)


def test_state_dict_round_trip():
    """A restored worker goes on bit for bit like one that begins a generation without having been interrupted."""
    node_sizes, problem = [2, 2], Problem(4)
    settings = LeaderSettings(period=8, local_period=4, **PULLS)
    rounds = [Exchange(0, 1, (1, -1), 1), Exchange(None, 2, (0, 2), 1), Exchange(None, 1, (1, 3), 2)]

    def member(group):
        worker = TorchWorker(settings, group, problem, momentum=0.0)
        worker.begin(make_round(node_sizes))
        for exchange in rounds[1:]:
            worker.iterate(make_round(node_sizes, exchange=exchange))
        restored = TorchWorker(settings, group, problem, momentum=0.0)
        restored.begin(make_round(node_sizes))
        for x, saved in zip(restored.parameters, worker.parameters, strict=True):
            x.copy_(saved)
        restored.algorithm.load_state_dict(worker.algorithm.state_dict())
        restored.steps = worker.steps
        for each in (worker, restored):
            each.algorithm.reset(each.parameters, group, make_round(node_sizes))
            each.iterate(None)
            if group.rank < 2:
                each.iterate(make_round(node_sizes, exchange=rounds[0]))
        return all(map(torch.equal, worker.parameters, restored.parameters))

    assert simulate(node_sizes, member) == [True] * 4


def test_a_leader_that_is_not_finite_is_refused(caplog):
    """Nobody takes over a model with NaN in it, though its loss won the election; the last leader stays."""
    node_sizes, problem = [2, 1], Problem(3)
    settings = LeaderSettings(period=8, local_period=4, **PULLS)

    def member(group):
        worker = TorchWorker(settings, group, problem)
        worker.begin(make_round(node_sizes))
        worker.iterate(None)
        if group.rank == 1:
            worker.parameters[0][3] = torch.nan
        exchange = Exchange(None, 1, (1, 2), 0)
        worker.algorithm.before_forward(worker.parameters, group, make_round(node_sizes, exchange=exchange)).apply()
        return worker

    workers = simulate(node_sizes, member)
    start = torch.from_numpy(problem.start)
    for worker in workers:
        assert torch.equal(torch.cat(worker.algorithm.global_leader), start)
    assert np.isfinite(workers[0].model).all() and np.isfinite(workers[2].model).all()
    assert golden.text("exchange.nonfinite_global_leader") in caplog.text


def test_a_new_generation_starts_with_the_source_s_leader():
    """After a round that only some completed, all go on with the leader that the source holds."""
    node_sizes, problem = [2, 1], Problem(3)
    settings = LeaderSettings(period=8, local_period=4, **PULLS)

    def member(group):
        worker = TorchWorker(settings, group, problem)
        worker.begin(make_round(node_sizes))
        for z in worker.algorithm.global_leader:
            z.fill_(group.rank)
        worker.begin(make_round(node_sizes, id=2, number=2, source=2))
        leaders = worker.algorithm.global_leader, worker.algorithm.local_leader
        return all((z == 2).all() for zs in leaders for z in zs)

    assert simulate(node_sizes, member) == [True] * 3


def test_local_rounds_begin_when_the_period_has_grown() -> None:
    """The first stretches of a run with short periods have global rounds only."""
    settings = LeaderSettings(period=8, local_period=2, warm_share=0.5, closing_share=0.5)

    def member(group):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = SimulatedWorker.of_model(group, settings, model, optimizer, steps=64)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(group.rank))
        levels = []
        for _ in range(64):
            worker.step(lambda: (model(inputs) - group.rank).square().mean())
            now = worker.algorithm.settings
            assert bool(worker.algorithm.local_leader) == (now.local_period < now.period)
            levels.append((now.period, [x.clone() for x in worker.algorithm.local_leader]))
        return levels

    workers = simulate([2, 2], member)
    assert [period for period, _ in workers[0]] == [period for period, _ in workers[3]]
    assert {period for period, _ in workers[0]} == {1, 2, 4, 8}
    assert sum(bool(local) for _, local in workers[0]) > 16
    for one, other in ((0, 1), (2, 3)):  # those of a node follow the same leader
        for (_, mine), (_, theirs) in zip(workers[one], workers[other], strict=True):
            assert all(map(torch.equal, mine, theirs))
