"""The mean of numbers that others report: no number of theirs makes it fail."""

import math
from collections.abc import Collection


def mean_of(numbers: Collection[float]) -> float:
    """Return the mean of at least one number, by their exact sum.

    As in IEEE arithmetic, NaN or infinities of both signs make it NaN, and it is infinite if the sum overflows.
    """
    try:
        total = math.fsum(numbers)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond the greatest float
        total = sum(numbers)
    return total / len(numbers)
