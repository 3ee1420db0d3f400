"""What ``lsgd up`` does next, from what it knows: no clock, no socket, no disk.

1. A run of this machine's own that died is resumed, whoever else is there.
2. With an address (``--at``), the machine there is dialed.
3. A machine of this network that waits, or has a run, is joined. Of several, the one that is known; of several known
   ones, or several strangers, nobody chooses but the user.
4. Of machines that look at the same time, the one with the lowest identity begins.
5. If nobody is there after some seconds, this machine begins a run, and waits for others.
6. Of two that wait, because they saw each other late, the one with the higher identity goes to the other, unless
   somebody is with it already. It also leaves its own place for the run of a machine that it knows.
"""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from lsgd.pairing.discovery import Advert, Kind

LOOK_S = 3.0
"""How long a machine looks before it begins a run. An answer takes 0.1 s, and its loss another second."""


@dataclass(frozen=True)
class Facts:
    """What a machine knows.

    Args:
        identity: its own.
        looked_s: for how long it has looked at the network.
        at: address that the user gave; empty: none.
        new: whether the user wants a run of this machine's own.
        died: folder of a run of its own that died; None: there is none.
        seen: what the others show.
        known: identities of the machines with which it has paired.
        unreachable: identities of those that it has dialed in vain since they were last seen to change.
        waits: whether it has begun, and waits for others.
        guests: how many others are with it.
    """

    identity: str
    looked_s: float
    at: str = ""
    new: bool = False
    died: Path | None = None
    seen: tuple[Advert, ...] = ()
    known: Set[str] = frozenset()
    unreachable: Set[str] = frozenset()
    waits: bool = False
    guests: int = 0


@dataclass(frozen=True)
class Look:
    """Look on."""


@dataclass(frozen=True)
class Begin:
    """Begin a run, and wait for others; or go on waiting."""


@dataclass(frozen=True)
class Resume:
    """Resume the run in a folder."""

    folder: Path


@dataclass(frozen=True)
class Dial:
    """Join the machine at an address that the user gave, or one that was seen."""

    at: str = ""
    advert: Advert | None = None

    @property
    def who(self) -> str:
        """Its name, or the address."""
        return self.advert.name if self.advert else self.at


@dataclass(frozen=True)
class Choose:
    """The user has to say which one."""

    among: tuple[Advert, ...]


Step = Look | Begin | Resume | Dial | Choose


def next_step(facts: Facts) -> Step:
    """Return what to do now, by the rules above."""
    if facts.died and not facts.waits:
        return Resume(facts.died)
    if facts.at:
        return Dial(at=facts.at)
    others = [a for a in facts.seen if a.identity != facts.identity and a.identity not in facts.unreachable]
    if facts.new or facts.guests:
        return Begin()
    if facts.waits:
        runs = [a for a in others if a.kind is Kind.RUNS and a.identity in facts.known]
        lower = [a for a in others if a.kind is Kind.WAITS and a.identity < facts.identity]
        better = _best(runs, facts) or _best(lower, facts)
        return better if isinstance(better, Dial) else Begin()
    hosts = [a for a in others if a.kind in (Kind.WAITS, Kind.RUNS)]
    if found := _best(hosts, facts):
        return found
    looking = [a.identity for a in others if a.kind is Kind.LOOKS]
    if facts.looked_s < LOOK_S or (looking and min(looking) < facts.identity and facts.looked_s < 2 * LOOK_S):
        return Look()
    return Begin()


def _best(hosts: list[Advert], facts: Facts) -> Dial | Choose | None:
    """Return the only one, the only known one, or the question."""
    known = [advert for advert in hosts if advert.identity in facts.known]
    for some in (known, hosts):
        if len(some) == 1:
            return Dial(advert=some[0])
    return Choose(tuple(sorted(hosts, key=lambda advert: advert.name))) if hosts else None
