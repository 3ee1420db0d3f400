"""Who serves the run when its global server is gone: pure functions of times, terms and counts.

docs/concepts/failover.md has the rule.
"""

import enum
from collections.abc import Collection, Sequence

from lsgd.protocol.messages import Term

SILENT_S = 5.0
"""The first standby serves after this silence of the global server, if its host does not answer either."""

RESTART_S = 30.0
"""The same if the host answers: a launcher there may be about to restart the server."""

NEXT_S = 6.0
"""How much longer the next standby waits, for the one before it."""


def takes_over(rank: int, silent_s: float, answers: bool | None) -> bool:
    """Whether a standby serves from now on.

    Args:
        rank: its number among the standbys, from 0.
        silent_s: for how long it has not heard the global server.
        answers: whether the server's host does; None: that is not known yet.
    """
    return answers is not None and silent_s >= (RESTART_S if answers else SILENT_S) + rank * NEXT_S


def is_minority(nodes: int, here: int) -> bool:
    """Whether ``here`` of so many ``nodes`` are a part that waits for the others; of two, one is none."""
    return nodes > 2 and 2 * here <= nodes


def successor(terms: Sequence[Term], node: int) -> tuple[Term, ...]:
    """Return the terms of a server on ``node`` that continues the run of another with these."""
    return (*terms, Term(terms[-1].number + 1, node))


class Move(enum.Enum):
    """What a node does when it hears of another term than its own."""

    STAY = "it is no later one"
    CONTINUE = "it continues the node's own: workers ask again there"
    ANEW = "it does not: workers join as newcomers"


def move(mine: Term, terms: Sequence[Term]) -> Move:
    """Return what a node in the term ``mine`` does when it hears from a server with these ``terms``."""
    if not terms or terms[-1] <= mine:
        return Move.STAY
    return Move.CONTINUE if mine in terms or not mine.number else Move.ANEW


class Outcome(enum.Enum):
    """What a server does when it meets another one of its run."""

    WAIT = "the other one decides, whose term is earlier; or none of the two has a model yet, or knows that"
    GIVE_UP = "the other part continues"
    GO_ON = "this part continues, in a term after both"


def meet(mine: Term, count: int, theirs: Term, their_count: int, beaten: Collection[Term]) -> Outcome:
    """Return what a server does that meets another part of its run.

    Args:
        mine: its own term.
        count: its iterations; -1: it does not know yet whether a worker with its model is there.
        theirs: the other one's term.
        their_count: the other one's iterations, likewise.
        beaten: terms that the other one has met, and that have to give up.
    """
    if mine in beaten:
        return Outcome.GIVE_UP
    if theirs <= mine or min(count, their_count) < 0 or count == their_count == 0:
        return Outcome.WAIT
    return Outcome.GIVE_UP if their_count > count else Outcome.GO_ON
