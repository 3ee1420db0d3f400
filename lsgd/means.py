"""The mean of numbers that others report: no number of theirs makes it fail."""

import math
from collections.abc import Collection, Iterable


def finite(number: float | None) -> float | None:
    """Return a finite number as it is, and None for any other: JSON has no NaN, and NaN cannot be compared."""
    return number if number is not None and math.isfinite(number) else None


def mean_of(numbers: Collection[float]) -> float:
    """Return the mean of at least one number, by their exact sum.

    As in IEEE arithmetic, NaN or infinities of both signs make it NaN, and it is infinite if the sum overflows.
    """
    try:
        total = math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond the greatest float
        total = sum(numbers)
    return total / len(numbers)


def mean_of_finite(numbers: Iterable[float | None]) -> float | None:
    """Return the mean of the finite numbers; None: there are none, or their mean is not finite."""
    finites = [number for number in numbers if number is not None and math.isfinite(number)]
    return finite(mean_of(finites)) if finites else None
