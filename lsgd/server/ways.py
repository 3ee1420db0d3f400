"""How the nodes of a run reach each other, as its members have found by trying."""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, combinations
from typing import Any

Pair = tuple[int, int]


class Ways:
    """Which nodes have tried to dial each other, and which cannot.

    If one of two nodes can dial the other, they exchange directly, in both directions. If neither can, they exchange
    through the relay.

    Args:
        tried: nodes.
        missed: pairs of them of which the first cannot dial the second.
    """

    def __init__(self, tried: Iterable[int] = (), missed: Iterable[Sequence[int]] = ()) -> None:
        self._tried = set(tried)
        self._missed: set[Pair] = {(a, b) for a, b in missed}

    def found(self, nodes: Collection[int], missed: Sequence[int]) -> list[Pair]:
        """Store what the members on some nodes have found; return the pairs that are new to the relay.

        Args:
            nodes: that have tried each other.
            missed: one pair after the other: a node, and another one that it could not dial.
        """
        before = set(self._relayed())
        pairs = zip(missed[::2], missed[1::2], strict=False)
        kept = {(a, b) for a, b in self._missed if a not in nodes or b not in nodes}
        self._missed = kept | {(a, b) for a, b in pairs if a in nodes and b in nodes and a != b}
        self._tried |= set(nodes)
        return [pair for pair in self._relayed() if pair not in before]

    def unknown(self, nodes: Collection[int]) -> bool:
        """Whether there are several nodes, and one has not been tried."""
        return len(nodes) > 1 and not self._tried.issuperset(nodes)

    def missed(self, nodes: Collection[int]) -> tuple[int, ...]:
        """Return the pairs of some nodes of which the first cannot dial the second, one after the other."""
        return tuple(chain.from_iterable(pair for pair in sorted(self._missed) if {*pair}.issubset(nodes)))

    def shown(self) -> list[dict[str, Any]]:
        """Return the pairs that cannot dial each other both ways, for the report."""
        found = []
        for a, b in combinations(sorted(self._tried), 2):
            away = [pair for pair in ((a, b), (b, a)) if pair in self._missed]
            if away:
                way = "through the relay" if len(away) == 2 else f"dialled by node{away[0][1]} alone"
                found.append({"nodes": [a, b], "way": way})
        return found

    def capture(self) -> list[Any]:
        """Return the constructor's arguments, for JSON."""
        return [sorted(self._tried), sorted(self._missed)]

    def _relayed(self) -> list[Pair]:
        return sorted((a, b) for a, b in self._missed if a < b and (b, a) in self._missed)
