"""What local SGD has beside the mean: fragments, a delay, and codecs with error feedback."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lsgd.algorithms.local import LocalSettings, SparseSettings
from lsgd.errors import ConfigError, ExchangeError
from lsgd.layers import layers_of
from lsgd.testing.simulation import land, simulate
from tests import golden

from .reference import Problem, Worker
from .training import SPLIT, Recording, TorchWorker, make_round, relative_error

STEPS = 36
PERIOD = 6


def fragments_of(numel, count):
    """The elements of each fragment, in a model of two tensors."""
    bounds = [[size * i // count for i in range(count + 1)] for size in (SPLIT, numel - SPLIT)]
    starts = (0, SPLIT)
    return [
        np.concatenate([np.arange(b[i], b[i + 1]) + start for b, start in zip(bounds, starts, strict=True)])
        for i in range(count)
    ]


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 0), (1, 1), (3, 1), (1, 5)])
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rescale", [False, True])
def test_fragments_and_delay(fragments, delay, keep, rescale):
    """In float64: the change as of a round, the outer step ``delay`` steps later, and a share of the steps between."""
    outer = {"outer_lr": 0.7, "outer_momentum": 0.5, "compression": "none", "rescale": rescale}
    settings = LocalSettings(period=PERIOD, **outer, fragments=fragments, delay=delay, keep=keep)
    interval = settings.schedule().period
    assert interval == PERIOD // fragments

    def member(group):
        worker = TorchWorker(settings, group, Problem(3))
        worker.begin(make_round([2, 1]))
        for step in range(STEPS):
            due = step % interval == 0
            worker.iterate(make_round([2, 1], id=step // interval + 1) if due else None)
        return worker

    workers = simulate([2, 1], member)
    problem = workers[0].problem
    reference = [Worker(problem, rank) for rank in range(3)]
    common = problem.start.astype(float)
    velocity = np.zeros_like(common)
    under_way = None

    def land():
        nonlocal under_way
        part, mean, models = under_way
        velocity[part] = 0.5 * velocity[part] + mean
        common[part] += 0.7 * (mean + 0.5 * velocity[part])
        for r, model in zip(reference, models, strict=True):
            r.x[part] = common[part] + keep * (r.x[part] - model)
        under_way = None

    parts = fragments_of(len(common), fragments)
    for step in range(STEPS):
        if step % interval == 0:
            if under_way:
                land()
            part = parts[step // interval % fragments]
            changes = [r.x[part] - common[part] for r in reference]
            mean = np.mean(changes, axis=0)
            if rescale and mean.any():  # as long as the changes are, unless they are opposed
                mean *= min(np.sqrt(np.mean(np.square(changes).sum(1)) / np.square(mean).sum()), np.sqrt(3))
            under_way = part, mean, [r.x[part].copy() for r in reference]
            if not delay:
                land()
        for r in reference:
            r.x = r.x.astype(float)
            r.apply(r.gradient())
        if under_way and step % interval == delay - 1:
            land()
    assert max(relative_error(w.model, r.x) for w, r in zip(workers, reference, strict=True)) < 1e-5
    assert relative_error(torch.cat(workers[0].algorithm.common).numpy(), common) < 1e-5


@pytest.mark.parametrize(("muon", "keep", "kept"), [(True, -1.0, 1.0), (False, -1.0, 0.5), (True, 0.25, 0.25)])
def test_each_round_has_the_delay_of_its_settings_and_keeps_what_fits_the_optimizer(muon, keep, kept):
    """A transfer ends as it began, whatever the settings are by then."""
    plain = {"period": PERIOD, "rescale": False, "compression": "none", "keep": keep}

    def member(group):
        model = [torch.zeros(4)]
        algorithm = LocalSettings(**plain).create(model, "run")
        algorithm.muon = muon
        algorithm.reset(model, group, make_round([1, 1]))
        seen = []
        for id, delay in enumerate((1, 0, 1, -1), 1):
            algorithm.settings = LocalSettings(**plain, delay=delay)
            model[0] += 2.0 * group.rank  # the mean is half of that
            land(algorithm.before_forward(model, group, make_round([1, 1], id=id)))
            assert algorithm.can_be_followed == (delay < 1)
            algorithm.settings = LocalSettings(**plain, delay=0 if delay == 1 else 1)
            model[0] += 8.0  # a step
            land(algorithm.after_step(model))
            seen.append((float(algorithm.common[0][0]), float(model[0][0])))
        return seen

    first = (1.0, 1.0 + 8 * kept)
    second = (first[1] + 1, first[1] + 9)
    third = (second[1] + 1, second[1] + 1 + 8 * kept)
    fourth = (third[1] + 1, third[1] + 9)
    assert simulate([1, 1], member) == [[first, second, third, fourth]] * 2


@pytest.mark.parametrize("compression", ["none", "levels2"])
@pytest.mark.parametrize(("members", "common", "agreement"), [(2, 1.0, 1.0), (2, 0.0, 0.5), (4, 0.0, 0.25)])
def test_how_far_changes_agree(members: int, common: float, agreement: float, compression: str) -> None:
    """1 if all learn the same, 1/N if they learn each something else."""

    def member(group):
        model = [torch.zeros(4096)]
        algorithm = LocalSettings(period=PERIOD, compression=compression).create(model, "run")
        algorithm.reset(model, group, make_round([1] * members))
        assert algorithm.agreement is None
        model[0] += common
        if not common:
            model[0].view(members, -1)[group.rank] = 1.0
        land(algorithm.before_forward(model, group, make_round([1] * members)))
        return algorithm.agreement

    assert simulate([1] * members, member) == [pytest.approx(agreement, rel=0.01)] * members


@pytest.mark.parametrize("fragments", [1, 4])
def test_how_far_changes_agree_in_each_layer(fragments: int) -> None:
    """All learn the same in the first layer, each something else in the second, and nobody anything in the third."""
    layers = layers_of([("a.weight", 0, 0), ("b.weight", 0, 1024), ("c.weight", 0, 1536)], [2048])

    def member(group):
        model = [torch.zeros(2048)]
        settings = LocalSettings(period=fragments, fragments=fragments, compression="none")
        algorithm = settings.create(model, "run")
        algorithm.layers = layers
        algorithm.reset(model, group, make_round([1, 1]))
        model[0][:1024] = 1.0
        model[0][1024 + 256 * group.rank : 1280 + 256 * group.rank] = 1.0
        for number in range(fragments):
            land(algorithm.before_forward(model, group, replace(make_round([1, 1]), id=number + 1, exchanges=number)))
        return algorithm.agreements

    assert simulate([1, 1], member) == [{"a": 1.0, "b": 0.5}] * 2


PLAIN = {"period": PERIOD, "rescale": False}
CODECS = {
    "two rounds of 2 bits": LocalSettings(**PLAIN, compression="levels2:block=8"),
    "of 1 bit, all workers": LocalSettings(**PLAIN, compression="levels1:block=8", hierarchical=False),
    "fragments": LocalSettings(**PLAIN, compression="levels2:block=8", fragments=2),
    "sparse": SparseSettings(period=PERIOD, compression="topk:k=8", error_decay=1.0),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("node_sizes", [[1, 1], [2, 1, 2], [1] * 7])
def test_nothing_is_lost(node_sizes, name):
    """The common model and what the residuals hold is the sum of all mean changes, whatever the codec does."""
    settings, size = CODECS[name], sum(node_sizes)

    def member(group):
        worker = TorchWorker(settings, group, Problem(size))
        worker.begin(make_round(node_sizes))
        algorithm, changes = worker.algorithm, []
        for id in range(1, 9):
            for _ in range(3):
                worker.iterate(None)
            before = torch.cat(algorithm.common).double()
            places = algorithm._fragments[(id - 1) % settings.fragments]
            mask = torch.cat([in_place(c, place) for c, place in zip(algorithm.common, places, strict=True)])
            changes.append((torch.cat(list(worker.parameters)).double() - before) * mask)
            worker.algorithm.before_forward(worker.parameters, group, make_round(node_sizes, id=id)).apply()
        return (
            sum(changes),
            torch.cat(algorithm.common).double(),
            whole_residuals(algorithm, own=True),
            whole_residuals(algorithm, own=False),
        )

    changes, commons, own, results = zip(*simulate(node_sizes, member), strict=True)
    assert all(torch.equal(common, commons[0]) for common in commons)
    gone = commons[0] - torch.from_numpy(Problem(size).start).double()
    # A node counts by its workers: its residual is of its workers' mean, times nodes / workers.
    units = len(node_sizes) if settings.hierarchical else size
    left = sum(own) / units + sum(results)
    torch.testing.assert_close(gone + left, sum(changes) / size, rtol=1e-4, atol=1e-5)
    assert left.abs().max() > 1e-3


def in_place(x, place):
    mask = torch.zeros(len(x), dtype=torch.float64)
    mask[place] = 1
    return mask


def whole_residuals(algorithm, *, own):
    """One kind of residuals of all fragments, in one tensor like the model."""
    whole = [torch.zeros(len(c), dtype=torch.float64) for c in algorithm.common]
    for places, fragment in zip(algorithm._fragments, algorithm._mean_change.feedback, strict=True):
        for x, place, feedback in zip(whole, places, fragment, strict=True):
            if own:
                x[place] += feedback.residual
            for start, residual in () if own else feedback.results.items():
                x[place][start : start + len(residual)] += residual
    return torch.cat(whole)


@pytest.mark.parametrize(
    ("settings", "members", "verbs"),
    [
        (LocalSettings(64, compression="levels2"), 2, {"all_gather"}),
        (LocalSettings(64, compression="levels2"), 3, {"all_to_all", "all_gather"}),
        (SparseSettings(), 5, {"all_gather"}),
        (SparseSettings(), 6, {"all_to_all", "all_gather"}),
    ],
)
def test_one_round_or_two(settings, members, verbs):
    """Two members, or up to five with a sparse codec, send all others their payloads; more members use two rounds."""

    def member(group):
        worker = TorchWorker(settings, Recording(group), Problem(members))
        worker.begin(make_round([1] * members))
        worker.iterate(make_round([1] * members))
        return {verb for verb, _, _ in worker.group.log} & {"all_gather", "all_to_all"}

    assert simulate([1] * members, member) == [verbs] * members


@pytest.mark.parametrize("node_sizes", [[1] * 3, [1] * 6, [2, 1, 1]])
def test_sums_over_those_that_have_sent_an_element(node_sizes):
    """Gathered, by owners of chunks, and of nodes: every element is divided by its own number of contributors."""
    settings, size = SparseSettings(compression="topk:k=8", divisor="contributors"), sum(node_sizes)
    codec = settings.make_codec()
    random = np.random.default_rng(0)
    moves = [torch.from_numpy(random.standard_normal(len(Problem(1).start)).astype(np.float32)) for _ in range(size)]

    def member(group):
        worker = TorchWorker(settings, group, Problem(size))
        worker.begin(make_round(node_sizes))
        start = torch.cat(worker.algorithm.common)
        for x, move in zip(worker.parameters, moves[group.rank].split([SPLIT, len(start) - SPLIT]), strict=True):
            x.add_(move)
        worker.algorithm.before_forward(worker.parameters, group, make_round(node_sizes)).apply()
        return torch.cat(worker.algorithm.common) - start

    def sent(x):
        payload, out = codec.empty(x.numel(), x.device), torch.empty_like(x)
        codec.encode(x, payload)
        codec.decode(payload, out)
        return out

    expected, contributors = [], set()
    for tensors in zip(*(move.split([SPLIT, len(move) - SPLIT]) for move in moves), strict=True):
        nodes = [sum(node) * len(node_sizes) / size for node in by_node(tensors, node_sizes)]
        parts = torch.stack([sent(node) for node in nodes])
        mean = parts.sum(0) / (parts != 0).sum(0).clamp(min=1)
        expected.append(sent(mean) if len(node_sizes) > 5 else mean)
        contributors |= set((parts != 0).sum(0).tolist())
    assert {1, 2} <= contributors
    for change in simulate(node_sizes, member):
        torch.testing.assert_close(change, torch.cat(expected), rtol=1e-5, atol=1e-5)


def by_node(tensors, node_sizes):
    rest = iter(tensors)
    return [[next(rest) for _ in range(size)] for size in node_sizes]


@pytest.mark.parametrize("compression", ["levels1:block=32", "topk:k=8"])
@pytest.mark.parametrize("members", [2, 6])
def test_error_feedback_reaches_what_rounding_cannot(compression, members):
    """Workers that move alike, some elements by a hundredth of the others: these only move through residuals."""
    sizes = (SPLIT, len(Problem(1).start) - SPLIT)
    moves = [torch.linspace(0.01, 1, size) * (-1.0) ** torch.arange(size) for size in sizes]
    exact = 40 * torch.cat(moves)

    def moved(decay):
        settings = LocalSettings(64, compression=compression, error_decay=decay)

        def member(group):
            worker = TorchWorker(settings, group, Problem(members))
            worker.begin(make_round([1] * members))
            start = torch.cat(worker.algorithm.common)
            for id in range(1, 41):
                for x, move in zip(worker.parameters, moves, strict=True):
                    x.add_(move)
                worker.algorithm.before_forward(worker.parameters, group, make_round([1] * members, id=id)).apply()
            return torch.cat(worker.algorithm.common) - start

        return simulate([1] * members, member)[0]

    with_feedback, without = ((moved(decay) - exact).abs().max() for decay in (1.0, 0.0))
    assert with_feedback < 4 < 10 < without


@pytest.mark.parametrize("compression", ["none", "float16"])
@pytest.mark.parametrize("delay", [0, 1])
def test_in_16_bits_the_common_model_gains_what_workers_learn(compression, delay):
    """Also where c lies between two numbers of 16 bits, of which workers can only begin with one."""
    settings = LocalSettings(4, rescale=False, compression=compression, delay=delay, keep=1.0)
    unit, rounds = 2.0**-7, 9  # a unit in the last place of bfloat16 at 1

    def member(group):
        model = [torch.ones(4, dtype=torch.bfloat16)]
        algorithm = settings.create(model, "run")
        algorithm.reset(model, group, make_round([1] * 3))
        products, judge = [], algorithm._outliers.judge
        algorithm._outliers.judge = lambda *told: (products.extend(row[2] for row in told[0]), judge(*told))[1]
        for id in range(1, rounds + 1):
            land(algorithm.before_forward(model, group, make_round([1] * 3, id=id)))
            land(algorithm.after_step(model))
            model[0] += unit * (group.rank == 0)
        return algorithm.common[0].tolist(), products

    common, products = simulate([1] * 3, member)[0]
    assert common == pytest.approx([1 + (rounds - 1) * unit / 3] * 4, rel=1e-4)
    assert len(products) == 3 * rounds and max(map(abs, products)) < unit**2 / 50  # nobody else has a change


def test_a_mean_that_is_not_finite_changes_no_common_model(caplog):
    """A change that a codec cannot hold: all go back to the common model, and the next round works."""

    def member(group):
        worker = TorchWorker(LocalSettings(64, compression="float16"), group, Problem(3))
        worker.begin(make_round([1] * 3))
        common = worker.model
        if group.rank == 1:
            worker.parameters[0][3] = 1e6
        worker.algorithm.before_forward(worker.parameters, group, make_round([1] * 3)).apply()
        stayed = np.array_equal(worker.model, common)
        worker.parameters[0].add_(1.0)
        worker.algorithm.before_forward(worker.parameters, group, make_round([1] * 3, id=2)).apply()
        return stayed, np.allclose(worker.model[:SPLIT], common[:SPLIT] + 1, atol=1e-2)

    assert simulate([1] * 3, member) == [(True, True)] * 3
    assert caplog.text.count(golden.text("exchange.nonfinite_change")) == 3


def test_a_failed_exchange_keeps_the_residuals():
    def member(group):
        settings = LocalSettings(64, compression="levels2", hierarchical=False)
        worker = TorchWorker(settings, group, Problem(3))
        worker.begin(make_round([1] * 3))
        worker.iterate(None)
        worker.algorithm.before_forward(worker.parameters, group, make_round([1] * 3)).apply()
        worker.iterate(None)
        before = whole_residuals(worker.algorithm, own=True)
        kept = [x.clone() for x in worker.parameters]
        if group.rank == 2:
            raise ExchangeError("lost")
        with pytest.raises(ExchangeError):
            worker.algorithm.before_forward(worker.parameters, group, make_round([1] * 3, id=2)).apply()
        assert torch.equal(whole_residuals(worker.algorithm, own=True), before) and before.any()
        assert all(map(torch.equal, kept, worker.parameters))

    with pytest.raises(ExchangeError, match="lost"):
        simulate([1] * 3, member, timeout_s=10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"period": 10, "fragments": 4}, golden.pattern("plan.no_multiple_of_fragments")),
        ({"period": 8, "fragments": 4, "delay": 2}, golden.pattern("plan.delay_at_most", limit=1)),
        ({"period": 1, "delay": 1}, golden.pattern("plan.delay_at_most", limit=0)),
    ],
)
def test_settings_that_do_not_fit(options, words):
    with pytest.raises(ConfigError, match=words):
        LocalSettings(**options)


def test_only_a_sparse_codec_has_contributors():
    with pytest.raises(ConfigError, match=golden.pattern("exchange.divisor")):
        SparseSettings(compression="levels2", divisor="contributors")


def test_the_server_chooses_how_often_a_fragment_is_exchanged():
    """Of a whole model a period has as many rounds as fragments; there is time for the delay."""
    settings = LocalSettings(period=0, fragments=4, delay=2)
    assert settings.schedule().period == 3
    assert settings.at(None, 10).period == 40 and settings.at(None, 10).schedule().period == 10
    assert settings.at(None, 1).schedule().period == 3
    ramped = LocalSettings(period=64, fragments=4, warm_share=0.1)
    assert [ramped.at(p).schedule().period for p in (0.0, 0.03, 0.1)] == [1, 4, 16]
