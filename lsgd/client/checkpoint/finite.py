"""Checks whether a model is still finite."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lsgd.algorithms.base import all_finite
from lsgd.client.control.island import Island
from lsgd.flat import named_floating_buffers
from lsgd.shards import local

NAMED = 3
"""How many tensors a message names."""


class FiniteCheck:
    """Finds the tensors of a model that training has made non-finite.

    It checks the trainable parameters, and the floating-point buffers that are finite at construction. A buffer that
    is not (a mask with minus infinity, for example) is meant to be non-finite.

    Args:
        model: the model to check.
        island: the processes that share it.
    """

    def __init__(self, model: nn.Module, island: Island) -> None:
        self._model = model
        self._island = island
        self._left_out = {name for name, b in named_floating_buffers(model) if not all_finite([_comparable(b)])}

    def buffers(self) -> list[Tensor]:
        """Return the buffers to average, shared ones once."""
        return [b for name, b in named_floating_buffers(self._model) if name not in self._left_out]

    @torch.no_grad()
    def broken(self) -> dict[str, int]:
        """Return the number of non-finite values by tensor, over all processes that have some."""
        found = Counter[str]()
        for each in self._island.gather("looks at its model", self._broken()):
            found.update(each)
        return found

    def _broken(self) -> dict[str, int]:
        """Return the same for this process."""
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
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point() and not all_finite([local(value)]):
                    local(value).nan_to_num_(0.0, 0.0, 0.0)


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
