"""A part of a dataset, and a script's sampler made again over it."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler, Subset


class View(Subset[Any]):
    """Some rows of a dataset, with its other attributes; of those with a value for each row, those of these rows."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "indices"):
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        if not _has_rows(value, len(self.dataset)):  # type: ignore[arg-type]
            return value
        if isinstance(value, Tensor | np.ndarray):
            return value[self.indices]
        return [value[index] for index in self.indices]


def part_of(dataset: Any, rows: list[int]) -> Any:
    """Return some rows of a dataset: by its own ``select``, as that of ``datasets``, or a view."""
    return dataset.select(rows) if callable(getattr(dataset, "select", None)) else View(dataset, rows)


def _has_rows(value: Any, size: int) -> bool:
    """Whether something has one value for each of so many rows."""
    is_list = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | bytes | dict)
    return is_list and getattr(value, "ndim", 1) > 0 and len(value) == size


def again_over(sampler: Any, dataset: Any) -> Callable[[Any], Any] | None:
    """Return what makes a sampler again over another dataset; None: it does not show how it was made.

    It does if each argument of its class is kept as an attribute of that name (perhaps with an underline), one is the
    dataset, or a sampler over it, and nothing else depends on the number of rows.
    """
    found = _arguments(sampler)
    if found is None:
        return None
    arguments, of_data = found, []
    for name, value in found.items():
        if isinstance(value, Sampler):
            if (inner := again_over(value, dataset)) is None:
                return None
            of_data.append((name, inner))
        elif _is_data(value, dataset):
            of_data.append((name, lambda part: part))
        elif _has_rows(value, len(dataset)) or (type(value) is int and value == len(dataset)):
            return None
    if len(of_data) != 1:
        return None
    ((where, inner_of),) = of_data

    def make(part: Any) -> Any:
        made = copy.copy(sampler)
        type(sampler).__init__(made, **{**arguments, where: inner_of(part)})
        return made

    return make


def _arguments(sampler: Any) -> dict[str, Any] | None:
    """Return the arguments of a sampler's class as its attributes have them; None: not all are there."""
    found, kept = {}, getattr(sampler, "__dict__", {})
    parameters = list(inspect.signature(type(sampler).__init__).parameters.values())[1:]
    for each in parameters:
        where = next((name for name in (f"_{each.name}", each.name) if name in kept), None)
        if where is None or each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            return None
        found[each.name] = kept[where]
    return found


def _is_data(value: object, dataset: Any) -> bool:
    """Whether a sampler's argument is the dataset: that of the loader, or with other columns; no list of indices."""
    if value is dataset:
        return True
    return not isinstance(value, list | tuple | range | Tensor | np.ndarray) and _has_rows(value, len(dataset))
