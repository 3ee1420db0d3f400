"""torch, loaded at first use: servers read the settings of algorithms and codecs, and never load torch.

A file of an algorithm or a codec says ``from lsgd.lazy import Tensor, torch`` instead of importing them from torch.
Nothing at its top level may use ``torch``: no decorator, no default value. ``Tensor`` is for annotations only, in files
that do not evaluate them (``from __future__ import annotations``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lazy:
    """Stands in for a module, and imports it when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch, Tensor = Lazy("torch"), Any


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Like the decorator ``torch.no_grad()``, but loads torch at the first call."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
