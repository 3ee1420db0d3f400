"""The mean of numbers that others report, whatever they are."""

import math

import pytest

from lsgd.means import mean_of, mean_of_finite

HUGE, INF, NAN = 1.7e308, math.inf, math.nan


@pytest.mark.parametrize(
    ("numbers", "mean"),
    [
        ([1.0], 1.0),
        ([1.0, 2.0, 6.0], 3.0),
        ([1e16, 1.0, -1e16], 1 / 3),  # not 0: the sum is exact
        ([NAN, 1.0], NAN),
        ([INF, 1.0], INF),
        ([INF, -INF], NAN),
        ([INF, NAN, -INF], NAN),
        ([HUGE, HUGE], INF),
        ([-HUGE, -HUGE], -INF),
        ([HUGE, HUGE, NAN], NAN),
    ],
)
def test_a_mean_is_what_ieee_arithmetic_has(numbers: list[float], mean: float) -> None:
    assert mean_of(numbers) == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize(
    ("numbers", "mean"), [([], None), ([None, NAN, INF], None), ([1.0, None, NAN, 3.0], 2.0), ([HUGE, HUGE], None)]
)
def test_a_mean_of_finite_numbers_is_finite(numbers: list[float | None], mean: float | None) -> None:
    assert mean_of_finite(numbers) == mean
