"""The ledger: which iterations are granted, given back and made."""

from collections.abc import Iterable

from lsgd.server.roster import Member, NodeQueue

LOOKAHEAD_SHARE = 4
"""What is granted ahead is at most one part in so many of an equal share of the tokens that are left."""


class Ledger:
    """The exact count, the run's queue of tokens, and through nodes and members theirs.

    The count is ``base`` and what all incarnations have reported. No queue is below zero. What is left in the run's
    queue does not exceed the limit less what is made and granted.

    Args:
        count: iterations of the run.
        base: those of them that no incarnation has reported: a checkpoint's, or, if negative, those that are lost.
        unheard: iterations that may have been made and not heard of when the server was started again.

    Attributes:
        tokens: iterations that the run may grant until its next global round.
        lent: in order, the members that may have more than their next iteration.
        released: tokens came back, so that held requests may find something now.
    """

    def __init__(self, count: int = 0, base: int = 0, unheard: int = 0) -> None:
        self.count, self.base, self.unheard = count, base, unheard
        self.tokens = 0.0
        self.lent: dict[Member, None] = {}
        self.released = False

    def grant(self, member: Member, queue: NodeQueue, most: int, live: int) -> int:
        """Grant ``most`` iterations, or as many as are the part of one of ``live`` members, and return how many.

        It is one at least: both queues have it (:meth:`has_token`).
        """
        iterations = 1
        if most > 1:
            share = min(self.tokens / live, queue.tokens / len(queue.members)) / LOOKAHEAD_SHARE
            iterations = max(1, min(most, int(share)))
        self.tokens -= iterations
        queue.tokens -= iterations
        member.granted += iterations
        if member.granted > 2:
            self.lent[member] = None
        return iterations

    def has_token(self, queue: NodeQueue) -> bool:
        """Whether both queues have one."""
        return self.tokens >= 1 and queue.tokens >= 1

    def begin_round(self, members: list[Member], tokens: float, queues: Iterable[NodeQueue], per_member: float) -> None:
        """Grant an iteration to each member of a round, from the run's queue filled to ``tokens``.

        The ``queues`` of nodes are filled to ``per_member``, from which the round takes nothing.
        """
        self.tokens = tokens - len(members)
        for queue in queues:
            queue.tokens = per_member * len(queue.members)
        for member in members:
            member.granted += 1

    def settle(self, member: Member, done: int, queue: NodeQueue | None, *, stopping: bool) -> None:
        """Count what a member has done; what it was granted and has not used goes back to the queues.

        Without a ``queue`` it was evicted, and the next global round counts what is left anew.
        """
        self.use(member, done)
        if member.granted and queue is not None and not stopping:
            self.tokens += member.granted
            queue.tokens += member.granted
            self.released = True
        member.granted = 0

    def use(self, member: Member, done: int, keep: int = 0) -> None:
        """Count what a member has done: of what it was granted but for the last ``keep``, else of the run's queue."""
        made = max(0, done - member.done)
        if made:
            used = min(made, max(0, member.granted - keep))
            self.count += made
            member.done += made
            member.granted -= used
            self.tokens = max(0.0, self.tokens - (made - used))

    def revoke(self, member: Member) -> None:
        """Forget what was granted to a member in a round that it has dropped."""
        member.granted = 0

    def set_aside(self, stragglers: list[Member]) -> None:
        """Keep what they may make: one each at least, and once what was not heard of before a restart."""
        for member in stragglers:
            member.granted = max(1, member.granted)
        stragglers[0].granted += self.unheard
        self.unheard = 0

    def at_risk(self, members: Iterable[Member]) -> int:
        """Return the most iterations that live members can make before anything else is captured."""
        return self.unheard + int(self.tokens) + sum(m.granted for m in members if m.live)

    def withdraw(self) -> None:
        """Take back what is not granted."""
        self.tokens = 0.0

    def shorten(self, limit: float, members: Iterable[Member]) -> None:
        """Withdraw what a changed limit does not cover."""
        left = limit - self.count - sum(m.granted for m in members)
        self.tokens = max(0.0, min(self.tokens, left))

    def go_back(self, count: int) -> None:
        """Go on after ``count`` iterations, those of a checkpoint."""
        self.base += count - self.count
        self.count = count
