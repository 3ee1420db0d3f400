"""The curves of a learning rate over a run."""

import math
from itertools import pairwise

import pytest

from lsgd.errors import ConfigError
from lsgd.learning_rate import KINDS, check, factor
from tests import golden

WARMUP, DECAY = 0.125, 0.25
AT_MIDDLE_OF_REST = WARMUP + (1 - WARMUP) / 2


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("wsd", {0.125: 1, 0.5: 1, 0.75: 1, 0.875: 0.5, 0.9375: 0.25, 1: 0}),
        ("linear", {0.125: 1, AT_MIDDLE_OF_REST: 0.5, 1: 0}),
        ("cosine", {0.125: 1, WARMUP + (1 - WARMUP) / 3: 0.75, AT_MIDDLE_OF_REST: 0.5, 1: 0}),
    ],
)
def test_each_curve_rises_in_the_warm_up_and_goes_through_its_points(kind: str, points: dict[float, float]) -> None:
    for progress, value in ({0: 0, 0.03125: 0.25, 0.0625: 0.5} | points).items():
        assert factor(kind, progress, WARMUP, DECAY) == pytest.approx(value, abs=1e-12)
    curve = [factor(kind, step / 64, WARMUP, DECAY) for step in range(65)]
    assert curve[:8] == sorted(curve[:8]) and curve[8:] == sorted(curve[8:], reverse=True)
    assert max(abs(a - b) for a, b in pairwise(curve)) <= 1 / 8, "it jumps"


def test_recipe_s_is_a_wsd_of_64_steps_and_a_fifth() -> None:
    steps = 1024
    for step in range(steps):
        warm = min(1.0, (step + 0.5) / 64)
        assert factor("wsd", (step + 0.5) / steps, 64 / steps, 0.2) == pytest.approx(
            min(warm, (steps - step - 0.5) / (0.2 * steps), 1.0)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_without_warm_up_and_decay_a_run_begins_at_the_base(kind: str) -> None:
    assert factor(kind, 0, 0, 0) == 1
    assert factor(kind, 1, 0, 0) == (1 if kind == "wsd" else 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cosin", 0.1, 0.2), golden.text("schedulers.mean_cosine")),
        (
            ("wsd", 64, 0.2),
            golden.text("schedulers.warmup_share"),
        ),
        (("wsd", 0.1, -0.2), golden.text("schedulers.decay_share")),
        (("wsd", math.nan, 0.2), golden.text("schedulers.warmup_nan")),
        (("wsd", 0.5, 0.6), golden.text("schedulers.more_than_run")),
    ],
)
def test_what_is_no_schedule_is_refused_in_words(arguments: tuple[str, float, float], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(*arguments)
    assert words in str(error.value)


def test_what_a_curve_does_not_use_is_not_counted() -> None:
    check("cosine", 0.5, 0.6)
