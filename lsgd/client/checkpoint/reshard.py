"""Reshards a worker's checkpoint for another number of processes."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from lsgd.errors import ConfigError
from lsgd.flat import Layout
from lsgd.shards import begins, local

logger = logging.getLogger("lsgd")


def layout_of(layout: Layout) -> dict[str, Any]:
    """Return a checkpoint's description of its flat buffers: their lengths, and where each parameter is."""
    slots = [[s.name, s.buffer, s.offset, list(s.stride)] for s in layout.slots]
    return {"lengths": layout.lengths, "slots": slots}


class Resharding:
    """Builds one process's state from the parts that all processes of a checkpoint wrote, added one after another.

    Everything shaped like a parameter is resharded: the parameters, optimizer state of their shape, and the algorithm's
    flat buffers. The rest comes from the first process. Random numbers start over, and so does algorithm state of any
    other form, such as the error feedback. ``state`` is this process's checkpoint once all parts are added.
    """

    def __init__(self, model: nn.Module, layout: Layout, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.state: dict[str, Any] = {}
        self._layout = layout
        self._parameters = dict(model.named_parameters())
        self._groups = [_sizes(o.param_groups) for o in optimizers]
        named = {id(parameter): name for name, parameter in self._parameters.items()}
        stepped = [enumerate(p for g in o.param_groups for p in g["params"]) for o in optimizers]
        self._stepped = [{place: named[id(p)] for place, p in each if id(p) in named} for each in stepped]
        self._starts = {name: [0] * parameter.dim() for name, parameter in self._parameters.items()}

    def add(self, part: dict[str, Any], path: Path) -> None:
        """Add the next process's part, in order of rank.

        Raises:
            ConfigError: an optimizer keeps something that is neither a number nor of its parameter's shape, or its
                groups have other parameters than those of the checkpoint.
        """
        if not self.state:
            self._check_groups([_sizes(saved["param_groups"]) for saved in part["optimizers"]], path)
            self._begin(part, path)
        shapes = {name: part["model"][name].shape for name in self._parameters}
        for name in self._parameters:
            self._cut(name, part["model"][name], self.state["model"][name])
        for names, saved, state in zip(self._stepped, part["optimizers"], self.state["optimizers"], strict=False):
            for place in names.keys() & saved["state"].keys():
                name, own = names[place], state["state"].setdefault(place, {})
                self._add_values(name, saved["state"][place], own, shapes[name], path)
        views = {key: self._views(buffers) for key, buffers in self.state["algorithm"]["state"].items()}
        for name, buffer, offset, strides in part["layout"]["slots"]:
            for key, targets in views.items():
                source = part["algorithm"]["state"][key][buffer]
                self._cut(name, source.as_strided(shapes[name], strides, offset), targets[name])
        for name, parameter in self._parameters.items():
            for dim, (length, whole) in enumerate(zip(shapes[name], parameter.shape, strict=True)):
                self._starts[name][dim] += length if length != whole else 0

    def _check_groups(self, saved: list[list[int]], path: Path) -> None:
        for sizes, before in zip(self._groups, saved, strict=False):
            if sizes != before:
                raise ConfigError(
                    f"the checkpoint {path} has an optimizer whose groups have {before} parameters, and here they have "
                    f"{sizes}; lsgd.client.muon gives matrices with fewer rows or columns than an island has processes "
                    f"to AdamW: give those with exclude=[...] to AdamW from the start, or continue with as many "
                    f"processes as before (lsgd launch --processes-per-worker)"
                )

    def _begin(self, part: dict[str, Any], path: Path) -> None:
        """Start from the first process's part, with room for the rest."""
        flat: dict[str, list[Tensor]] = {}
        for key, value in part["algorithm"]["state"].items():
            if isinstance(value, list) and [_length(x) for x in value] == part["layout"]["lengths"]:
                pairs = zip(self._layout.lengths, value, strict=True)
                flat[key] = [torch.zeros(length, dtype=saved.dtype, device="cpu") for length, saved in pairs]
            elif any(isinstance(x, Tensor) for x in _pytree.tree_leaves(value)):
                logger.info("%s is of another number of processes: the algorithm's %r starts over", path, key)
        room = {n: torch.zeros(local(p).shape, dtype=p.dtype, device="cpu") for n, p in self._parameters.items()}
        self.state = {
            **part,
            "model": part["model"] | room,
            "optimizers": [saved | {"state": {}} for saved in part["optimizers"]],
            "algorithm": part["algorithm"] | {"state": flat},
            "loaders": [position | {"place": []} for position in part["loaders"]],  # nobody's: the data is dealt again
            "random": {},
        }

    def _add_values(
        self, name: str, saved: dict[str, Any], values: dict[str, Any], shape: torch.Size, path: Path
    ) -> None:
        """Add an optimizer's state of one parameter, whose part has this shape."""
        for key, value in saved.items():
            if not isinstance(value, Tensor) or not value.dim():
                values.setdefault(key, value)
            elif value.shape == shape:
                self._cut(name, value, values.setdefault(key, value.new_zeros(local(self._parameters[name]).shape)))
            else:
                raise ConfigError(
                    f"the checkpoint {path} cannot be divided among another number of processes: an optimizer keeps "
                    f"{key!r} of {name} in another shape than the parameter's; continue with as many processes as "
                    f"before (lsgd launch --processes-per-worker)"
                )

    def _views(self, buffers: list[Tensor]) -> dict[str, Tensor]:
        """Return the parameters' views of flat buffers."""
        return dict(zip((slot.name for slot in self._layout.slots), self._layout.views(buffers), strict=True))

    def _cut(self, name: str, source: Tensor, target: Tensor) -> None:
        """Copy the overlap of the next process's part of a parameter with this process's part."""
        into, out = [], []
        places = zip(begins(self._parameters[name]), target.shape, self._starts[name], source.shape, strict=True)
        for start, length, source_start, source_length in places:
            low, high = max(start, source_start), min(start + length, source_start + source_length)
            if high <= low:
                return
            into.append(slice(low - start, high - start))
            out.append(slice(low - source_start, high - source_start))
        target[tuple(into)] = source[tuple(out)]


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of parameters in each of an optimizer's groups."""
    return [len(group["params"]) for group in groups]


def _length(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else -1
