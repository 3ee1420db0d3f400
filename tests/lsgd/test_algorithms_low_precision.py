"""Low precision decentralized SGD against a float64 reference that is fed with the changes really sent."""

import numpy as np
import pytest
import torch

from lsgd.algorithms.low_precision_decentralized import LowPrecisionDecentralizedSettings
from lsgd.errors import ExchangeError
from lsgd.testing.simulation import simulate
from tests import golden

from .reference import Problem, Worker, close_to, decode, nodes_of
from .training import SPLIT, Recording, TorchWorker, make_round, relative_error, train

NODES = [[1], [1, 1], [3], [2, 1, 3], [1] * 7]
STEPS = 40
PARTS = (slice(0, SPLIT), slice(SPLIT, None))


def neighbors_of(unit, units, topology):
    others = {(unit - 1) % units, (unit + 1) % units} if topology == "ring" else set(range(units))
    return sorted(others - {unit})


def weights_of(units, topology):
    """Metropolis weights that keep the mean over workers; 1/3 in a ring of equal units."""
    n = len(units)
    w = np.zeros((n, n))
    for r in range(n):
        for s in neighbors_of(r, n, topology):
            degree = max(len(neighbors_of(r, n, topology)), len(neighbors_of(s, n, topology)))
            w[r, s] = min(len(units[r]), len(units[s])) / (1 + degree) / len(units[r])
        w[r, r] = 1 - w[r].sum()
    return w


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("topology", ["ring", "all"])
@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("node_sizes", NODES)
def test_against_the_reference(node_sizes, hierarchical, topology, rounding):
    interval = 2 if rounding == "nearest" else 1
    settings = LowPrecisionDecentralizedSettings(
        topology=topology, hierarchical=hierarchical, rounding=rounding, interval=interval, block=5
    )
    workers = train(settings, node_sizes, STEPS, period=interval, record=True)
    reference = [Worker(workers[0].problem, rank) for rank in range(len(workers))]
    units = nodes_of(node_sizes if hierarchical else [1] * len(reference))
    w = weights_of(units, topology)
    x = np.array([reference[0].x] * len(units))
    sent = [worker.group.sent("exchange") for worker in workers]
    for step in range(STEPS):
        if step % interval == 0:
            now = np.array([np.mean([reference[k].x for k in unit], axis=0) for unit in units])
            if len(units) == 1:
                x = now
            else:
                z = w @ x - x + (now - x)
                for u, unit in enumerate(units):
                    # The first exchanges are those of reset, at full precision.
                    first = len(PARTS) * (1 + step // interval)
                    for call, part in enumerate(PARTS, start=first):
                        change = decode(sent[unit[0]][call][0])
                        assert close_to(change, z[u, part], rounding)
                        x[u, part] += change.values
            for u, unit in enumerate(units):
                for rank in unit:
                    reference[rank].x = x[u].copy()
        for r in reference:
            r.apply(r.gradient())
    assert max(relative_error(w.model, r.x) for w, r in zip(workers, reference, strict=True)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("node_sizes", [[1, 1], [1] * 5, [2, 1, 2]])
def test_copies_are_their_owners_models(node_sizes, dtype):
    """80 exchanges: every copy of a neighbor equals the neighbor's own model bit for bit, and training works."""
    settings = LowPrecisionDecentralizedSettings(block=7)
    workers = train(settings, node_sizes, 80, dtypes=(dtype, torch.float32), lr=0.03, momentum=0.0)
    units = nodes_of(node_sizes)
    seen = 0
    for unit, members in enumerate(units):
        owner = workers[members[0]].algorithm
        assert owner.model[0].dtype is dtype
        for other in members[1:]:
            assert all(map(torch.equal, owner.model, workers[other].algorithm.model))
        for algorithm in (worker.algorithm for worker in workers):
            if unit in algorithm.copies:
                assert all(map(torch.equal, owner.model, algorithm.copies[unit]))
                seen += 1
    assert seen == sum(len(neighbors_of(u, len(units), "ring")) for u in range(len(units)))
    problem = workers[0].problem
    losses = [problem.loss_and_gradient(w.model, r, 0)[0] for r, w in enumerate(workers)]
    start = [problem.loss_and_gradient(problem.start, r, 0)[0] for r in range(len(workers))]
    assert np.mean(losses) < 0.2 * np.mean(start)


def test_consensus_keeps_the_mean_over_workers():
    """Without steps, nodes of 3, 1 and 2 workers agree on the mean over workers, to the precision of the codes."""

    def member(group):
        worker = TorchWorker(LowPrecisionDecentralizedSettings(rounding="nearest"), group, Problem(6))
        for x in worker.parameters:
            x += group.rank
        worker.begin(make_round([3, 1, 2]))
        for id in range(1, 200):
            worker.algorithm.before_forward(worker.parameters, group, make_round([3, 1, 2], id=id)).apply()
        return worker.model - worker.problem.start

    np.testing.assert_allclose(simulate([3, 1, 2], member), np.mean(range(6)), atol=0.01)


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("hierarchical", [True, False])
def test_what_is_not_finite_is_refused(hierarchical, anew, caplog):
    """The worker goes back to the model that its neighbors know, or takes its node's; nobody else notices."""
    settings = LowPrecisionDecentralizedSettings(hierarchical=hierarchical)

    def member(group):
        worker = TorchWorker(settings, group, Problem(3))
        worker.begin(make_round([2, 1]))
        worker.iterate(make_round([2, 1]))
        if group.rank == 1:
            worker.parameters[0][0] = torch.nan
        if anew:
            worker.begin(make_round([2, 1], id=2, number=2))
        worker.algorithm.before_forward(worker.parameters, group, make_round([2, 1], id=2)).apply()
        return worker.model

    assert np.isfinite(simulate([2, 1], member)).all()
    assert caplog.text.count(golden.text("island.nonfinite_model")) == 1


def test_a_failed_exchange_has_not_happened():
    """A neighbor is lost after the first of two tensors: model, x and copies are as they were."""
    changed, raised = [], []
    node_sizes = [1, 1, 1]

    def member(group):
        worker = TorchWorker(LowPrecisionDecentralizedSettings(), group, Problem(3))
        worker.begin(make_round(node_sizes))
        worker.iterate(make_round(node_sizes))
        algorithm = worker.algorithm
        state = [
            *worker.parameters,
            *algorithm.model,
            *(x for copy in algorithm.copies.values() for x in copy),
        ]
        before = [x.clone() for x in state]
        link = FailingExchange(group, 1) if group.rank == 2 else group
        try:
            algorithm.before_forward(worker.parameters, link, make_round(node_sizes, id=2)).apply()
        except ExchangeError:
            raised.append(group.rank)
            changed.extend(group.rank for a, b in zip(before, state, strict=True) if not torch.equal(a, b))
            raise

    with pytest.raises(ExchangeError, match="lost"):
        simulate(node_sizes, member, timeout_s=10)
    assert sorted(raised) == [0, 1, 2] and not changed


class FailingExchange:
    def __init__(self, group, calls):
        self._group, self._left = group, calls

    def __getattr__(self, name):
        return self if name == "across" else getattr(self._group, name)

    def exchange(self, sends, receives):
        if self._left == 0:
            raise ExchangeError("lost")
        self._left -= 1
        self._group.across.exchange(sends, receives)


def test_state_dict_round_trip():
    node_sizes = [1, 2, 1]

    def member(group):
        worker = TorchWorker(LowPrecisionDecentralizedSettings(), group, Problem(4), momentum=0.0)
        worker.begin(make_round(node_sizes))
        for id in range(1, 4):
            worker.iterate(make_round(node_sizes, id=id))
        restored = TorchWorker(LowPrecisionDecentralizedSettings(), group, Problem(4), momentum=0.0)
        restored.begin(make_round(node_sizes))
        for x, saved in zip(restored.parameters, worker.parameters, strict=True):
            x.copy_(saved)
        restored.steps = worker.steps
        restored.algorithm.load_state_dict(worker.algorithm.state_dict())
        for each in (worker, restored):
            each.iterate(make_round(node_sizes, id=4))
        return all(map(torch.equal, worker.parameters, restored.parameters))

    assert simulate(node_sizes, member) == [True] * 4


def test_a_new_generation_rebuilds_the_copies():
    """After a change of members the copies are what the new neighbors have now."""

    def member(group):
        worker = TorchWorker(LowPrecisionDecentralizedSettings(hierarchical=False), group, Problem(4))
        worker.begin(make_round([4]))
        for id in range(1, 4):
            worker.iterate(make_round([4], id=id))
        worker.begin(make_round([4], id=4, number=2))
        return worker.algorithm

    algorithms = simulate([4], member)
    for rank, algorithm in enumerate(algorithms):
        assert sorted(algorithm.copies) == neighbors_of(rank, 4, "ring")
        for neighbor, copy in algorithm.copies.items():
            assert all(map(torch.equal, copy, algorithms[neighbor].model))


@pytest.mark.parametrize("topology", ["ring", "all"])
def test_bytes_sent(topology):
    """One byte per number and 8 per block to each neighbor, after 4 per number at the start of the generation."""
    numel = 100_000

    def member(group):
        recording = Recording(group)
        settings = LowPrecisionDecentralizedSettings(topology=topology, hierarchical=False)
        model = [torch.randn(numel)]
        algorithm = settings.create(model)
        algorithm.reset(model, recording, make_round([5]))
        at_first = group.sent_nbytes
        algorithm.before_forward(model, recording, make_round([5])).apply()
        return at_first, group.sent_nbytes - at_first

    neighbors = 2 if topology == "ring" else 4
    for at_first, sent in simulate([5], member):
        assert at_first == neighbors * 4 * numel
        assert sent == pytest.approx(neighbors * numel * (1 + 8 / 2048), rel=0.001)
