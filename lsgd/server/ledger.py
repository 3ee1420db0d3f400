"""The ledger of iterations: the exact count, and the tokens from which each is granted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lsgd.server.roster import Member, NodeQueue

LOOKAHEAD_SHARE = 4
"""A grant ahead is at most this fraction (one part in so many) of an equal share of the tokens left."""


@dataclass(slots=True, eq=False)
class Account:
    """What a worker was granted, and what it has made of that; the ledger has the sums.

    Args:
        granted: iterations granted and not yet reported done; for a STRAGGLER that has been silent since the server
            was restarted, as many as it may have made.
        done: iterations that it has reported.
        shared: how many of them no longer depend on it: they are in the model of a global round that all have
            completed, or are lost.
    """

    granted: int = 0
    done: int = 0
    shared: int = 0

    def use(self, done: int, keep: int) -> tuple[int, int]:
        """Count what it has ``done``; return how much more that is, and how much of that its grant did not cover.

        ``keep``: iterations of its grant that are not touched.
        """
        made = max(0, done - self.done)
        used = min(made, max(0, self.granted - keep))
        self.done += made
        self.granted -= used
        return made, made - used

    def share(self, done: int) -> None:
        """Note that the first ``done`` iterations no longer depend on it."""
        self.shared = max(self.shared, done)


class Ledger:
    """The exact count and the run's queue of tokens; it also changes the queues of nodes and the grants of members.

    The count is ``base`` plus what all incarnations have reported. It is what the run's model has, or will have.
    No queue is below zero. The run's queue never exceeds the limit less what is made and granted.

    Args:
        count: iterations made.
        base: those that no incarnation has reported, a checkpoint's, less those that were reported and are lost.
        unheard: iterations that may have been made but not reported before the server was restarted.

    Attributes:
        tokens: iterations that the run may grant until its next global round.
        lent: members that may have more than their next iteration, in order.
        released: whether tokens came back, so that held requests may be granted now.
    """

    def __init__(self, count: int = 0, base: int = 0, unheard: int = 0) -> None:
        self.count, self.base, self.unheard = count, base, unheard
        self.tokens = 0.0
        self.lent: dict[Member, None] = {}
        self.released = False

    def grant(self, member: Member, queue: NodeQueue, most: int, live: int) -> int:
        """Grant up to ``most`` iterations, limited to the share of one of ``live`` members, and return how many.

        At least one: the caller has checked that both queues have it.
        """
        iterations = 1
        if most > 1:
            share = min(self.tokens / live, queue.tokens / len(queue.members)) / LOOKAHEAD_SHARE
            iterations = max(1, min(most, int(share)))
        self.tokens -= iterations
        queue.tokens -= iterations
        member.account.granted += iterations
        if member.granted > 2:
            self.lent[member] = None
        return iterations

    def begin_round(
        self, members: Sequence[Member], tokens: float, queues: Iterable[NodeQueue], per_member: float
    ) -> None:
        """Grant an iteration to each member of a round, from the run's queue filled to ``tokens``.

        The ``queues`` of nodes are filled to ``per_member`` for each member; the round takes nothing from them.
        """
        self.tokens = tokens - len(members)
        for queue in queues:
            queue.tokens = per_member * len(queue.members)
        for member in members:
            member.account.granted += 1

    def settle(
        self,
        member: Member,
        done: int,
        queues: Mapping[int, NodeQueue],
        limit: float,
        members: Iterable[Member],
        *,
        stopping: bool,
    ) -> None:
        """Count what a member has done, and give its unused grant back to the run's queue and its node's.

        The run's queue takes no more of it than is left to ``limit``: a member that was set aside after a restart may
        have been granted what others had made. For one outside the generation, the next global round recounts what is
        left. ``queues``: by node.
        """
        self.use(member, done)
        unused, member.account.granted = member.granted, 0
        if unused and member.rank >= 0 and not stopping:
            self.tokens += unused
            queues[member.join.node].tokens += unused
            self.released = True
            self.shorten(limit, members)

    def use(self, member: Member, done: int, keep: int = 0) -> None:
        """Count what a member has done; take it from its grant except the last ``keep``, then from the run's queue.

        What no grant covers was made before the server was restarted, if anything was unheard then.
        """
        made, uncovered = member.account.use(done, keep)
        self.count += made
        self.unheard -= min(uncovered, self.unheard)
        self.tokens = max(0.0, self.tokens - uncovered)

    def revoke(self, member: Member) -> None:
        """Forget what was granted to a member in a round that it has dropped."""
        member.account.granted = 0

    def lose(self, iterations: int) -> None:
        """Count no longer what was made, and no model of the run will have."""
        self.count -= iterations
        self.base -= iterations

    def set_aside(self, stragglers: list[Member]) -> None:
        """Keep the grants of stragglers; after a restart at least one each, plus once what was unheard before it."""
        if self.unheard:
            for member in stragglers:
                member.account.granted = max(1, member.granted)
        stragglers[0].account.granted += self.unheard
        self.unheard = 0

    def at_risk(self, members: Iterable[Member]) -> int:
        """Return the most iterations that live members can make before the next capture."""
        return self.unheard + int(self.tokens) + sum(m.granted for m in members if m.live)

    def withdraw(self) -> None:
        """Take back all tokens that are not granted."""
        self.tokens = 0.0

    def shorten(self, limit: float, members: Iterable[Member]) -> None:
        """Withdraw what the limit does not cover, one that was changed, say."""
        left = limit - self.count - self.unheard - sum(m.granted for m in members)
        self.tokens = max(0.0, min(self.tokens, left))

    def go_back(self, count: int) -> None:
        """Continue after ``count`` iterations, those of a checkpoint."""
        self.base += count - self.count
        self.count = count
