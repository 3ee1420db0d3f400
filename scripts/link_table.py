"""Writes the table of what crosses which link into docs/concepts/transport.md: ``python -m scripts.link_table [PAGE]``.

Each algorithm trains for a few rounds on two nodes of two simulated workers, in groups that note what they are asked.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lsgd.algorithms import ALGORITHMS
from lsgd.collectives.composed import Composed
from lsgd.collectives.group import Group, Transfer
from lsgd.protocol.messages import Round
from lsgd.settings import AlgorithmSettings
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, generation_of, simulate

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "transport.md"
NODE_SIZES = (2, 2)
ROUNDS = 4
HEAD = "| algorithm | inside a node | between nodes |"

VARIANTS: Sequence[Mapping[str, Any]] = ({}, {"hierarchical": False}, {"peers": "all"}, {"compression": "none"})
"""Settings on which it depends what an algorithm asks of its group; each beside the defaults, where it is not one."""

Notes = dict[str, list[str]]


class Noting(Group):
    """A group that notes the verbs of its members, in the order of their first use.

    Args:
        link: name of the list to write to.
        of: added to a verb.
    """

    def __init__(self, group: Group, notes: Notes, link: str, of: str = "") -> None:
        self.rank, self.size, self.node_sizes = group.rank, group.size, group.node_sizes
        self._group, self._notes, self._link, self._of = group, notes, link, of

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> "Noting":
        group = self._group._subgroup(kind, ranks, one_node=one_node)
        return Noting(group, self._notes, self._link, " of the first workers" if kind == "across" else "")

    def _note(self, verb: str) -> None:
        if (words := f"`{verb}`{self._of}") not in self._notes[self._link]:
            self._notes[self._link].append(words)

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Note it, and begin it."""
        self._note("all_reduce")
        return self._group.all_reduce(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Note it, and do it."""
        self._note("broadcast")
        self._group.broadcast(tensor, source)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Transfer:
        """Note it, and begin it."""
        self._note("all_gather")
        return self._group.all_gather(outputs, tensor)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Transfer:
        """Note it, and begin it."""
        self._note("all_to_all")
        return self._group.all_to_all(outputs, inputs)

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        if sends or receives:
            self._note("exchange")
        return self._group._begin_exchange(sends, receives)


class Linked(Composed):
    """Two noting groups composed, as those of a run."""

    def __init__(self, group: SimulatedGroup, notes: Notes) -> None:
        super().__init__(Noting(group.node, notes, "inside"), Noting(group, notes, "between"))


def used(settings: AlgorithmSettings) -> Notes:
    """Return the verbs that these settings use, inside a node and between nodes."""
    found: Notes = {"inside": [], "between": []}

    def train(group: SimulatedGroup) -> Notes:
        notes: Notes = {"inside": [], "between": []}
        x = torch.arange(300.0).requires_grad_()
        x.grad = torch.zeros_like(x)
        optimizer, flat = torch.optim.SGD([x], lr=1e-3), [x.detach()]
        worker = SimulatedWorker(Linked(group, notes), settings, flat, [x.grad], optimizer)  # type: ignore[arg-type]
        worker.algorithm.reset(flat, worker.group, _order(1))
        for step in range(settings.schedule().period * ROUNDS):
            due = step % settings.schedule().period == 0
            if due:
                worker.settle()
            worker.iterate(_order(step + 1) if due else None, lambda: (x * (group.rank + 1)).sum())
        worker.settle()
        return notes

    for notes in simulate(NODE_SIZES, train):
        for link, verbs in notes.items():
            found[link] += [verb for verb in verbs if verb not in found[link]]
    return found


def _order(id: int) -> Round:
    return Round(id, generation_of(NODE_SIZES), "global", 1, (1, 2), id - 1, (), 0, False)


def variants() -> Iterator[tuple[str, AlgorithmSettings]]:
    """Yield the name of each row and its settings."""
    for name, cls in ALGORITHMS.items():
        if not cls.__module__.startswith("lsgd."):
            continue
        periods = {key: 2 for key in ("period", "local_period") if hasattr(cls, key)}
        for variant in VARIANTS:
            changed = {key: value for key, value in variant.items() if getattr(cls, key, value) != value}
            if len(changed) == len(variant):
                words = "".join(f", `{key} = {str(value).lower()}`" for key, value in changed.items())
                yield f"`{name}`{words}", cls(**periods, **changed)


def table() -> str:
    """Return the table of the page."""
    rows = [HEAD, "|---|---|---|"]
    for name, settings in variants():
        notes = used(settings)
        rows.append(f"| {name} | {', '.join(notes['inside'])} | {', '.join(notes['between'])} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    text, found = re.subn(rf"^{re.escape(HEAD)}\n(\|.*\n)+", lambda _: table(), page.read_text(), flags=re.M)
    if found != 1:
        sys.exit(f"{page} has {found} tables that begin with {HEAD}")
    page.write_text(text)
