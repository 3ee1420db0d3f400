"""Links between members: which cannot be used, whom the run continues without, and for how long.

A collective needs every pair of its members. So if two cannot reach each other, the run evicts one of them: it keeps
its process and its place in the run, and joins a later round, which is probed first.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from lsgd.server.changes import Changes
from lsgd.server.reasons import CHECK, NO_REASON, Reason, Why

MAX_EXACT = 16
"""With up to this many different sets of broken links, the search surely finds the largest part."""

MAX_NAMED = 4
"""How many pairs a sentence names."""

RETRY_AFTER_S = 60.0
"""An evicted member is let in again after this time, or after ``exchange_timeout_s`` if that is less; the next time
after twice as long, and so on."""

MAX_RETRIES = 10
"""The longest such wait, as a multiple of the first. A link that has held for that long counts as mended."""

Pair = tuple[int, int]


def pairs_of(broken: Sequence[int], size: int) -> list[Pair]:
    """Return the pairs of ranks that a worker has reported, in order; pairs outside a group of ``size`` are dropped."""
    pairs = {(min(a, b), max(a, b)) for a, b in zip(broken[::2], broken[1::2], strict=False) if a != b}
    return sorted(pair for pair in pairs if pair[0] >= 0 and pair[1] < size)


def connected(size: int, broken: Iterable[Pair], holders: Collection[int]) -> frozenset[int]:
    """Return the ranks to continue with: a part of the generation in which every pair works.

    It includes one of ``holders``, the ranks with the run's model, if there are any. Of such parts it is the largest;
    of equally large ones, the one with the most holders; of those, the one with the lowest ranks, and so the lowest
    indices of nodes. Nobody is evicted without need: each of the others cannot reach somebody in it.

    Members with the same broken links, such as all those of a node that is cut off, count as one in the search. With
    more than :data:`MAX_EXACT` of these, those with the fewest broken links are chosen first.
    """
    apart: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for a, b in broken:
        apart[a].add(b)
        apart[b].add(a)
    alike: dict[frozenset[int], list[int]] = {}
    for rank in range(size):
        alike.setdefault(frozenset(apart[rank]), []).append(rank)
    parts = {members[0]: members for members in alike.values()}
    rivals = {first: {other for other in parts if other in apart[first]} for first in parts}

    def worth(chosen: Iterable[int]) -> tuple[bool, int, int, tuple[int, ...]]:
        ranks = sorted(rank for first in chosen for rank in parts[first])
        having = sum(rank in holders for rank in ranks)
        return having > 0, len(ranks), having, tuple(-rank for rank in ranks)

    def largest(chosen: frozenset[int], left: frozenset[int]) -> frozenset[int]:
        first = max(left, key=lambda one: (len(rivals[one] & left), -one), default=None)
        if first is None or not rivals[first] & left:
            return chosen | left
        with_it = largest(chosen | {first}, left - {first} - rivals[first])
        return max(with_it, largest(chosen, left - {first}), key=worth)

    def first_found() -> frozenset[int]:
        chosen: frozenset[int] = frozenset()
        order = sorted(parts, key=lambda one: (len(apart[one]), -len(parts[one]), one))
        for one in sorted(order, key=lambda one: not any(rank in holders for rank in parts[one]))[:1] + order:
            if not rivals[one] & chosen:
                chosen |= {one}
        return chosen

    found = largest(frozenset(), frozenset(parts)) if len(parts) <= MAX_EXACT else first_found()
    return frozenset(rank for first in found for rank in parts[first])


def named_pairs(pairs: Sequence[str]) -> dict[str, str]:
    """Return the values of a sentence about ``pairs``: the first few, and how many more there are."""
    more = f" (and {len(pairs) - MAX_NAMED} more pairs)" if len(pairs) > MAX_NAMED else ""
    return {"pairs": ", ".join(pairs[:MAX_NAMED]), "more": more}


def unreachable(names: Sequence[str], broken: Sequence[Pair]) -> Reason:
    """Say which members cannot reach each other; or which nodes, if no member of one can reach any of the other.

    ``names``: of the generation's members, in rank order.
    """
    homes = [name.partition("/")[0] for name in names]
    between: dict[tuple[str, str], list[Pair]] = {}
    for a, b in broken:
        between.setdefault((homes[a], homes[b]), []).append((a, b))
    words: list[str] = []
    for (one, other), pairs in between.items():
        if one != other and len(pairs) == homes.count(one) * homes.count(other):
            words.append(f"{one} and {other}")
        else:
            words += [f"{names[a]} and {names[b]}" for a, b in pairs]
    return Why.UNREACHABLE(**named_pairs(words))


def whole_nodes(names: Sequence[str], some: Collection[int]) -> str:
    """Return the names of ``some`` ranks; a node's name if they include all its members."""
    homes = [name.partition("/")[0] for name in names]
    inside = {home: all(rank in some for rank, at in enumerate(homes) if at == home) for home in homes}
    found = dict.fromkeys(homes[rank] if inside[homes[rank]] else names[rank] for rank in sorted(some))
    return ", ".join(found)


@dataclass(slots=True)
class _Cut:
    """Why a worker was evicted, until when, and for how long in all."""

    reason: Reason
    until: float
    wait_s: float


class Links:
    """The workers evicted because of a broken link, the first time for ``retry_s`` or :data:`RETRY_AFTER_S`.

    Times are seconds of the coordinator's clock.

    Attributes:
        ways: which nodes can dial each other at all.
    """

    def __init__(self, retry_s: float) -> None:
        self.changes = Changes()
        self.ways = Ways()
        self._retry_s = min(RETRY_AFTER_S, retry_s)
        self._cuts: dict[str, _Cut] = {}

    def cut(self, workers: Iterable[str], reason: Reason, now: float) -> float:
        """Evict workers for ``reason``; return for how long."""
        self.changes.count += 1
        longest_s = MAX_RETRIES * self._retry_s
        self._cuts = {worker: cut for worker, cut in self._cuts.items() if now < cut.until + longest_s}
        waits_s = []
        for worker in workers:
            before = self._cuts.get(worker)
            wait_s = min(longest_s, 2 * before.wait_s if before else self._retry_s)
            self._cuts[worker] = _Cut(reason, now + wait_s, wait_s)
            waits_s.append(wait_s)
        return max(waits_s)

    def bars(self, worker: str, now: float) -> bool:
        """Whether a worker is evicted now."""
        return worker in self._cuts and now < self._cuts[worker].until

    def suspects(self, workers: Iterable[str], now: float) -> bool:
        """Whether one of these workers was evicted recently."""
        since = now - MAX_RETRIES * self._retry_s
        return bool(self._cuts) and any(w in self._cuts and self._cuts[w].until > since for w in workers)

    def relent(self, now: float) -> None:
        """End all evictions now."""
        self.changes.count += 1
        for cut in self._cuts.values():
            cut.until = min(cut.until, now)

    def words(self, worker: str, now: float) -> Reason:
        """Say what an evicted worker waits for."""
        cut = self._cuts.get(worker)
        left_s = cut.until - now if cut else 0.0
        when = f"in {left_s:.0f} s" if left_s > 0 else "in the next global round"
        reason = cut.reason if cut else NO_REASON
        why = f"{reason}, and " if reason else ""
        return Why.CUT(why=why, worker=worker, when=when, reason=reason, check=CHECK)

    def capture(self, now: float) -> dict[str, list[Any]]:
        """Return the state, for JSON."""
        return {w: [*cut.reason.to_json(), cut.until - now, cut.wait_s] for w, cut in self._cuts.items()}

    def restore(self, state: dict[str, list[Any]], now: float) -> None:
        """Restore what :meth:`capture` returned."""
        self._cuts = {
            worker: _Cut(Reason(words, code), now + left_s, wait_s)
            for worker, (words, code, left_s, wait_s) in state.items()
        }


class Ways:
    """Which nodes have tried to dial each other, and which cannot.

    If one of two nodes can dial the other, they exchange directly, in both directions. If neither can, they exchange
    through the relay. ``missed``: pairs of nodes of which the first cannot dial the second.
    """

    def __init__(self, tried: Iterable[int] = (), missed: Iterable[Sequence[int]] = ()) -> None:
        self.changes = Changes()
        self._tried = set(tried)
        self._missed: set[Pair] = {(a, b) for a, b in missed}

    def found(self, nodes: Collection[int], missed: Sequence[int]) -> list[Pair]:
        """Store what members have found on ``nodes`` that tried each other; return the pairs that are new to the relay.

        ``missed``: one pair after the other, a node and another one that it could not dial.
        """
        self.changes.count += 1
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
