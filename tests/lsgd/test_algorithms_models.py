"""Elastic, local (and DiLoCo) and decentralized SGD against float64 references."""

import threading

import numpy as np
import pytest
import torch

from lsgd.algorithms.bytegrad import ByteGradSettings
from lsgd.algorithms.decentralized import DecentralizedSettings
from lsgd.algorithms.elastic import ElasticSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import DiLoCoSettings, LocalSettings, SparseSettings
from lsgd.algorithms.low_precision_decentralized import LowPrecisionDecentralizedSettings
from lsgd.algorithms.qsgd import QSGDSettings
from lsgd.codecs.minmax import MinMax8
from lsgd.errors import ExchangeError
from lsgd.testing.simulation import land, simulate
from tests import golden

from ..speed import scaled
from .reference import Problem, Worker, nodes_of
from .training import SPLIT, TorchWorker, make_round, relative_error, train

NODES = [[1], [1, 1], [3], [2, 1, 3], [1] * 7]
STEPS = 48


def reference_workers(workers):
    return [Worker(workers[0].problem, rank) for rank in range(len(workers))]


def step_all(reference):
    for r in reference:
        r.apply(r.gradient())


def assert_follows(workers, reference, bound=1e-5):
    errors = [relative_error(w.model, r.x) for w, r in zip(workers, reference, strict=True)]
    assert max(errors) < bound, errors


@pytest.mark.parametrize("node_sizes", NODES)
def test_elastic(node_sizes):
    workers = train(ElasticSettings(period=6, strength=0.43), node_sizes, STEPS, period=6)
    reference = reference_workers(workers)
    n, m = len(reference), workers[0].problem.start.astype(float)
    for step in range(STEPS):
        if step % 6 == 0:
            mean = np.mean([r.x for r in reference], axis=0)
            for r in reference:
                r.x = (1 - 0.43 / n) * r.x + 0.43 / n * m
            m = (1 - 0.43) * m + 0.43 * mean
        step_all(reference)
    assert_follows(workers, reference)
    assert relative_error(torch.cat(workers[0].algorithm.master).numpy(), m) < 1e-5


OUTER = {
    "mean": LocalSettings(6, compression="none", rescale=False),
    "mean of changes times 0.5": LocalSettings(6, outer_lr=0.5, compression="none", rescale=False),
    "as long as the changes": LocalSettings(6, compression="none"),
    "diloco": DiLoCoSettings(period=6),
}


@pytest.mark.parametrize("name", OUTER)
@pytest.mark.parametrize("node_sizes", NODES)
def test_local(node_sizes, name):
    settings = OUTER[name]
    workers = train(settings, node_sizes, STEPS, period=6)
    reference = reference_workers(workers)
    lr, momentum = {"mean of changes times 0.5": (0.5, 0), "diloco": (0.7, 0.9)}.get(name, (1, 0))
    common = workers[0].problem.start.astype(float)
    velocity = np.zeros_like(common)
    for step in range(STEPS):
        if step % 6 == 0:
            gradient = common - np.mean([r.x for r in reference], axis=0)
            if settings.rescale and step:
                own = np.mean([np.square(common - r.x).sum() for r in reference])
                gradient *= np.sqrt(own / np.square(gradient).sum())
            velocity = momentum * velocity + gradient
            common = common - lr * (gradient + momentum * velocity)
            for r in reference:
                r.x = common.copy()
        step_all(reference)
    assert_follows(workers, reference)


def test_the_outer_step_is_torch_s():
    """DiLoCo's outer step is torch.optim.SGD with Nesterov momentum on the common model."""

    def member(group):
        torch.manual_seed(group.rank)
        model = torch.zeros(40, dtype=torch.float64)
        worker = TorchWorker(DiLoCoSettings(), group, Problem(2))
        algorithm = type(worker.algorithm)(DiLoCoSettings(), [model], "")
        algorithm.reset([model], group, make_round([2]))
        theirs = torch.zeros(40, dtype=torch.float64, requires_grad=True)
        outer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
        for id in range(1, 6):
            change = torch.randn(40, dtype=torch.float64)
            theirs.grad = -change / 2
            group.all_reduce(theirs.grad).wait()
            outer.step()
            model += change
            algorithm.before_forward([model], group, make_round([2], id=id)).apply()
        return torch.allclose(model, theirs.detach(), rtol=1e-12)

    assert all(simulate([2], member))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["elastic", "local", "local in 8 bits", "local in 2 bits", "diloco", "sparse"])
def test_common_models_stay_identical(name, dtype):
    """150 steps of three workers: the same master, or common model and momentum, on all of them."""
    settings = {
        "elastic": ElasticSettings(period=5),
        "local": LocalSettings(5, compression="none"),
        "local in 8 bits": LocalSettings(period=5, compression="minmax8", block=5),
        "local in 2 bits": LocalSettings(period=5, compression="levels2:block=8", hierarchical=False),
        "diloco": DiLoCoSettings(period=5, compression="minmax8"),
        "sparse": SparseSettings(period=5, compression="topk:k=8"),
    }[name]
    first, *others = train(settings, [2, 1], 150, period=5, dtypes=(dtype, torch.float32), lr=0.03, momentum=0.0)
    for other in others:
        pairs = zip(first.algorithm.shared_state(), other.algorithm.shared_state(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    losses = [first.problem.loss_and_gradient(first.model, r, 0)[0] for r in range(3)]
    start = [first.problem.loss_and_gradient(first.problem.start, r, 0)[0] for r in range(3)]
    assert np.mean(losses) < 0.2 * np.mean(start)


def shift_one(unit, units, exchanges):
    """Peers as the paper's library pairs them, written out again: odd numbers give one unit a bye."""
    if units % 2:
        bye = exchanges % units
        order = [u for u in range(units) if u != bye]
        if unit == bye:
            return unit
        return order[shift_one(order.index(unit), units - 1, exchanges)]
    half = units // 2
    return (exchanges + unit) % half + half if unit < half else (unit - half - exchanges) % half


def exponential(unit, units, exchanges):
    """Peers that differ in one bit, the highest first; after each sweep of the bits all are renumbered."""
    bits = [b for b in (32, 16, 8, 4, 2, 1) if b < units]
    numbers = list(range(units))
    for _ in range(exchanges // len(bits) if bits else 0):
        numbers = [(number + units // 2) % units for number in numbers]
    wanted = numbers[unit] ^ bits[exchanges % len(bits)] if bits else units
    return numbers.index(wanted) if wanted in numbers else unit


PEER_OF = {"exponential": exponential, "shift_one": shift_one}


@pytest.mark.parametrize("peers", [*PEER_OF, "all"])
@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("node_sizes", NODES)
def test_decentralized(node_sizes, interval, hierarchical, peers):
    settings = DecentralizedSettings(peers=peers, hierarchical=hierarchical, interval=interval)
    workers = train(settings, node_sizes, STEPS, period=interval)
    reference = reference_workers(workers)
    units = nodes_of(node_sizes if hierarchical else [1] * len(reference))
    for step in range(STEPS):
        gradients = [r.gradient() for r in reference]  # of the models before they are averaged
        models = [r.x for r in reference]
        for u, unit in enumerate(units if step % interval == 0 else []):
            members = range(len(reference))
            if peers in PEER_OF:
                members = {*unit, *units[PEER_OF[peers](u, len(units), step // interval)]}
            for rank in unit:
                reference[rank].x = np.mean([models[k] for k in sorted(members)], axis=0)
        for r, gradient in zip(reference, gradients, strict=True):
            r.apply(gradient)
    assert_follows(workers, reference)
    if len(reference) > 2 and peers in PEER_OF and not hierarchical:
        assert relative_error(workers[0].model, workers[1].model) > 1e-4


def test_the_exchange_runs_beside_forward_and_backward():
    """before_forward returns while the peer has not even begun; the model changes in after_backward only."""
    peer_may_begin = threading.Event()

    def member(group):
        worker = TorchWorker(DecentralizedSettings(), group, Problem(2))
        worker.begin(make_round([1, 1]))
        for x in worker.parameters:
            x.fill_(group.rank)
        if group.rank == 1:
            assert peer_may_begin.wait(scaled(20))
        worker.algorithm.before_forward(worker.parameters, group, make_round([1, 1]))
        exchanging = worker.algorithm._land is not None
        before = [x.clone() for x in worker.parameters]
        worker.loss().backward()
        peer_may_begin.set()
        unchanged = all(map(torch.equal, before, worker.parameters))
        worker.algorithm.after_backward(worker.parameters, [], group, make_round([1, 1])).apply()
        mean = all((x == 0.5).all() for x in worker.parameters)
        return exchanging, unchanged, bool(mean), worker.algorithm._land is not None

    assert simulate([1, 1], member) == [(True, True, True, False)] * 2


@pytest.mark.parametrize(
    "settings",
    [
        DecentralizedSettings(peers="shift_one"),
        ElasticSettings(),
        LocalSettings(64, compression="none"),
        DiLoCoSettings(),
    ],
)
def test_a_failed_exchange_has_not_happened(settings):
    """A peer is lost in the middle: the model and the algorithm's state are as they were."""
    changed, raised = [], []

    def member(group):
        worker = TorchWorker(settings, group, Problem(3))
        worker.begin(make_round([1, 1, 1]))
        worker.iterate(None)
        before = [x.clone() for x in (*worker.parameters, *worker.algorithm.shared_state())]
        if group.rank == 2:
            part = worker.parameters[0].new_zeros(SPLIT + (settings.name == "decentralized"))
            if settings.name != "decentralized":
                group.all_reduce(part).wait()  # the first tensor goes through, then it is gone
            raise ExchangeError("lost")
        try:
            round = make_round([1, 1, 1], id=2)
            land(worker.algorithm.before_forward(worker.parameters, group, round))
            land(worker.algorithm.after_backward(worker.parameters, [], group, round))
        except ExchangeError:
            raised.append(group.rank)
        after = (*worker.parameters, *worker.algorithm.shared_state())
        changed.extend(group.rank for a, b in zip(before, after, strict=True) if not torch.equal(a, b))

    with pytest.raises(ExchangeError, match="lost"):
        simulate([1, 1, 1], member, timeout_s=10)
    # Exchange 1 of shift_one gives rank 1 a bye: nothing failed for it.
    assert sorted(raised) == ([0] if settings.name == "decentralized" else [0, 1])
    assert not changed


@pytest.mark.parametrize(
    "settings",
    [
        DecentralizedSettings(peers="all"),
        DecentralizedSettings(peers="all", hierarchical=False),
        DecentralizedSettings(),
        ElasticSettings(),
        LocalSettings(64, compression="none"),
        LocalSettings(64, compression="minmax8"),
        LocalSettings(64, compression="levels2", fragments=2),
        SparseSettings(hierarchical=False),
    ],
    ids=str,
)
def test_a_model_that_is_not_finite_is_left_out(settings, caplog):
    """Nobody takes over NaN, and the worker that had it takes over the others' model, and says so."""

    def member(group):
        worker = TorchWorker(settings, group, Problem(4))
        worker.begin(make_round([2, 2]))
        for x in worker.parameters:
            x.fill_(group.rank)
        if group.rank == 1:
            worker.parameters[1][0] = torch.inf
        land(worker.algorithm.before_forward(worker.parameters, group, make_round([2, 2])))
        land(worker.algorithm.after_backward(worker.parameters, [], group, make_round([2, 2])))
        return worker.model

    models = simulate([2, 2], member)
    assert np.isfinite(models).all()
    if settings.name == "decentralized":
        np.testing.assert_allclose(models, 5 / 3, rtol=1e-6)  # the mean of 0, 2 and 3
    assert caplog.text.count(golden.text("island.nonfinite_model")) == 1


@pytest.mark.parametrize(
    ("settings", "rounding"),
    [
        (ByteGradSettings(), "nearest"),
        (QSGDSettings(), "stochastic"),
        (LocalSettings(64, compression="minmax8"), "nearest"),
        (LeaderSettings(compression="minmax8"), "nearest"),
        (LowPrecisionDecentralizedSettings(), "stochastic"),
    ],
    ids=str,
)
def test_no_round_waits_for_kernels_to_be_compiled(settings, rounding, monkeypatch):
    prepared = []
    monkeypatch.setattr(
        MinMax8, "prepare", lambda self, vectors, rounding="nearest": prepared.append((len(vectors), rounding))
    )
    settings.create([torch.zeros(5), torch.zeros(3)])
    assert prepared == [(2, rounding)]


@pytest.mark.parametrize("settings", [ElasticSettings(), DiLoCoSettings(), LocalSettings(64, compression="levels1")])
def test_state_dict_round_trip(settings):
    def member(group):
        worker = TorchWorker(settings, group, Problem(2), momentum=0.0)
        worker.begin(make_round([1, 1]))
        for id in range(1, 4):
            worker.iterate(make_round([1, 1], id=id))
        restored = TorchWorker(settings, group, Problem(2), momentum=0.0)
        for x, saved in zip(restored.parameters, worker.parameters, strict=True):
            x.copy_(saved)
        restored.steps = worker.steps
        restored.algorithm.load_state_dict(worker.algorithm.state_dict())
        restored.begin(make_round([1, 1], number=2))
        for each in (worker, restored):
            each.iterate(make_round([1, 1], id=4))
        return all(map(torch.equal, worker.parameters, restored.parameters))

    assert simulate([1, 1], member) == [True, True]
