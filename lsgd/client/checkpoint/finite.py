"""Which tensors of a model, or of its optimizers, training has made non-finite."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from lsgd.algorithms.base import all_finite
from lsgd.flat import named_floating_buffers, written_buffers
from lsgd.shards import local

NAMED = 3
"""How many tensors a message names."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class FiniteCheck:
    """Finds the tensors of a model that training has made non-finite.

    It checks the trainable parameters, and the floating-point buffers that are finite at construction. A buffer that
    is not (a mask with minus infinity, for example) is meant to be non-finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._left_out = {name for name, b in named_floating_buffers(model) if not all_finite([_comparable(b)])}
        self._shapes = self._shapes_now()

    def _shapes_now(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(b.shape) for name, b in named_floating_buffers(self._model)}

    def reshaped(self) -> str:
        """Say which buffers have another shape than at construction, when all workers' were equal; empty: none has."""
        now = self._shapes_now()
        found = [name for name in self._shapes | now if self._shapes.get(name) != now.get(name)]
        return ", ".join(f"{name} (was {self._shapes.get(name)}, is {now.get(name)})" for name in found)

    def buffers(self) -> list[Tensor]:
        """Return the buffers to average, shared ones once."""
        return [b for name, b in named_floating_buffers(self._model) if name not in self._left_out]

    def counters(self) -> list[Tensor]:
        """Return the integer buffers, which count or index, shared ones once."""
        return [b for b in written_buffers(self._model) if b.dtype in INTEGERS]

    @torch.no_grad()
    def broken(self) -> dict[str, int]:
        """Return the number of non-finite values by tensor, in this process's part of those that have some."""
        parameters = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        named: list[tuple[str, Tensor]] = [(name, local(p)) for name, p in parameters]
        named += [(name, b) for name, b in named_floating_buffers(self._model) if name not in self._left_out]
        if all_finite([_comparable(x) for _, x in named]):
            return {}
        wrong = ((name, int((~_comparable(x).isfinite()).sum())) for name, x in named)
        return {name: number for name, number in wrong if number}


@torch.no_grad()
def clear(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set non-finite values in the optimizers' states to zero: they would break the model again."""
    for optimizer in optimizers:
        for value in tensors_in(optimizer):
            if value.is_floating_point() and not all_finite([value]):
                value.nan_to_num_(0.0, 0.0, 0.0)


def tensors_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state, also those in lists, in other tensors, and those of no parameter."""
    leaves = _pytree.tree_leaves(list(optimizer.state.values()))
    return [part for x in leaves if isinstance(x, Tensor) for part in _parts(local(x))]


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield a plain tensor, or those that a subclass wraps."""
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        yield from _parts(getattr(x, name))


def in_words(broken: Mapping[str, int]) -> str:
    """Describe which tensors have how many non-finite values; empty if none has."""
    if not broken:
        return ""
    names = list(broken)
    more = f" and {len(names) - NAMED} more tensors" if len(names) > NAMED else ""
    values = sum(broken.values())
    return f"{values} value{'s' * (values > 1)} (NaN or infinite) in {', '.join(names[:NAMED])}{more}"


def _comparable(x: Tensor) -> Tensor:
    """Return a tensor whose minimum torch can compute: it cannot for 8-bit floats."""
    return x.float() if x.element_size() == 1 else x
