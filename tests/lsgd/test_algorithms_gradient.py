"""Gradient methods against float64 references that are fed with the decoded values really sent."""

import numpy as np
import pytest
import torch

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.bytegrad import ByteGradSettings
from lsgd.algorithms.gradient import buckets
from lsgd.algorithms.qsgd import QSGDSettings
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Transfer
from lsgd.errors import ExchangeError
from lsgd.testing.simulation import simulate

from .reference import Problem, Worker, close_to, decode, nodes_of
from .training import SPLIT, TorchWorker, make_round, relative_error, train

BLOCK = 5
STEPS = 30
NODES = [[1, 1], [4], [2, 2], [2, 1, 3], [1] * 7]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PARTS = (slice(SPLIT, None), slice(0, SPLIT))  # the two flat tensors, in the order of their exchange


def sent_by(workers):
    """What each worker sent in first and second rounds, by call."""
    return [(w.group.sent("all_to_all"), w.group.sent("all_gather")) for w in workers]


def means_of(sent, senders, step, rounding, exact):
    """Return the mean gradient of one step as the second round says it, and check both rounds.

    ``exact`` has for each sender what it should have quantized.
    """
    mean = np.zeros(len(exact[0]))
    for bucket, part in enumerate(PARTS):
        call = len(PARTS) * step + bucket
        first, second = [], []
        for rank in senders:
            first.append([decode(p) for p in sent[rank][0][call]])
            second.append(decode(sent[rank][1][call][0]))
        for chunks, x in zip(first, exact, strict=True):
            ends = np.cumsum([len(d.values) for d in chunks])[:-1]
            assert all(close_to(d, e, rounding) for d, e in zip(chunks, np.split(x[part], ends), strict=True))
        for index, result in enumerate(second):
            total = sum(chunks[index].values for chunks in first)
            assert close_to(result, total / len(senders), rounding)
        mean[part] = np.concatenate([result.values for result in second])
    return mean


@pytest.mark.parametrize("node_sizes", NODES)
def test_allreduce(node_sizes):
    workers = train(AllReduceSettings(), node_sizes, STEPS)
    reference = [Worker(workers[0].problem, rank) for rank in range(len(workers))]
    for _ in range(STEPS):
        mean = np.mean([r.gradient() for r in reference], axis=0)
        for r in reference:
            r.apply(mean)
    assert max(relative_error(w.model, r.x) for w, r in zip(workers, reference, strict=True)) < 1e-5
    assert all(map(torch.equal, workers[0].parameters, workers[-1].parameters))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("node_sizes", NODES)
def test_qsgd(node_sizes, rounding):
    size = sum(node_sizes)
    workers = train(QSGDSettings(rounding=rounding, block=BLOCK), node_sizes, STEPS, record=True)
    reference, sent = [Worker(workers[0].problem, rank) for rank in range(size)], sent_by(workers)
    for step in range(STEPS):
        mean = means_of(sent, range(size), step, rounding, [r.gradient() for r in reference])
        for r in reference:
            r.apply(mean)
    assert max(relative_error(w.model, r.x) for w, r in zip(workers, reference, strict=True)) < 1e-5


@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("node_sizes", NODES)
def test_bytegrad(node_sizes, hierarchical):
    """Hierarchical: the nodes' sums over workers / all workers, times nodes, are what travels in 8 bits."""
    size = sum(node_sizes)
    settings = ByteGradSettings(block=BLOCK, hierarchical=hierarchical)
    workers = train(settings, node_sizes, STEPS, record=True)
    reference, sent = [Worker(workers[0].problem, rank) for rank in range(size)], sent_by(workers)
    units = nodes_of(node_sizes if hierarchical else [1] * size)
    for step in range(STEPS):
        gradients = np.array([r.gradient() for r in reference])
        exact = [gradients[unit].sum(axis=0) * len(units) / size for unit in units]
        mean = exact[0]
        if len(units) > 1:
            mean = means_of(sent, [unit[0] for unit in units], step, "nearest", exact)
            # The mean weighted by workers, whatever the nodes' sizes are (with room for two roundings).
            assert np.abs(mean - gradients.mean(axis=0)).max() < 0.1 * np.abs(gradients).max()
        for r in reference:
            r.apply(mean)
    assert max(relative_error(w.model, r.x) for w, r in zip(workers, reference, strict=True)) < 1e-5


def test_bytegrad_s_mean_is_weighted_by_workers():
    """Three workers with gradient 1 on one node and one with 5 on another: the mean is 2, of nodes it would be 3."""

    def member(group):
        worker = TorchWorker(ByteGradSettings(), group, Problem(4))
        worker.begin(make_round([3, 1]))
        gradients = [torch.full((10,), 5.0 if group.rank == 3 else 1.0)]
        worker.algorithm.after_backward(worker.parameters, gradients, group, make_round([3, 1])).apply()
        return gradients[0]

    for gradient in simulate([3, 1], member):
        torch.testing.assert_close(gradient, torch.full((10,), 2.0))


QUANTIZED = {
    "bytegrad": ByteGradSettings(block=BLOCK),
    "bytegrad, flat": ByteGradSettings(block=BLOCK, hierarchical=False, error_feedback=True),
    "qsgd": QSGDSettings(block=BLOCK),
    "qsgd, error feedback": QSGDSettings(block=0, error_feedback=True),
    "allreduce": AllReduceSettings(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_models_stay_identical(name, dtype):
    """80 steps of three workers on two nodes: the same bits everywhere, and a model that fits."""
    first, *others = train(QUANTIZED[name], [2, 1], 80, dtypes=(dtype, torch.float32), lr=0.03, momentum=0.0)
    assert first.parameters[0].dtype is dtype
    for other in others:
        assert all(map(torch.equal, first.parameters, other.parameters))
    losses = [first.problem.loss_and_gradient(first.model, r, 0)[0] for r in range(3)]
    start = [first.problem.loss_and_gradient(first.problem.start, r, 0)[0] for r in range(3)]
    assert np.mean(losses) < 0.2 * np.mean(start)


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "allreduce"])
def test_sum_instead_of_mean(name):
    settings = QUANTIZED[name]
    summed = type(settings)(**{**vars(settings), "average": False})

    def member(group):
        worker = TorchWorker(summed, group, Problem(4))
        worker.begin(make_round([3, 1]))
        gradients = [torch.full((12,), 1.0 + group.rank)]
        worker.algorithm.after_backward(worker.parameters, gradients, group, make_round([3, 1])).apply()
        return gradients[0]

    for gradient in simulate([3, 1], member):
        torch.testing.assert_close(gradient, torch.full((12,), 10.0))


@pytest.mark.parametrize("name", QUANTIZED)
def test_all_skip_together(name):
    """One member's Inf makes every member's gradient not finite, which GradScaler sees; residuals stay."""

    def member(group):
        worker = TorchWorker(QUANTIZED[name], group, Problem(5))
        worker.begin(make_round([2, 1, 2]))
        for id in range(1, 4):
            worker.iterate(make_round([2, 1, 2], id=id))
        before = residuals_of(worker.algorithm)
        worker.loss().backward()
        gradients = [x.grad for x in worker.flats]
        if group.rank == 3:
            gradients[1][2] = torch.inf
        worker.algorithm.after_backward(worker.parameters, gradients, group, make_round([2, 1, 2], id=4)).apply()
        kept = all(map(torch.equal, before, residuals_of(worker.algorithm)))
        return gradients, kept, len(before)

    results = simulate([2, 1, 2], member)
    first = results[0][0]
    assert not first[1].isfinite().all()
    for gradients, kept, residuals in results:
        for g, other in zip(gradients, first, strict=True):
            assert torch.equal(g.nan_to_num(3e3), other.nan_to_num(3e3))
        assert kept and residuals == (2 if getattr(QUANTIZED[name], "error_feedback", False) else 0)


def residuals_of(algorithm):
    """Copies of what rounding has lost of a member's own gradients, by bucket."""
    return [each["residual"].clone() for each in algorithm.state_dict().get("feedback", {}).values()]


@pytest.mark.parametrize("feedback", [True, False])
def test_error_feedback_gets_closer(feedback):
    """With one range for all of a tensor whose parts differ by 10,000, small gradients only live on in residuals."""
    scale = torch.tensor([1.0, 1e-4]).repeat(50)
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(100, generator=generator) * scale
    settings = ByteGradSettings(block=0, error_feedback=feedback)

    def member(group):
        worker = TorchWorker(settings, group, Problem(2))
        worker.begin(make_round([1, 1]))
        total = torch.zeros(100)
        for id in range(1, 201):
            gradients = [exact.clone()]
            worker.algorithm.after_backward(worker.parameters, gradients, group, make_round([1, 1], id=id)).apply()
            total += gradients[0]
        return total / 200

    mean = simulate([1, 1], member)[0]
    error = float((mean - exact)[1::2].abs().mean() / exact[1::2].abs().mean())
    assert error < 0.3 if feedback else error > 0.6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_residuals_are_float32_whatever_the_default_is(dtype):
    torch.set_default_dtype(dtype)
    try:
        feedback = ErrorFeedback(4, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.tensor([1.0, 1e-9, 1 + 1e-6, -1.0])
    assert torch.equal(feedback.added_to(x), x)


def test_residuals_in_the_state_dict():
    """Restored residuals go on bit for bit. When the members change, those of the results are dropped, no others."""
    settings = QSGDSettings(block=BLOCK, error_feedback=True)
    node_sizes = [1, 2]

    def member(group):
        worker = TorchWorker(settings, group, Problem(3), momentum=0.0)
        worker.begin(make_round(node_sizes))
        for id in range(1, 5):
            worker.iterate(make_round(node_sizes, id=id))
        restored = TorchWorker(settings, group, Problem(3), momentum=0.0)
        for x, saved in zip(restored.parameters, worker.parameters, strict=True):
            x.copy_(saved)
        restored.steps = worker.steps
        restored.algorithm.load_state_dict(worker.algorithm.state_dict())
        restored.begin(make_round(node_sizes, number=2))
        for each in (worker, restored):
            for id in range(5, 8):
                each.iterate(make_round(node_sizes, id=id))
        same = all(map(torch.equal, worker.parameters, restored.parameters))
        own = residuals_of(restored.algorithm)
        restored.algorithm.reset(restored.parameters, group, make_round([3]))
        feedback = restored.algorithm.state_dict()["feedback"].values()
        kept = all(map(torch.equal, own, residuals_of(restored.algorithm)))
        return same, kept and any(x.any() for x in own), any(each["results"] for each in feedback)

    assert simulate(node_sizes, member) == [(True, True, False)] * 3


def test_buckets_cover_the_gradients_from_the_end():
    a, b, empty = torch.arange(10.0), torch.arange(7, dtype=torch.float64), torch.empty(0)
    slices = list(buckets([a, empty, b], nbytes=16))
    assert [s.tolist() for s in slices[:4]] == [[6.0], [4.0, 5.0], [2.0, 3.0], [0.0, 1.0]]
    assert [s.tolist() for s in slices[4:]] == [[8.0, 9.0], [4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]
    assert all(s.untyped_storage().data_ptr() in (a.data_ptr(), b.data_ptr()) for s in slices)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_failed_step_keeps_the_gradients(name):
    """One of three buckets is exchanged, then the generation ends: all gradients are kept, and sent again."""
    settings = type(QUANTIZED[name])(**{**vars(QUANTIZED[name]), "bucket_mib": 0.001})
    whole = torch.linspace(-1, 1, 700)

    def member(group):
        worker = TorchWorker(settings, group, Problem(3))
        worker.begin(make_round([1, 1, 1]))
        gradients = [whole * (1 + group.rank)]
        algorithm = worker.algorithm
        algorithm.exchange_bucket(algorithm.buckets(gradients)[0], 0, group, make_round([1, 1, 1]))
        algorithm.complete()
        untouched = torch.equal(gradients[0], whole * (1 + group.rank))
        # The generation fails here; the next one exchanges everything again.
        worker.begin(make_round([1, 1, 1], id=2, number=2))
        algorithm.after_backward(worker.parameters, gradients, group, make_round([1, 1, 1], id=2, number=2)).apply()
        return untouched, len(algorithm.buckets(gradients)), gradients[0]

    for untouched, count, gradient in simulate([1, 1, 1], member):
        assert untouched and count == 3
        torch.testing.assert_close(gradient, 2 * whole, rtol=0, atol=0.03)


class Noting:
    """A group that notes the order in which transfers are begun and waited for."""

    def __init__(self, group):
        self._group = group
        self.order = []

    def __getattr__(self, attribute):
        return getattr(self._group, attribute)

    def _note(self, what, transfer):
        self.order.append(what)

        def wait():
            self.order.append(f"{what} is there")
            transfer.wait()

        return Transfer(wait)

    def all_reduce(self, tensor):
        return self._note(f"sum {sum('is' not in what for what in self.order)}", self._group.all_reduce(tensor))

    def all_to_all(self, outputs, inputs):
        name = f"first {sum(what.startswith('first') and 'is' not in what for what in self.order)}"
        return self._note(name, self._group.all_to_all(outputs, inputs))

    def all_gather(self, outputs, tensor):
        name = f"second {sum(what.startswith('second') and 'is' not in what for what in self.order)}"
        return self._note(name, self._group.all_gather(outputs, tensor))


IN_ORDER = {
    QSGDSettings: [
        *("first 0", "first 1", "first 0 is there", "second 0"),
        *("first 2", "first 1 is there", "second 1", "second 0 is there"),
        *("first 2 is there", "second 2", "second 1 is there", "second 2 is there"),
    ],
    AllReduceSettings: [
        *("sum 0", "sum 1", "sum 2", "sum 0 is there", "sum 1 is there", "sum 2 is there"),
    ],
}


@pytest.mark.parametrize("kind", IN_ORDER)
def test_a_bucket_is_begun_before_those_before_it_are_waited_for(kind):
    settings = kind(bucket_mib=0.001)

    def member(group):
        noting = Noting(group)
        worker = TorchWorker(settings, group, Problem(2))
        worker.begin(make_round([1, 1]))
        worker.algorithm.reset(worker.parameters, noting, make_round([1, 1]))
        gradients = [torch.linspace(-1, 1, 700) * group.rank]
        worker.algorithm.after_backward(worker.parameters, gradients, noting, make_round([1, 1])).apply()
        return noting.order

    for order in simulate([1, 1], member):
        assert order == IN_ORDER[kind]


class Breaking(Noting):
    """Its sixth transfer never arrives: three buckets are under way then."""

    def _note(self, what, transfer):
        noted = super()._note(what, transfer)
        return Transfer(self._break) if what == "second 2" else noted

    def _break(self):
        raise ExchangeError("the link broke")


def test_what_was_under_way_when_an_exchange_failed_is_forgotten():
    settings = QSGDSettings(bucket_mib=0.0005)
    whole = torch.linspace(-1, 1, 700)

    def member(group):
        worker = TorchWorker(settings, group, Problem(2))
        worker.begin(make_round([1, 1]))
        algorithm, broken = worker.algorithm, Breaking(group)
        algorithm.reset(worker.parameters, broken, make_round([1, 1]))
        gradients = [whole * (1 + group.rank)]
        with pytest.raises(ExchangeError, match="the link broke"):
            algorithm.after_backward(worker.parameters, gradients, broken, make_round([1, 1])).apply()
        untouched = torch.equal(gradients[0], whole * (1 + group.rank))
        fresh = Noting(group.across)  # the same members, and nothing in it of what failed
        algorithm.reset(worker.parameters, fresh, make_round([1, 1], id=2, number=2))
        algorithm.after_backward(worker.parameters, gradients, fresh, make_round([1, 1], id=2, number=2)).apply()
        return untouched, len(algorithm.buckets(gradients)), fresh.order, gradients[0]

    for untouched, count, order, gradient in simulate([1, 1], member):
        assert untouched and count == 6
        assert order[:4] == ["first 0", "first 1", "first 0 is there", "second 0"]
        assert order[-1] == "second 5 is there"
        torch.testing.assert_close(gradient, 1.5 * whole, rtol=0, atol=0.03)


@pytest.mark.parametrize("name", ["qsgd", "bytegrad", "bytegrad, flat"])
@pytest.mark.parametrize("node_sizes", [[2, 2], [1, 4], [1, 1, 1]])
def test_bytes_sent(name, node_sizes):
    """2 (n - 1) / n bytes per number and 8 per block; in ByteGrad n is nodes, and only first workers send."""
    settings = type(QUANTIZED[name])(**{**vars(QUANTIZED[name]), "block": 2048, "error_feedback": False})
    numel = 300_000
    by_nodes = name == "bytegrad"

    def member(group):
        algorithm = TorchWorker(settings, group, Problem(group.size)).algorithm
        algorithm.reset([], group, make_round(node_sizes))
        algorithm.after_backward([], [torch.randn(numel)], group, make_round(node_sizes)).apply()
        units = group.across if by_nodes else group
        return units.sent_nbytes if units is not None else None

    sent = [nbytes for nbytes in simulate(node_sizes, member) if nbytes is not None]
    members = len(node_sizes) if by_nodes else sum(node_sizes)
    assert len(sent) == members
    expected = 2 * (members - 1) / members * numel * (1 + 8 / 2048)
    assert sent == pytest.approx([expected] * members, rel=0.02)
