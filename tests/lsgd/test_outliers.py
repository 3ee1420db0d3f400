"""Members whose changes do not fit to the others': who is found, when, and what the others lose by it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import nn

from lsgd.algorithms.local import LocalSettings, LocalSGD, SparseSettings
from lsgd.algorithms.outliers import PATIENCE, STRIKES, Outliers
from lsgd.errors import OutlierError
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, land, simulate
from tests import golden

from .training import make_round

T = TypeVar("T")

SIZE, BAD, PERIOD = 4, 2, 4


def measured(
    changes: torch.Tensor, left_out: set[int] | None = None, usual: float = 0.0, steps: float = 1.0
) -> list[list[float]]:
    """What members send whose changes are the rows, if those left out send zeros; all but one know what is usual.

    All have made one step, but for one that has made as many as it says.
    """
    changes = changes.double()
    sent = changes.clone()
    sent[sorted(left_out or ())] = 0.0
    mean = sent.mean(0)
    known = [0.0, *[usual] * (len(changes) - 1)]
    made = [steps if rank == BAD else 1.0 for rank in range(len(changes))]
    *own, of_mean = (float(x.square().sum()) for x in (*changes, mean))
    others = sent.sum(0) - sent
    products, squares = (changes * others).sum(1).tolist(), others.square().sum(1).tolist()
    return [[each, of_mean, *more] for each, *more in zip(own, products, squares, known, made, strict=True)]


def changes(bad: float, noise: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Changes with something in common, of which one is multiplied."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.ones(1000) + noise * torch.randn(SIZE, 1000, generator=generator)
    found[BAD] *= bad
    return found


def test_a_long_change_is_left_out_at_once_and_counts_again_when_it_has_fitted_as_often() -> None:
    outliers = Outliers()
    assert golden.text("outliers.usual_one") in outliers.judge(measured(changes(30.0)))[BAD]
    assert outliers.left_out == {BAD}
    for again in range(STRIKES):
        assert outliers.left_out == {BAD}, again
        assert outliers.judge(measured(changes(1.0, seed=again), outliers.left_out)) == {}
    assert outliers.left_out == set()


@pytest.mark.parametrize(("steps", "found"), [(1.0, [BAD]), (2.0, [BAD]), (4.0, [])])
def test_a_change_of_many_steps_may_be_as_many_times_as_long(steps: float, found: list[int]) -> None:
    assert list(Outliers().judge(measured(changes(30.0), steps=steps))) == found


def test_of_three_one_is_left_out_until_it_fits() -> None:
    outliers = Outliers()
    for seed in range(PATIENCE):
        rows = changes(30.0, seed=seed)[: BAD + 1]
        assert list(outliers.judge(measured(rows, outliers.left_out))) == ([] if seed else [BAD])
        assert outliers.left_out == {BAD}, seed
    assert outliers.gives_up(BAD)
    for seed in range(PATIENCE + STRIKES - 1):
        assert outliers.left_out == {BAD}, seed
        outliers.judge(measured(changes(1.0, seed=seed)[: BAD + 1], outliers.left_out))
    assert outliers.left_out == set()


def test_a_long_change_is_compared_with_what_was_usual_in_the_rounds_before() -> None:
    """Most members have learned their samples and change nothing, and one has met a hard one."""
    outliers, newcomer = Outliers(), Outliers()
    assert outliers.judge(measured(10 * changes(1.0))) == {}
    for _ in range(100):  # learned
        assert outliers.judge(measured(changes(20.0), usual=outliers.usual)) == {}
    assert newcomer.judge(measured(changes(1.0), usual=outliers.usual)) == {}
    assert newcomer.usual == pytest.approx(10 * math.sqrt(2000) * 0.99**101, rel=0.05)
    for _ in range(100):
        outliers.judge(measured(changes(20.0), usual=outliers.usual))
    assert outliers.left_out == {BAD}  # that is too long ago


@pytest.mark.parametrize("bad", [-1.0, 0.01])
def test_a_change_that_does_not_agree_is_left_out_after_three_rounds(bad: float) -> None:
    outliers, found = Outliers(), []
    for seed in range(2 * PATIENCE):
        rows = changes(bad, seed=seed)
        if bad > 0:
            rows[BAD] = torch.randn(1000, generator=torch.Generator().manual_seed(100 + seed))
        found.append(outliers.judge(measured(rows, outliers.left_out)))
        assert outliers.gives_up(BAD) == (seed + 1 >= PATIENCE)
    assert [list(each) for each in found] == [[]] * (STRIKES - 1) + [[BAD]] + [[]] * (2 * PATIENCE - STRIKES)
    assert golden.text("outliers.cosine") in found[STRIKES - 1][BAD]


@pytest.mark.parametrize(
    "rows",
    [
        changes(1.0),
        changes(3.0),
        changes(-1.0, noise=10.0),  # nobody agrees with anybody
        torch.tensor([[1.0, 0.0], [-1.0, 0.1], [0.0, 1.0], [0.1, -1.0]]),  # each has data of its own
        torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]),  # who is right?
        torch.cat([changes(1.0)[:3], torch.zeros(1, 1000)]),  # its model was not finite
        changes(-1.0)[1:3],
        torch.full((4, 2), math.inf),
    ],
)
def test_nobody_is_left_out_without_a_clear_majority(rows: torch.Tensor) -> None:
    outliers = Outliers()
    for _ in range(PATIENCE):
        assert outliers.judge(measured(rows)) == {}
    assert outliers.left_out == set() and not any(outliers.gives_up(rank) for rank in range(SIZE))


# -- trained -------------------------------------------------------------------------------------------------------


TEACHER = torch.randn(64, generator=torch.Generator().manual_seed(1))


def trained(
    how: str, rounds: int, result: Callable[[SimulatedWorker], T], kind: type[LocalSettings], **settings: object
) -> list[T]:
    """Train a regression with four workers, one of them as it says; return the result of each."""
    chosen = kind(period=PERIOD, **settings)  # type: ignore[arg-type]

    def member(group: SimulatedGroup) -> T:
        model = nn.Linear(64, 1, bias=False)
        nn.init.zeros_(model.weight)
        worker = SimulatedWorker.of_model(group, chosen, model, torch.optim.SGD(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(group.rank)
        sign = {"flips": -1.0, "explodes": 1000.0}.get(how, 1.0) if group.rank == BAD else 1.0
        for _ in range(rounds * chosen.schedule().period):
            x = torch.randn(64, 64, generator=generator)
            y = (x @ TEACHER)[:, None]
            if how == "noise" and group.rank == BAD:
                y = 8 * torch.randn(y.shape, generator=generator)
            worker.step(lambda x=x, y=y: sign * nn.functional.mse_loss(model(x), y))
        return result(worker)

    return simulate((1,) * SIZE, member)


@torch.no_grad()
def consensus(worker: SimulatedWorker) -> torch.Tensor:
    counts = torch.tensor([float(worker.algorithm.counts)])
    mine = worker.parameters[0] * worker.algorithm.counts
    for x in (counts, mine):
        worker.average(x)
    return mine / counts


def train(how: str, rounds: int, kind: type[LocalSettings] = LocalSettings, **settings: object) -> float:
    """Return how much the consensus has learnt, in 0 … 1; with NaN, -inf."""
    error = trained(how, rounds, consensus, kind, **settings)[0] - TEACHER
    learnt = 1 - float(error.square().sum() / TEACHER.square().sum())
    return learnt if math.isfinite(learnt) else -math.inf


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        *((how, {}) for how in ("flips", "noise", "explodes")),
        ("flips", {"compression": "none", "rescale": False}),
        ("explodes", {"delay": 2}),
    ],
)
def test_the_others_learn_nearly_as_well_as_without_it(how: str, settings: dict[str, object]) -> None:
    rounds = PATIENCE - STRIKES + 1  # it does not give up yet
    right, wrong, spoilt = (train("", rounds, **settings), train(how, rounds, **settings), 0.0)
    spoilt = train(how, rounds, **settings, drop_outliers=False)
    assert 0.3 < right <= 1.0
    assert wrong > 0.6 * right and wrong > spoilt


@pytest.mark.parametrize("kind", [LocalSettings, SparseSettings])
@pytest.mark.parametrize("compression", ["none", "levels1", "levels2", "topk", "minmax8"])
def test_a_flipped_sign_is_found_sends_zeros_and_keeps_nothing_for_later(kind, compression: str) -> None:
    """And it does not count in a consensus that begins a generation, as those do after a leave."""

    def look(worker: SimulatedWorker) -> tuple[set[int], bool, list[float]]:
        algorithm = worker.algorithm
        assert isinstance(algorithm, LocalSGD)
        left_out = algorithm._outliers.left_out
        worker.begin(make_round((1,) * SIZE, id=100, number=2))
        return left_out, algorithm.counts, [float(each.residual.norm()) for (each,) in algorithm._mean_change.feedback]

    found = trained("flips", STRIKES + 4, look, kind, compression=compression)
    assert [left_out for left_out, *_ in found] == [{BAD}] * SIZE
    assert [counts for _, counts, _ in found] == [rank != BAD for rank in range(SIZE)]
    if compression != "none":
        assert [norm == 0 for *_, (norm,) in found] == [rank == BAD for rank in range(SIZE)]


def test_one_that_was_started_again_has_lost_its_residuals_in_every_fragment() -> None:
    def member(group: SimulatedGroup) -> list[bool]:
        model, generator = nn.Linear(4096, 1, bias=False), torch.Generator().manual_seed(group.rank)
        settings, optimizer = LocalSettings(period=4, fragments=4), torch.optim.SGD(model.parameters(), lr=1.0)
        worker = SimulatedWorker.of_model(group, settings, model, optimizer)
        for _ in range(8):
            change = torch.randn(4096, generator=generator)
            worker.step(lambda change=change: model.weight[0] @ change)
        worker.begin(replace(make_round((1,) * SIZE, id=100, number=2), new=(BAD,)))
        algorithm = worker.algorithm
        assert isinstance(algorithm, LocalSGD)
        return [bool(each.residual.any()) for (each,) in algorithm._mean_change.feedback]

    assert simulate((1,) * SIZE, member) == [[rank != BAD] * 4 for rank in range(SIZE)]


@pytest.mark.parametrize(("divisor", "times"), [("members", 4 / 3), ("contributors", 1.0)])
def test_the_mean_is_that_of_those_that_count(divisor: str, times: float) -> None:
    algorithm = SparseSettings(divisor=divisor).create([torch.zeros(4096)])
    sums = [[1.0, 0.25, 1.0, 3.0, 0.0, 1.0]] * SIZE
    assert algorithm._lengths(sums, ())[0] == 1.0
    assert algorithm._lengths(sums, {BAD})[0] == pytest.approx(times)


@pytest.mark.parametrize(
    ("node_sizes", "sign", "found"), [((2, 1, 1, 1), 1.0, set()), ((2, 1, 1, 1), -1.0, {BAD}), ((2, 2, 2), -1.0, {BAD})]
)
def test_nodes_that_send_few_elements_are_compared_with_those_of_as_many_workers(node_sizes, sign, found) -> None:
    """Nobody in a node of two knows which elements of its own have left the node."""
    common = torch.randn(4096, generator=torch.Generator().manual_seed(1))

    def member(group: SimulatedGroup) -> set[int]:
        model, left_out = nn.Linear(4096, 1, bias=False), set()
        nn.init.zeros_(model.weight)
        settings, optimizer = SparseSettings(period=1), torch.optim.SGD(model.parameters(), lr=1.0)
        worker = SimulatedWorker.of_model(group, settings, model, optimizer)
        generator = torch.Generator().manual_seed(group.rank)
        for _ in range(20):
            change = (sign if group.rank == BAD else 1.0) * common + 0.5 * torch.randn(4096, generator=generator)
            worker.step(lambda change=change: -(model.weight[0] @ change))
            left_out |= worker.algorithm._outliers.left_out
        return left_out

    assert simulate(node_sizes, member) == [found] * sum(node_sizes)


@pytest.mark.parametrize(("steps", "left_out"), [([1] * 6, {BAD}), ([30] * 6, set()), ([30] * 6 + [1] * 3, {BAD})])
@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"fragments": 2}])
def test_a_worker_with_more_steps_may_change_more(
    settings: dict[str, int], steps: list[int], left_out: set[int]
) -> None:
    """Those that count were made since the last exchange."""

    def member(group: SimulatedGroup) -> set[int]:
        model = [torch.zeros(64)]
        algorithm = LocalSettings(period=4, compression="none", **settings).create(model)  # type: ignore[arg-type]
        algorithm.reset(model, group, make_round((1,) * SIZE))
        for id, often in enumerate(steps, 1):
            land(algorithm.before_forward(model, group, make_round((1,) * SIZE, id=id)))
            for _ in range(often if group.rank == BAD else 1):
                land(algorithm.after_step(model))
            model[0] += 30 if group.rank == BAD else 1
        land(algorithm.before_forward(model, group, make_round((1,) * SIZE, id=len(steps) + 1)))
        land(algorithm.settle(model))
        return algorithm._outliers.left_out

    assert simulate((1,) * SIZE, member) == [left_out] * SIZE


def test_a_worker_that_stays_wrong_ends_with_an_error_that_says_what_to_do() -> None:
    with pytest.raises(OutlierError, match=golden.pattern("outliers.drop_outliers")):
        train("flips", PATIENCE + 2)
