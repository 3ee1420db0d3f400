"""Numbers of the user's own that a worker tells the servers, beside its loss."""

import math
import re
from collections.abc import Mapping
from numbers import Real

from torch import Tensor

from lsgd.errors import ConfigError
from lsgd.protocol.messages import MAX_LOGGED, MAX_LOGGED_NAME

_NAME = re.compile(rf"[\w./-]{{1,{MAX_LOGGED_NAME}}}", re.ASCII)


class Logged:
    """The last number of each name.

    Attributes:
        numbers: by name, all finite; never changed but replaced, so that any thread can read it.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def add(self, numbers: Mapping[str, Tensor | float]) -> None:
        """Take in numbers, all or none. One that is not finite takes its name away until a finite one comes.

        Raises:
            ConfigError: a name or a number cannot be used, or the names are too many.
        """
        told = self.numbers | {_name(name): _number(name, value) for name, value in numbers.items()}
        told = {name: number for name, number in told.items() if math.isfinite(number)}
        if len(told) > MAX_LOGGED:
            raise ConfigError(
                f"log() takes at most {MAX_LOGGED} names in a run, and {len(told)} are too many: leave some out "
                f"({', '.join(list(told)[-3:])}, ...)"
            )
        self.numbers = told


def _name(name: object) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"log() takes names of 1 to {MAX_LOGGED_NAME} letters, digits, '_', '-', '.' and '/', such as "
        f"'accuracy' or 'grad/norm', not {name!r:.100}"
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:  # an integer beyond all floats
            return math.inf
    what = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigError(f"log() takes numbers and tensors of one element; {name!r} is {what}")
