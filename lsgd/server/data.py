"""What members say of their data: no two learn the same, and what lsgd divides is dealt alike by all.

This file implements rules 17 and 18 at the top of :mod:`lsgd.server.coordinator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lsgd.protocol.messages import Data, Dealt
from lsgd.server.changes import Changes
from lsgd.server.reasons import NO_REASON, Reason, Why
from lsgd.server.roster import Member

MAX_SITES, MAX_DEALS, MAX_PASSES = 64, 16, 8
"""How many places of the script are remembered, how many deals of each, and how many passes of each deal."""

REMEDIES = {
    "length": "give all workers the same dataset",
    "rows": "split it before the join, or with a generator that all seed alike: "
    "random_split(dataset, parts, torch.Generator().manual_seed(0))",
    "seed": "pass the same seed on all workers",
    "sampler": "make the same sampler on all workers",
    "order": "let the sampler draw the same order on all workers, without the rank in its seed or its indices",
    "stream": "open the same stream on all workers",
}
"""What to do if one of these facts differs."""


GRADIENT = "the gradient of their first steps is the same"
ORDER = "one came later, and their first steps have the same data in the same order"


Differing = Mapping[str, tuple[str, str]]
"""What differs, by name: a member's own, and another's."""


class FirstStep(NamedTuple):
    """What a member has said of its first steps: who it is, and digests of its data and its random numbers."""

    worker: str
    data: str = ""
    noise: str = ""
    late: bool = False

    def compared_to(self, other: FirstStep) -> str:
        """Return in words what else is equal to that of another member with the same gradients, and what is not."""
        pairs = (("the data, in the same order", self.data, other.data), ("the noise", self.noise, other.noise))
        known = [(what, own == its) for what, own, its in pairs if own and its]
        equal = " and ".join(what for what, same in known if same)
        differ = " and ".join(what for what, same in known if not same)
        return (f", and so is {equal}" if equal else "") + (f", but not {differ}" if differ else "")


@dataclass(eq=False)
class Deal:
    """Data as members divide it.

    Attributes:
        facts: by name, equal on all members.
        orders: digests of the orders of its last passes, by number.
    """

    facts: dict[str, str]
    orders: dict[int, str] = field(default_factory=dict)

    def compared_to(self, said: Dealt) -> Differing:
        """Return the facts of which a member says otherwise."""
        pairs = {name: (said.facts.get(name, ""), self.facts.get(name, "")) for name in {**said.facts, **self.facts}}
        return {name: (own, other) for name, (own, other) in pairs.items() if own != other}

    def order_of(self, said: Dealt) -> str:
        """Return the digest of the order of a member's pass: its own, if nobody else has come to that yet."""
        order = self.orders.setdefault(said.epoch, said.order)
        if len(self.orders) > MAX_PASSES:
            del self.orders[min(self.orders)]
        return order


@dataclass(eq=False)
class Site:
    """The data that members divide at one place of the script.

    Attributes:
        deals: in the order in which they were first said. There are several if the script divides other data there
            later, or a list of it.
        reached: number of the last of these that each member has come to; negative: it is no longer there.
    """

    deals: list[Deal] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)

    def compare(self, worker: str, said: Dealt) -> tuple[str, Differing] | None:
        """Note what a member says; return who has said otherwise, and what differs."""
        reached = self.reached.get(worker)
        found = next((number for number, deal in enumerate(self.deals) if deal.facts == said.facts), None)
        if found is None:
            due = 0 if reached is None else reached + 1  # a newcomer's may be any
            if 0 <= due < len(self.deals):
                like = self.deals[due:] if reached is None else [self.deals[due]]
                return self._other(worker, due), min((each.compared_to(said) for each in like), key=len)
            self._add(Deal(dict(said.facts)))
            found = len(self.deals) - 1
        self.reached[worker] = max(found, self.reached.get(worker, found))
        if said.order and (order := self.deals[found].order_of(said)) != said.order:
            return self._other(worker, found), {f"order of pass {said.epoch}": (said.order, order)}
        return None

    def _add(self, deal: Deal) -> None:
        self.deals.append(deal)
        if len(self.deals) > MAX_DEALS:
            del self.deals[0]
            self.reached = {worker: number - 1 for worker, number in self.reached.items()}

    def _other(self, worker: str, number: int) -> str:
        """Return a member that has come to a deal."""
        others = (each for each, reached in self.reached.items() if reached >= number and each != worker)
        return next(others, "a worker that has left")


@dataclass(eq=False)
class DataBook:
    """What members have said of their data; the journal keeps it.

    Attributes:
        firsts: first steps by the digest of what was learned, or of what was drawn.
        sites: data that is divided, by the place in the script.
    """

    firsts: dict[str, FirstStep] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes."""
        sites = {
            where: [[[deal.facts, [*deal.orders.items()]] for deal in site.deals], site.reached]
            for where, site in self.sites.items()
        }
        return {"firsts": {digest: [*first] for digest, first in self.firsts.items()}, "sites": sites}

    @classmethod
    def from_json(cls, saved: Mapping[str, Mapping[str, Sequence[Any]]]) -> DataBook:
        """Return the book that :meth:`to_json` described."""
        sites = {
            where: Site([Deal(dict(facts), dict(orders)) for facts, orders in deals], dict(reached))
            for where, (deals, reached) in saved["sites"].items()
        }
        return cls({digest: FirstStep(*first) for digest, first in saved["firsts"].items()}, sites)

    def learned(self, member: Member, said: Data) -> Reason:
        """Note what a member has learned, or drawn, in its first steps; return what is wrong with it, or nothing.

        What was drawn is compared with newcomers only: their gradients of first steps are of another model.
        """
        own = FirstStep(member.worker, said.data, said.noise, member.entry.late)
        if said.digest not in self.firsts:
            self.changes.count += 1
        other = self.firsts.setdefault(said.digest, own)
        drawn = said.digest == said.data
        if other.worker == own.worker or (drawn and not (own.late or other.late)):
            return NO_REASON
        what = ORDER if drawn else GRADIENT
        return Why.SAME_BATCHES(worker=own.worker, other=other.worker, same=what + own.compared_to(other) * (not drawn))

    def dealt(self, member: Member, said: Dealt) -> Reason:
        """Note how a member deals data; return what is wrong with it, or nothing."""
        self.changes.count += 1
        if len(self.sites) == MAX_SITES and said.where not in self.sites:
            del self.sites[next(iter(self.sites))]
        found = self.sites.setdefault(said.where, Site()).compare(member.worker, said)
        if found is None:
            return NO_REASON
        other, differing = found
        differ = "; ".join(_words(name, *pair) for name, pair in differing.items())
        remedies = dict.fromkeys(REMEDIES[kind] for name in differing if (kind := name.split()[0]) in REMEDIES)
        remedy = "; ".join(remedies) or "make the same data on all workers"
        who = {"worker": member.worker, "other": other, "where": said.where}
        return Why.OTHER_DEAL(**who, differ=differ, remedy=remedy)

    def forget(self, worker: str) -> None:
        """Forget a member that has left, and what it alone has said."""
        self.firsts = {digest: first for digest, first in self.firsts.items() if first.worker != worker}
        for site in self.sites.values():
            site.reached.pop(worker, None)
        self.sites = {where: site for where, site in self.sites.items() if site.reached}


def _words(name: str, own: str, other: str) -> str:
    """Return in words how a fact differs; digests say nothing to a reader."""
    if name in ("rows", "order") or name.startswith("order of"):
        return f"other {name}" if name == "rows" else f"another {name}"
    return f"{name} {own or '-'} and {other or '-'}"
