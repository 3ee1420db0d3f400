"""Torch's schedulers at a worker's place, however it got there; and rates that begin anew instead."""

import logging
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from lsgd.errors import ConfigError, LsgdError
from lsgd.schedulers import (
    LOOK_AFTER,
    Followed,
    Loop,
    Rates,
    Schedulers,
    bring,
    count_of,
    counts,
    length_of,
)
from lsgd.shards import load_optimizer
from tests import golden

N = 60
"""Steps of a loop."""


def _fall(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def _warm(optimizer) -> schedulers.SequentialLR:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=10), schedulers.CosineAnnealingLR(optimizer, N - 10)]
    return schedulers.SequentialLR(optimizer, parts, [10])


def _three(optimizer) -> schedulers.SequentialLR:
    parts = [
        schedulers.ConstantLR(optimizer, 0.5, total_iters=100),
        schedulers.ExponentialLR(optimizer, 0.9),
        schedulers.LinearLR(optimizer, 1.0, 0.1, total_iters=20),
    ]
    return schedulers.SequentialLR(optimizer, parts, [10, 40])


def _chained(optimizer) -> schedulers.ChainedScheduler:
    return schedulers.ChainedScheduler(
        [schedulers.LinearLR(optimizer, 0.1, total_iters=10), schedulers.CosineAnnealingLR(optimizer, N)], optimizer
    )


KINDS: dict[str, Callable[[torch.optim.Optimizer], schedulers.LRScheduler]] = {
    "cosine": partial(schedulers.CosineAnnealingLR, T_max=N),
    "cosine-min": partial(schedulers.CosineAnnealingLR, T_max=N, eta_min=0.01),
    "restarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=15),
    "step": partial(schedulers.StepLR, step_size=25),
    "multi-step": partial(schedulers.MultiStepLR, milestones=[10, 40]),
    "exponential": partial(schedulers.ExponentialLR, gamma=0.95),
    "polynomial": partial(schedulers.PolynomialLR, total_iters=N, power=2.0),
    "linear": partial(schedulers.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=N),
    "lambda": partial(schedulers.LambdaLR, lr_lambda=partial(_fall, num_training_steps=N)),
    "multiplicative": partial(schedulers.MultiplicativeLR, lr_lambda=lambda step: 0.97),
    "one-cycle": partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=N + 1),
    "cyclic": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=7),
    "warm-up": _warm,
    "sequential": _three,
    "chained": _chained,
}


def made(kind: str, *, lr: float = 0.1) -> tuple[torch.optim.SGD, schedulers.LRScheduler]:
    one = optimizer(lr)
    return one, KINDS[kind](one)


def optimizer(lr: float = 0.1) -> torch.optim.SGD:
    layers = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "lr": lr / 2}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def rates(one: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in one.param_groups]


def loop(step: int = 0, *, steps: int = N, middle: float = 0.0, share: float = float("inf")) -> Loop:
    return Loop(step, steps, not steps, middle, share)


def alone(kind: str) -> list[list[float]]:
    """Return the rates of each step of a script that nothing interrupts."""
    one, scheduler = made(kind)
    seen = []
    for _ in range(N):
        seen.append(rates(one))
        one.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("restored", ["nothing", "before", "after", "taken over"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_scheduler_is_right_from_any_place_on(kind, restored) -> None:
    """Of a late joiner, one that resumes (the scheduler made before or after the join), and one that takes over."""
    wanted = alone(kind)
    for place in [0, 1, 10, N - 1, *random.Random(kind).sample(range(2, N), 3)]:
        other, its = made(kind)
        bring(its, place)
        saved = other.state_dict()
        one = optimizer()
        if restored == "after":
            load_optimizer(one, saved)
        scheduler = KINDS[kind](one)
        if restored == "before":
            load_optimizer(one, saved)
        followed = Followed(scheduler, None)
        for step in range(place, N):
            followed.follow(loop(step))
            if restored == "taken over" and step == place:
                load_optimizer(one, made(kind)[0].state_dict())  # of a source at another place
            assert rates(one) == pytest.approx(wanted[step], rel=1e-9), (place, step)
            one.step()
            scheduler.step()


@pytest.mark.parametrize("steps_too", [False, True])
@pytest.mark.parametrize("kind", ["cosine", "polynomial", "warm-up", "chained", "lambda", "linear"])
def test_in_a_plan_with_an_end_it_goes_through_all_of_itself(kind, steps_too) -> None:
    """A fast worker makes 90 of the run's iterations, a slow one 30; the script's own calls do not count."""
    wanted = alone(kind)
    for made_by_me in (30, 60, 90):
        one, scheduler = made(kind)
        followed = Followed(scheduler, None)
        for iteration in range(made_by_me):
            middle = (iteration + 0.5) / made_by_me
            followed.follow(loop(iteration, steps=0, middle=middle))
            assert rates(one) == pytest.approx(wanted[int(middle * N)], rel=1e-9)
            one.step()
            if steps_too:
                scheduler.step()


def test_a_schedule_by_epoch_follows_its_place() -> None:
    """The script steps it at the end of each epoch of 10; a worker begins in the middle of the fourth."""
    one, scheduler = optimizer(), None
    scheduler = schedulers.StepLR(one, 2)
    place = {"step": 35}
    followed = Followed(scheduler, lambda: place["step"] // 10)
    seen = []
    for step in range(35, N):
        place["step"] = step
        followed.follow(loop(step))
        seen.append(rates(one)[0])
        if step % 10 == 9:
            scheduler.step()
    assert seen == pytest.approx([0.1 * 0.1 ** (step // 10 // 2) for step in range(35, N)])


def test_a_length_that_nothing_says_is_asked_for() -> None:
    for make in (KINDS["step"], partial(schedulers.LinearLR, total_iters=5), KINDS["sequential"]):
        followed = Followed(make(optimizer()), None)
        if length_of(followed.scheduler) is None:
            with pytest.raises(ConfigError, match=golden.pattern("schedulers.how_many")):
                followed.follow(loop(steps=0))
    assert length_of(schedulers.LinearLR(optimizer(), total_iters=5)) is None, "a warm-up"
    assert length_of(KINDS["sequential"](optimizer())) == 60
    assert length_of(KINDS["warm-up"](optimizer())) == length_of(KINDS["chained"](optimizer())) == N
    assert length_of(KINDS["lambda"](optimizer())) == N and length_of(KINDS["multiplicative"](optimizer())) is None


class Bench:
    """The schedulers of a worker."""

    def __init__(self, one: torch.optim.Optimizer, *known: torch.optim.Optimizer, run: Rates | None = None) -> None:
        self.rates = Rates([one])
        if run is not None:
            self.rates.load_state_dict(run.state_dict())
        self.all = Schedulers("node0/worker1", [one], self.rates, lambda: known)

    def make(self, scheduler: schedulers.LRScheduler, iterations: int, *, steps: bool = True) -> None:
        for step in range(iterations):
            self.all.follow(loop(step))
            self.all.before_step(scheduler.optimizer, loop(step))
            scheduler.optimizer.step()
            if steps:
                scheduler.step()


def run_after(kind: str, steps: int) -> Rates:
    """Return the rates of a run that is so far."""
    one, scheduler = made(kind)
    bench = Bench(one, one)
    bench.make(scheduler, steps)
    return bench.rates


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_that_begins_anew_is_refused_unless_it_has_not_moved(kind, caplog) -> None:
    """One whose rate has not moved yet, or is back at the first one, cannot be told from a constant rate."""
    one, _ = made(kind)
    wanted = alone(kind)
    moved = wanted[30] != pytest.approx(wanted[0], rel=1e-3)
    bench = Bench(one, run=run_after(kind, 30))
    if moved:
        with pytest.raises(LsgdError, match=golden.pattern("schedulers.at_30_of_60")) as e:
            bench.all.before_step(one, loop(30))
        assert "worker.follow(scheduler)" in str(e.value)
    else:
        bench.all.before_step(one, loop(30))
    assert not caplog.records


def test_a_followed_one_and_one_that_the_script_has_brought_there_are_not_refused(caplog) -> None:
    run = run_after("cosine", 30)
    one, scheduler = made("cosine")
    bench = Bench(one, run=run)
    bench.all.add(scheduler, None)
    bench.all.follow(loop(30))
    bench.all.before_step(one, loop(30))

    by_itself, scheduler = made("cosine")
    bring(scheduler, 30)
    Bench(by_itself, run=run).all.before_step(by_itself, loop(30))

    own_base, scheduler = made("cosine", lr=0.03)
    with pytest.raises(LsgdError, match=golden.pattern("schedulers.other_shares")):
        Bench(own_base, run=run).all.before_step(own_base, loop(30))
    assert not caplog.records


def test_rates_that_no_scheduler_sets_are_a_warning_at_most(caplog) -> None:
    """ReduceLROnPlateau and a function of the script's leave no mark; rates may be constant, or each worker's own."""
    constant, other, halved = optimizer(), optimizer(0.03), optimizer()
    steady, falling = Rates([constant]), Rates([halved])
    steady.step(constant)
    falling.step(halved)
    for group in halved.param_groups:
        group["lr"] /= 2
    for one, run in ((constant, steady), (other, steady), (other, falling)):
        Bench(one, run=run).all.before_step(one, loop(30))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        Bench(constant, run=falling).all.before_step(constant, loop(30))
    assert golden.text("schedulers.other_first_step") in caplog.text


def test_a_worker_that_follows_without_a_place_is_told_how_it_gets_one(caplog) -> None:
    """Without a length of its loop, nobody tells a worker that is started again where the others are."""
    one, scheduler = made("cosine")
    bench = Bench(one, run=run_after("cosine", 30))
    bench.all.add(scheduler, None)
    bench.all.follow(Loop(0, 0, False, 0.0, float("inf")))
    bench.all.before_step(one, Loop(0, 0, False, 0.0, float("inf")))
    assert golden.text("schedulers.at", place="step 0") in caplog.text
    assert golden.text("schedulers.set_steps") in caplog.text


def test_in_a_plan_with_an_end_the_place_is_a_share_of_the_run() -> None:
    one, _ = made("cosine")
    with pytest.raises(LsgdError, match=golden.pattern("schedulers.at", place="50 % of the run")):
        Bench(one, run=run_after("cosine", 30)).all.before_step(one, loop(steps=0, middle=0.5))


def test_rates_of_a_run_come_through_its_members() -> None:
    """One that has not stepped hands on what it was told; and what it learns later changes nothing."""
    run = run_after("cosine", 30)
    middle = Rates([made("cosine")[0]])
    middle.load_state_dict(run.state_dict())
    assert middle.state_dict() == run.state_dict()
    one, _ = made("cosine")
    rates_ = Rates([one])
    rates_.load_state_dict(middle.state_dict())
    assert rates_.step(one) and not rates_.step(one)
    rates_.load_state_dict({"first": [[]], "now": [[]]})
    assert rates_.state_dict()["first"] == run.state_dict()["first"]


@pytest.mark.parametrize(("share", "said"), [(30.0, golden.text("schedulers.made_for_60")), (58.0, "")])
def test_a_followed_one_that_the_run_cuts_short_is_said(share, said, caplog) -> None:
    one, scheduler = made("cosine")
    bench = Bench(one)
    bench.all.add(scheduler, None)
    bench.make(scheduler, LOOK_AFTER)
    bench.all.look(Loop(LOOK_AFTER, N, True, 0.2, share), LOOK_AFTER)
    assert (said in caplog.text) and bool(said) is bool(caplog.records)


def test_a_scheduler_that_the_script_steps_by_epoch_is_found_in_time() -> None:
    one, scheduler = made("step")
    bench = Bench(one)
    bench.all.add(scheduler, None)
    bench.make(scheduler, LOOK_AFTER, steps=False)
    with pytest.raises(ConfigError, match=golden.pattern("schedulers.stepped_0")):
        bench.all.look(loop(LOOK_AFTER), LOOK_AFTER)


def test_a_scheduler_that_nobody_tells_of_is_said_once(caplog) -> None:
    one, scheduler = made("cosine")
    bench = Bench(one)
    bench.make(scheduler, LOOK_AFTER)
    bench.all.look(loop(LOOK_AFTER), LOOK_AFTER)
    assert golden.text("schedulers.unknown_rate") in caplog.text
    caplog.clear()
    Bench(one, one).all.look(loop(LOOK_AFTER), LOOK_AFTER)
    bench.all.add(scheduler, None)
    bench.all.look(loop(LOOK_AFTER), LOOK_AFTER)
    with pytest.raises(ConfigError, match=golden.pattern("schedulers.second")):
        bench.all.add(KINDS["step"](one), None)
    plain = optimizer()
    Bench(plain).all.look(loop(LOOK_AFTER), LOOK_AFTER)
    assert not caplog.records
    with pytest.raises(ConfigError, match=golden.pattern("schedulers.other_optimizer")):
        Bench(plain).all.add(scheduler, None)


def test_a_schedule_that_the_script_tells_its_place_is_no_scheduler_that_counts(caplog) -> None:
    """As timm's, which keeps the base rate in the same entry of the parameter groups."""
    one = optimizer()
    for group in one.param_groups:
        group["initial_lr"] = group["lr"]
    Bench(one).all.look(loop(LOOK_AFTER), LOOK_AFTER)
    assert not caplog.records


def test_wrappers_of_schedulers_and_optimizers_are_seen_through() -> None:
    one = optimizer()
    scheduler = SimpleNamespace(scheduler=KINDS["cosine"](one))
    scheduler.scheduler.optimizer = SimpleNamespace(
        optimizer=one, param_groups=one.param_groups, step=one.step
    )  # as accelerate's
    bench = Bench(one)
    bench.all.add(scheduler, None)
    bench.all.follow(loop(30))
    assert count_of(scheduler.scheduler) == 30 and rates(one) == pytest.approx([0.05, 0.025])


def test_a_loop_that_begins_at_0_again_is_told_where_its_scheduler_ends(caplog) -> None:
    one, scheduler = made("cosine")
    bench = Bench(one)
    bench.all.add(scheduler, None)
    bench.make(scheduler, N)
    assert not caplog.records
    for step in (N, N + 1):
        bench.all.before_step(one, loop(step))
    (record,) = caplog.records
    assert golden.text("schedulers.more_steps") in record.message


def test_what_counts() -> None:
    one = optimizer()
    assert not counts(schedulers.ReduceLROnPlateau(one)) and not counts(one)
    assert all(counts(make(optimizer())) for make in KINDS.values())
    assert [count_of(make(optimizer())) for make in KINDS.values()] == [0] * len(KINDS)
