"""The layers of a model: few enough to look at, and where each one is in the flat vectors."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lsgd.lazy import Tensor

MOST = 24
"""More layers than this are one with their neighbours."""

FEWEST = 6
"""With fewer, parts of them are layers of their own, if there are any."""

MAX_NAME = 48
"""Characters of a name, of which the last are kept."""


@dataclass(frozen=True)
class Layers:
    """Layers by number, in the model's order.

    Args:
        names: of modules, without what begins all of them.
        spans: for each flat vector the end and the layer of each part of it, in order.
    """

    names: tuple[str, ...] = ("",)
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()

    def parts(self, vector: int, start: int, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of ``x``, which begins at ``start`` of a vector, each with its layer; without spans all."""
        if not self.spans:
            yield 0, x
            return
        at = start
        for end, layer in self.spans[vector]:
            if end > at:
                yield layer, x[at - start : end - start]
                at = end
            if at >= start + len(x):
                return


WHOLE = Layers()
"""A model as one layer."""


def layers_of(slots: Sequence[tuple[str, int, int]], lengths: Sequence[int]) -> Layers:
    """Return the layers of a model: modules of the depth that gives the most of them, but no more than :data:`MOST`.

    Args:
        slots: name of each parameter, its vector, and where it begins there; in the model's order.
        lengths: of the vectors.
    """
    modules = [name.split(".")[:-1] or [name] for name, *_ in slots]
    while len({path[0] for path in modules}) == 1 and all(len(path) > 1 for path in modules):
        modules = [path[1:] for path in modules]
    depths = [[".".join(path[: depth + 1]) for path in modules] for depth in range(max(map(len, modules)))]
    numbers = [len(set(named)) for named in depths]  # which do not fall with the depth
    depth = max((depth for depth, number in enumerate(numbers) if number <= MOST), default=0)
    named = depths[min(depth + (numbers[depth] < FEWEST), len(depths) - 1)]
    names = list(dict.fromkeys(named))
    together = -(-len(names) // MOST)
    layers = {name: number // together for number, name in enumerate(names)}
    shown = [_together(names[first : first + together]) for first in range(0, len(names), together)]
    spans = []
    for vector, length in enumerate(lengths):
        own = [(start, layers[name]) for name, (_, at, start) in zip(named, slots, strict=True) if at == vector]
        ends = [*(start for start, _ in own[1:]), length]
        parts = [(end, layer) for (_, layer), end in zip(own, ends, strict=True)]
        spans.append(tuple(list(same)[-1] for _, same in groupby(parts, lambda part: part[1])))
    return Layers(tuple(shown), tuple(spans))


def _together(names: Sequence[str]) -> str:
    """Return one name for neighbours, such as ``h.2-3`` for ``h.2`` and ``h.3``."""
    first, last = names[0], names[-1]
    before, _, number = last.rpartition(".")
    end = number if before == first.rpartition(".")[0] else last
    name = first if first == last else f"{first}-{end}"
    return re.sub(r"[^\w./-]", "_", name)[-MAX_NAME:]
