"""The share of a run between answers, and the learning rates that follow it."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from lsgd.client.iteration.grants import ProgressEstimate
from lsgd.errors import ConfigError
from lsgd.learning_rate import RateSchedules, factor, set_rates
from lsgd.plan.run import RunSettings
from tests import golden

ITERATIONS = 800


class Bench:
    """A worker whose iterations and clock the test moves."""

    def __init__(self, workers: int = 2, **settings: float) -> None:
        self.done, self.now = 0, 100.0
        self.run = RunSettings(workers=workers, **settings)
        self.progress = ProgressEstimate(self.run, workers, lambda: self.done, lambda: self.now)

    def make(self, iterations: int) -> list[float]:
        """Make iterations one by one, and return the progress in the middle of each."""
        shares = []
        for _ in range(iterations):
            shares.append(self.progress.share(ahead=0.5))
            self.done += 1
        return shares


@pytest.mark.parametrize(("workers", "own"), [(1, 1.0), (2, 0.5), (2, 0.25), (4, 0.1)])
def test_answers_in_blocks_make_no_jumps(workers: int, own: float) -> None:
    """A worker that makes ``own`` of the run's iterations, each answer at 16 of them."""
    bench = Bench(workers, iterations=ITERATIONS)
    shares: list[float] = []
    for block in range(int(ITERATIONS * own) // 16):
        bench.progress.answered(block * 16 / own / ITERATIONS, bench.done)
        shares += bench.make(16)
    step = 1 / own / ITERATIONS
    assert shares == sorted(shares)
    settled = shares[16 * 3 :]  # three blocks tell its share
    assert max(b - a for a, b in pairwise(settled)) < 3 * step
    error = [abs(share - (i + 0.5) * step) for i, share in enumerate(shares)]
    assert max(error) < 16 * step, "never further than a block from the truth"
    assert max(error[16 * 3 :]) < 4 * step
    if own * workers == 1:
        assert max(error) < 1e-9, "an equal share is known from the start"


def test_it_waits_where_it_was_too_fast_and_goes_back_only_with_the_run() -> None:
    bench = Bench(2, iterations=100)
    bench.progress.answered(0.0, bench.done)
    assert bench.make(10)[-1] == pytest.approx(0.19)
    bench.progress.answered(0.1, bench.done)  # the other one was slower
    assert bench.make(5) == pytest.approx([0.19] * 5), "where it was, until the run is there"
    bench.progress.answered(0.1, 10)  # what was asked five iterations ago
    assert 0.19 < bench.make(10)[-1] < 0.32
    bench.progress.answered(0.5, bench.done)
    assert bench.progress.share() == 0.5
    bench.progress.answered(0.3, bench.done)  # all with the model were lost: it goes on from a checkpoint
    assert bench.progress.share() == pytest.approx(0.3)
    assert 0.3 < bench.progress.share(ahead=0.5) < 0.35
    bench.done += 1000
    assert bench.progress.share() == 1.0


def test_time_is_progress_in_a_run_by_time_only() -> None:
    bench = Bench(seconds=20.0)
    bench.now += 5.0
    assert bench.progress.share() == 0.0, "the run begins with the first answer"
    bench.progress.answered(0.0, bench.done)
    shares = []
    for _ in range(10):
        bench.done, bench.now = bench.done + 7, bench.now + 1.0
        shares.append(bench.progress.share())
    assert shares == pytest.approx([i / 20 for i in range(1, 11)])
    counted = Bench(iterations=100)
    counted.progress.answered(0.0, counted.done)
    counted.now += 1000.0
    assert counted.progress.share() == 0.0


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": nn.Linear(1, 1).parameters(), "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def test_each_group_has_its_base_and_the_base_survives_the_optimizers_state() -> None:
    optimizer = optimizer_of(0.1, 0.02)
    set_rates(optimizer, factor("linear", 0.75, 0.0, 0.0))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.005])
    again = optimizer_of(0.1, 0.02)
    again.load_state_dict(optimizer.state_dict())
    set_rates(again, factor("linear", 0.5, 0.0, 0.0))
    assert [group["lr"] for group in again.param_groups] == pytest.approx([0.05, 0.01])
    again.add_param_group({"params": nn.Linear(1, 1).parameters(), "lr": 0.4})
    set_rates(again, factor("linear", 0.25, 0.0, 0.0))
    assert again.param_groups[2]["lr"] == pytest.approx(0.3)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=rate)
    for progress in (0.25, 0.5):
        set_rates(optimizer, factor("linear", progress, 0.0, 0.0))
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


def test_groups_that_share_a_tensor_share_its_base() -> None:
    rate, groups = torch.tensor(0.1), [{"params": nn.Linear(1, 1).parameters()} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=rate)
    for progress in (0.25, 0.5):
        set_rates(optimizer, factor("linear", progress, 0.0, 0.0))
    assert float(rate) == pytest.approx(0.05)


def test_the_last_schedule_of_an_optimizer_counts_and_others_are_refused() -> None:
    bench, one, other = Bench(iterations=100), optimizer_of(0.1), optimizer_of(0.1)
    schedules = RateSchedules(lambda: bench.progress.share(ahead=0.5), [one, other])
    bench.progress.answered(0.5, bench.done)
    schedules.add([one, other], "wsd", 0.0, 0.2)
    schedules.add([one], "linear", 0.0, 0.0)
    schedules.follow()
    assert one.param_groups[0]["lr"] == pytest.approx(0.1 * 0.49)
    assert other.param_groups[0]["lr"] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match=golden.pattern("progress.other_optimizer")):
        schedules.add([optimizer_of(0.1)], "wsd", 0.0, 0.2)
    with pytest.raises(ConfigError, match=golden.pattern("progress.no_end")):
        RateSchedules(bench.progress.share, [one], has_end=lambda: False).add([one], "wsd", 0.0, 0.2)


@pytest.mark.parametrize("without", [{"lr": None}, {}], ids=["none", "no-entry"])
def test_an_optimizer_may_have_no_learning_rate(without) -> None:
    """Adafactor's rate is None if it chooses its steps itself; others have no such entry."""
    other = optimizer_of(0.1)
    del other.param_groups[0]["lr"]
    other.param_groups[0].update(without)
    with pytest.raises(ConfigError, match=golden.pattern("progress.no_learning_rate")):
        RateSchedules(lambda: 0.0, [other]).add([other], "wsd", 0.0, 0.2)
