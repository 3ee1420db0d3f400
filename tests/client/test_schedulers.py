"""Schedulers of torch that a run would cut short: found with their lengths, and left alone otherwise."""

from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from lsgd.client.iteration.schedulers import LOOK_AFTER, cut_short, length_of


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)


def _cosine(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


MADE = [
    (lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=100), 100),
    (lambda o: torch_schedulers.OneCycleLR(o, max_lr=0.1, total_steps=100), 100),
    (lambda o: torch_schedulers.PolynomialLR(o, total_iters=100), 100),
    (lambda o: torch_schedulers.LambdaLR(o, partial(_cosine, num_training_steps=100)), 100),
    (lambda o: torch_schedulers.LambdaLR(o, lambda step: 1.0), None),
    (lambda o: torch_schedulers.StepLR(o, 5), None),
]


@pytest.mark.parametrize(("make", "length"), MADE)
def test_how_long_a_scheduler_is(make, length) -> None:
    assert length_of(make(optimizer())) == length


def test_schedulers_in_a_row_are_as_long_as_together() -> None:
    one = optimizer()
    parts = [torch_schedulers.LinearLR(one, total_iters=20), torch_schedulers.CosineAnnealingLR(one, T_max=80)]
    assert length_of(torch_schedulers.SequentialLR(one, parts, milestones=[20])) == 100


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    ("steps", "said"), [(50.0, "made for 100 steps, so it would cover 50 % of itself"), (95.0, "")]
)
def test_only_what_is_cut_short_is_said(steps, said, saved) -> None:
    one = optimizer()
    scheduler = torch_schedulers.CosineAnnealingLR(one, T_max=100)
    if saved:
        assert scheduler.state_dict()["T_max"] == 100
    assert cut_short([one], steps) == "", "it may count epochs"
    for _ in range(LOOK_AFTER):
        one.step()
        scheduler.step()
    assert cut_short([one, optimizer()], steps) == (said and f"CosineAnnealingLR is {said}")
