"""What goes wrong in benchmarks/soak, and when: all of it follows from a seed."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

WEIGHTS = {
    "kill worker": 3,
    "kill global server": 1,
    "freeze worker": 2,
    "freeze global server": 1,
    "freeze launcher": 2,
    "cut node": 1,
    "cut one way": 2,
    "cut pair": 1,
    "lose node 0": 1,
    "fill disk": 2,
    "junk garbage": 1,
    "junk idle": 1,
}
"""Every fault, and how many of it are in a bag. A bag is emptied in random order before the next one is filled."""

SECONDS = (1.0, 25.0)
PAUSE_S = (4.0, 10.0)
APART_S = 4.0
SIZES = (1, 1, 1, 1, 2, 2, 3)
"""How many faults overlap, each as likely as the others."""

NOT_TOGETHER = (
    {"fill disk", "kill global server"},
    {"fill disk", "lose node 0"},
    {"kill global server", "lose node 0"},
    {"freeze global server", "lose node 0"},
    {"freeze launcher", "lose node 0"},
    {"cut node", "lose node 0"},
)
"""Pairs that nothing is promised for: a server that starts needs a journal and the disk, or a standby that hears it."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        what: a key of :data:`WEIGHTS`.
        target: a process (``node1/worker0``), a node, or a link (``node0 -> node2``, ``node0 - node2``).
        delay_s: after the beginning of its burst.
        seconds: how long it lasts; a kill is over at once.
    """

    what: str
    target: str
    delay_s: float
    seconds: float

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.what}: {self.target}{lasts}"


@dataclass(frozen=True)
class Burst:
    """Faults that overlap or follow one another closely, and a pause in which all is well."""

    faults: tuple[Fault, ...]
    pause_s: float


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the faults that ``names`` stand for: ``all``, ``none``, the first word of some, or whole names.

    Raises:
        ValueError: a name stands for nothing.
    """
    found = []
    for name in names:
        matching = [what for what in WEIGHTS if name in ("all", what, what.split()[0])]
        if not matching and name != "none":
            raise ValueError(f"{name!r} is no fault; there are all, none, and: {', '.join(WEIGHTS)}")
        found += matching
    return tuple(dict.fromkeys(found))


def schedule(seed: int, whats: Iterable[str], nodes: int, workers: int) -> Iterator[Burst]:
    """Yield bursts without end; the same seed gives the same ones."""
    chance = random.Random(seed)
    drawn = _draw(chance, tuple(whats))
    following = next(drawn)
    while True:
        burst = [following]
        size = chance.choice(SIZES)
        while True:
            following = next(drawn)
            names = {*burst, following}
            if len(burst) == size or len(names) == len(burst) or any(pair <= names for pair in NOT_TOGETHER):
                break
            burst.append(following)
        delays = [0.0, *sorted(chance.uniform(0, APART_S) for _ in burst[1:])]
        faults = tuple(_fault(chance, what, d, nodes, workers) for what, d in zip(burst, delays, strict=True))
        yield Burst(faults, chance.uniform(*PAUSE_S))


def blocked(fault: Fault, names: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Return the directions, as (from, to), in which a cut loses every packet; ``names`` are those of all nodes."""
    pairs = itertools.permutations(names, 2)
    if fault.what == "cut node":
        return frozenset(pair for pair in pairs if fault.target in pair)
    if fault.what == "cut pair":
        return frozenset(itertools.permutations(fault.target.split(" - "), 2))
    if fault.what != "cut one way":
        return frozenset()
    source, _, to = fault.target.partition(" -> ")
    return frozenset(pair for pair in pairs if pair[0] == source and to in ("all", pair[1]))


def _draw(chance: random.Random, whats: tuple[str, ...]) -> Iterator[str]:
    while True:
        bag = [what for what in whats for _ in range(WEIGHTS[what])]
        chance.shuffle(bag)
        yield from bag


def _fault(chance: random.Random, what: str, delay_s: float, nodes: int, workers: int) -> Fault:
    node = f"node{chance.randrange(nodes)}"
    other = f"node{chance.choice([i for i in range(nodes) if f'node{i}' != node])}"
    verb, _, whom = what.partition(" ")
    if verb == "fill":
        node = chance.choice(["node0", node])  # where the journal is
    target = {
        "worker": f"{node}/worker{chance.randrange(workers)}",
        "global server": "global",
        "node 0": "node0",
        "launcher": f"{node}/launcher",
        "one way": f"{node} -> {chance.choice([other, 'all'])}",
        "pair": " - ".join(sorted((node, other))),
        "garbage": "all ports",
        "idle": "all ports",
    }.get(whom, node)
    return Fault(what, target, delay_s, 0.0 if verb == "kill" else chance.uniform(*SECONDS))
